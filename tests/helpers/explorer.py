"""Points at which the formulas of the page "explore" are compared with the library."""

from __future__ import annotations

import random
from typing import Any

import torch

import attnzoo
from helpers.cases import CASES
from scripts.site.pages import in_explorer

POINTS = 12  # per variant
Point = dict[str, Any]

# The names, parameters and default values; for each point the logits, weights and slope.
RUN = """
const answer = points => ({
  variants: Object.fromEntries(Object.entries(F.VARIANTS).map(([name, x]) => [name, x.params])),
  left_out: F.LEFT_OUT,
  model: F.MODEL,
  problems: points.map(({ name, params }) => Object.entries(params).map(
    ([key, value]) => F.VARIANTS[name].params[key].kind === "number"
      ? F.problem(F.VARIANTS[name].params[key], value) : null)),
  results: points.map(({ name, params, model }) => {
    const z = F.logits(model), { w, slope } = F.weights(name, z, params);
    return { z: [...z], w: [...w], slope, measures: F.measures({ w, slope }) };
  }),
});
"""


def points() -> list[Point]:
    """Random logits and parameters for each variant of the explorer."""
    draw = random.Random(0)
    made = []
    for name in in_explorer():
        case = CASES[name]
        samples: list[dict[str, Any]] = [{}, *case.settings]
        samples += [
            {key: draw.uniform(*ends) for key, ends in case.learned.items()}
            for _ in range(POINTS - len(samples))
        ]
        for params in samples:
            model = dict(
                n=draw.choice([2, 3, 17, 256, 1000]), gap=round(draw.uniform(-1, 6), 3),
                scale=round(draw.uniform(0.1, 2), 3), noise=draw.choice([0, 0.5, 1, 2]),
            )  # fmt: skip
            made.append({"name": name, "params": params, "model": model})
    return made


def check(point: Point, result: dict[str, Any]) -> None:
    """Compare weights and slope with `attnzoo.probabilities` in fp64 to 1e-6."""
    z = torch.tensor(result["z"], dtype=torch.float64, requires_grad=True)
    variant = attnzoo.get_variant(point["name"])
    required = variant.example(z.numel()) if variant.example else {}
    needed = {p.name: required[p.name] for p in variant.params if p.default is attnzoo.REQUIRED}
    w = attnzoo.probabilities(z, point["name"], **{**needed, **point["params"]})
    (slope,) = torch.autograd.grad(w[0], z)
    assert len(result["w"]) == point["model"]["n"]
    worst = (w.detach() - torch.tensor(result["w"], dtype=torch.float64)).abs().max()
    assert worst < 1e-6, (point, worst)
    assert abs(slope[0].item() - result["slope"]) < 1e-6, (point, slope[0].item(), result["slope"])
