"""All combinations of several factors, of which few are quick."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def crossed(*factors: Iterable[Any]) -> list[ParameterSet]:
    """Test parameters, slow if more than one factor has another level than its first.

    So every level occurs in a quick test, together with the first levels of the other factors. A
    level may be a value or a `pytest.param`, whose marks are kept.
    """
    levels = [[_parameter(level) for level in factor] for factor in factors]
    cases = []
    for chosen in product(*map(enumerate, levels)):
        others = sum(number > 0 for number, _ in chosen)
        marks = [mark for _, level in chosen for mark in level.marks]
        cases.append(
            pytest.param(
                *(value for _, level in chosen for value in level.values),
                marks=[*marks, *[pytest.mark.slow] * (others > 1)],
                id="-".join(str(level.id) for _, level in chosen),
            )
        )
    return cases


def _parameter(level: Any) -> ParameterSet:
    """A level as a parameter with an id."""
    if not isinstance(level, ParameterSet):
        return pytest.param(level, id=str(level))
    return level if level.id else pytest.param(
        *level.values, marks=level.marks, id="-".join(map(str, level.values))
    )  # fmt: skip
