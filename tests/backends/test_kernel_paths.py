"""The quick test cases cover every kernel path of every variant."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import test_backends
import test_decode
import test_flash
import test_flash_linear

from helpers.kernel_paths import ROUNDS, Level, path_of, supports

LINEAR = [Level(variant, "default") for variant in test_flash_linear.LINEAR]


def of_backends(*backends: str) -> tuple:
    cases = [case for case in test_backends.cases() if case.values[2] == backends]
    factors = dict(test_backends.factors_of("softmax", backends))
    kinds = test_backends.ARRAYS[backends][0]
    return cases, test_backends.levels(backends), factors, kinds


ARRAYS = {
    "flash": (
        [*test_flash.quick_cases(), *test_flash.variant_cases()],
        test_flash.levels(),
        test_flash.FACTORS | {"shape": ((1, 1), (17, 63))},  # the shapes of both arrays
        ("pairwise",),
    ),
    "decode": (list(test_decode.cases()), test_decode.levels(), test_decode.FACTORS, ("pairwise",)),
    "flash_linear": (
        list(test_flash_linear.cases()),
        LINEAR,
        test_flash_linear.FACTORS,
        ("linear",),
    ),
    "eager and tiled": of_backends("eager", "tiled"),
    "sdpa": of_backends("sdpa"),
    "linear": of_backends("linear"),
}


def is_quick(case: Any) -> bool:
    return not any(mark.name == "slow" for mark in case.marks)


def settings_of(case: Any) -> set[tuple[str, Any]]:
    return {(name, value) for name, value in case.values[1].items() if name != "params"}


@pytest.mark.parametrize(("cases", "levels", "factors", "kinds"), ARRAYS.values(), ids=ARRAYS)
def test_quick_cases_contain_every_kernel_path_and_every_setting(
    cases: list[Any], levels: list[Level], factors: dict[str, tuple], kinds: tuple[str, ...]
) -> None:
    runs, met = Counter(), set()
    for case in filter(is_quick, cases):
        runs[path_of(Level(case.values[0], case.values[1]["params"]), kinds)] += 1
        met |= settings_of(case)
    for level in levels:
        assert runs[path_of(level, kinds)] >= ROUNDS, level
    for name in {*factors} - {"params"}:
        assert {(name, value) for value in factors[name]} <= met


@pytest.mark.parametrize(("cases", "levels", "factors", "kinds"), ARRAYS.values(), ids=ARRAYS)
def test_every_kernel_path_occurs_with_every_setting(
    cases: list[Any], levels: list[Level], factors: dict[str, tuple], kinds: tuple[str, ...]
) -> None:
    """Quick and slow cases together."""
    met: dict[Any, set] = {}
    for case in cases:
        variant, setting = case.values[:2]
        settings = met.setdefault(path_of(Level(variant, setting["params"]), kinds), set())
        settings |= settings_of(case)
    for level in levels:
        wanted = {
            (name, value)
            for name, values in factors.items()
            if name != "params"
            for value in values
            if supports({"params": level, name: value})
        }
        missing = wanted - met.get(path_of(level, kinds), set())
        assert not missing, f"{level}: {path_of(level, kinds)} is never combined with {missing}"


@pytest.mark.parametrize("name", ["flash", "decode", "flash_linear", "eager and tiled"])
def test_every_level_has_a_quick_case(name: str) -> None:
    """A level is a variant with parameters. Each needs its own case, even on a shared path."""
    cases, levels, _, _ = ARRAYS[name]
    quick = {Level(c.values[0], c.values[1]["params"]) for c in cases if is_quick(c)}
    assert set(levels) == quick
