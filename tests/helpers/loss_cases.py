"""Inputs of output layers, made from rows of a covering array, and their losses.

The losses are computed by the library and from the formulas in `loss_definitions`. A row chooses a
setting of `SETTINGS`, the sizes and the options; see `FACTORS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.losses import linear_loss
from helpers.cases import WITH_FORMS, has_rows, rand
from helpers.loss_definitions import dense_linear


@dataclass(frozen=True)
class Setting:
    """A variant with fixed parameters, and the range of each parameter that gets a gradient.

    per_token: whether learned parameters have the shape of target; else () or (1,).
    """

    variant: str
    params: dict[str, Any]
    learned: dict[str, tuple[float, float]]
    per_token: bool = False


GAIN = {"beta": (0.3, 0.9), "gamma": (-0.8, 0.8), "delta": (0.7, 1.2)}
SETTINGS = {
    "softmax": Setting("softmax", {}, {}),
    "ssmax": Setting("ssmax", {}, {}),
    "ssmax learned": Setting("ssmax", {}, {"s": (0.2, 0.6), "b": (-0.3, 0.3)}),
    "log_n": Setting("log_n", {"train_length": 20}, {}),
    "sink": Setting("sink", {}, {}),
    "sink learned": Setting("sink", {}, {"b": (-1.0, 3.0)}),
    "sink per token": Setting("sink", {}, {"b": (-1.0, 3.0)}, per_token=True),
    "taylor": Setting("taylor", {}, {}),
    "taylor 4": Setting("taylor", {"order": 4}, {}),
    "sparsemax": Setting("sparsemax", {}, {}),
    "entmax": Setting("entmax", {}, {}),
    "entmax 1.3": Setting("entmax", {"alpha": 1.3}, {}),
    "entmax 2": Setting("entmax", {"alpha": 2.0}, {}),
    "entmax learned": Setting("entmax", {}, {"alpha": (1.2, 1.9)}),
    "asentmax": Setting("asentmax", {}, {}),
    "asentmax learned": Setting("asentmax", {}, GAIN),
    "asentmax per token": Setting("asentmax", {}, GAIN, per_token=True),
    "sigmoid": Setting("sigmoid", {}, {}),
    "sigmoid learned": Setting("sigmoid", {}, {"bias": (-3.0, 1.0)}),
    "sigmoid of log n": Setting("sigmoid", {"bias": None}, {}),
    "topk": Setting("topk", {"top_k": 3}, {}),
}
WITH_LSE = ("softmax", "ssmax", "log_n", "sink", "topk")
FACTORS = (
    ("setting", tuple(SETTINGS)),
    ("tokens", ((), (1,), (7,), (3, 4), (300,))),
    ("classes", (1, 2, 37, 1500)),
    ("features", (1, 5, 64)),
    ("bias", (False, True)),
    ("softcap", (None, 4.0)),
    ("mask", ("none", "classes", "tokens")),
    ("weight", (False, True)),
    ("smoothing", (0.0, 0.1, 1.0)),
    ("penalty", (0.0, 0.02)),
    ("ignored", ("none", "some", "class 0")),
    ("reduction", ("mean", "sum", "none")),
)


def allowed(row: dict[str, Any]) -> bool:
    if "setting" not in row:
        return True
    variant = SETTINGS[row["setting"]].variant
    if row.get("penalty") and variant not in WITH_LSE:
        return False
    return not (row.get("smoothing") and variant == "topk")


def label(row: dict[str, Any]) -> str:
    sizes = "x".join(str(n) for n in (*row["tokens"], row["classes"], row["features"]))
    parts = [row["setting"], sizes, row["reduction"]]
    parts += [str(row["dtype"])[6:]] if "dtype" in row else []
    parts += [name for name in ("bias", "softcap", "weight", "penalty") if row[name]]
    parts += [f"{name} {row[name]}" for name in ("mask", "ignored") if row[name] != "none"]
    parts += [f"smoothing {row['smoothing']}"] if row["smoothing"] else []
    return "-".join(parts).replace(" ", "_")


@dataclass(frozen=True)
class Inputs:
    """``leaves``: the tensors that get a gradient. ``do``: the gradient given to backward."""

    variant: str
    leaves: dict[str, Tensor]
    options: dict[str, Any]
    do: Tensor

    def arguments(self, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict]:
        leaves = {
            name: (x if dtype is None else x.to(dtype)).detach().clone().requires_grad_()
            for name, x in self.leaves.items()
        }
        return leaves, {**self.options, **leaves}


def make(row: dict[str, Any], seed: int = 0) -> Inputs:
    setting, dtype = SETTINGS[row["setting"]], row.get("dtype", torch.float64)
    tokens, classes, features = row["tokens"], row["classes"], row["features"]
    leaves = {
        "input": 2 * rand(*tokens, features, seed=seed) / features**0.5,
        "linear_weight": 1.5 * rand(classes, features, seed=seed + 1),
    }
    if row["bias"]:
        leaves["linear_bias"] = rand(classes, seed=seed + 2)
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(seed)
    shape = tokens if setting.per_token else (1,) * (seed % 2)
    for name, (low, high) in setting.learned.items():
        leaves[name] = low + (high - low) * torch.rand(shape, generator=generator, dtype=exact)
    options: dict[str, Any] = {"softcap": row["softcap"], "reduction": row["reduction"]}
    options.update(label_smoothing=row["smoothing"], lse_penalty=row["penalty"], **setting.params)
    able = torch.ones(*tokens, classes, dtype=torch.bool)
    if row["mask"] != "none":
        options["class_mask"] = (
            rand(*(tokens * (row["mask"] == "tokens")), classes, seed=seed + 3) > 0
        )
        options["class_mask"][..., seed % classes] = True
        able = able & options["class_mask"]
    chances = able.double().reshape(-1, classes)
    target = torch.multinomial(chances, 1, generator=generator).reshape(tokens)
    if row["weight"]:
        weight = rand(classes, seed=seed + 4).abs()
        weight[classes // 2] = 0.0
        first = 1 if row["ignored"] == "class 0" else 0
        counted = target[target >= first]
        if counted.numel():
            weight[int(counted.flatten()[0])] = 0.5  # so that not all weights are 0
        options["weight"] = weight.to(dtype)
    if row["ignored"] == "some":
        target.view(-1)[1::3] = -100
    elif row["ignored"] == "class 0":
        options["ignore_index"] = 0
    if setting.variant == "topk" and dtype != torch.float64:
        hide_close_scores(leaves, options, target, setting.params["top_k"])
    do = rand(target.numel(), seed=seed + 5).reshape(tokens)
    return Inputs(setting.variant, leaves, {**options, "target": target}, do)


def hide_close_scores(
    leaves: dict[str, Tensor], options: dict[str, Any], target: Tensor, keep: int
) -> None:
    """Ignores the tokens in which rounding decides which classes are the ``keep`` largest."""
    arguments = {**leaves, **options, "target": target, "top_k": keep}
    with torch.no_grad():
        exact = dense_linear(variant="topk", **arguments)
    if keep >= exact.visible.shape[-1]:
        return
    ranked = exact.rows.scores.masked_fill(~exact.visible, float("-inf"))
    ranked = ranked.sort(dim=-1, descending=True).values
    close = ranked[:, keep - 1] - ranked[:, keep] < 1e-4
    target.view(-1)[close] = options.get("ignore_index", -100)


def differentiate(loss: Tensor, leaves: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """The loss and the gradients of all leaves, by name: "loss", "dinput", …"""
    upstream = inputs.do.to(loss.dtype) if inputs.options["reduction"] == "none" else None
    gradients = torch.autograd.grad(loss, list(leaves.values()), upstream)
    results = {"loss": loss.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.shape == leaf.shape
        results["d" + name] = gradient
    return results


def by_library(inputs: Inputs) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments()
    return differentiate(linear_loss(variant=inputs.variant, **arguments), leaves, inputs)


def by_definition(inputs: Inputs) -> dict[str, Tensor]:
    leaves, arguments = inputs.arguments(torch.float64)
    return differentiate(dense_linear(variant=inputs.variant, **arguments).loss, leaves, inputs)


# ---- one variant at a time, with small inputs ---

# The others have no pairwise form for rows, depend on positions, select classes by weight or can
# give the target weight 0.
WITHOUT = (
    "adaptive_temperature", "lssa", "relu", "relu2", "screening", "silu", "softpick", "top_p",
)  # fmt: skip
LOSSES = [v for v in WITH_FORMS if v not in WITHOUT and has_rows(v)]
# One variant for each way to compute a loss.
QUICK = ("softmax", "sink", "entmax", "sigmoid", "taylor", "topk")
LEARNED = {
    "ssmax": {"s": 0.3, "b": 0.1},
    "sink": {"b": 0.5},
    "entmax": {"alpha": 1.6},
    "sigmoid": {"bias": -0.5},
    "asentmax": {"beta": 0.5, "gamma": 0.3, "delta": 0.9},
}


def learned(variant: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=dtype).requires_grad_()
        for name, value in LEARNED.get(variant, {}).items()
    }


def some(variants: list[str] | tuple[str, ...], quick: tuple[str, ...] = QUICK) -> list[Any]:
    return [pytest.param(v, marks=[] if v in quick else [pytest.mark.slow]) for v in variants]


def tensors(tokens: int = 23, classes: int = 31, features: int = 5) -> tuple[Tensor, ...]:
    x, e, b = rand(tokens, features), rand(classes, features, seed=1), rand(classes, seed=2)
    return tuple(t.requires_grad_() for t in (x, e, b))


def targets(tokens: int = 23, classes: int = 31) -> Tensor:
    y = torch.arange(tokens) * 7 % classes
    y[3::5] = -100
    return y
