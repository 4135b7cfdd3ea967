"""`linear_loss` with classes, tokens or parameters that are sharded over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from helpers.covering import covering, each_setting
from helpers.loss_cases import FACTORS, allowed
from helpers.ranks import on_ranks
from helpers.sharded_losses import MISTAKES, differences, everything

CLASSES = ("classes", (3, 37, 1500))  # up to three ranks have classes
ROWS = covering(tuple(CLASSES if f[0] == "classes" else f for f in FACTORS), allowed)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    rows = [(i, row) for i, row in enumerate(ROWS) if row in each_setting(ROWS, 1)]
    results = on_ranks(2, everything, rows)
    assert all(isinstance(result, dict) for result in results), results
    return results


def test_sharded_classes_agree_with_the_definition(found: list[dict[str, Any]]) -> None:
    assert [of_rank["differences"] for of_rank in found] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_combinations_agree_with_the_definition(ranks: int) -> None:
    assert on_ranks(ranks, differences, list(enumerate(ROWS)), seconds=600) == [{}] * ranks


def test_statistics_output_layers_and_fsdp2(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for name, (have, want) in of_rank["pairs"].items():
            assert have == pytest.approx(want, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(("function", "text"), MISTAKES.items())
def test_mistakes_raise_on_all_ranks(
    found: list[dict[str, Any]], function: Callable[[int], str], text: str
) -> None:
    for of_rank in found:
        assert re.search(text, of_rank["errors"][function.__name__])
