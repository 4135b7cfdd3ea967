"""Every path that a form of a variant takes through a kernel is in the quick arrays."""

from __future__ import annotations

from typing import Any

import pytest
import test_backends
import test_decode
import test_flash
import test_flash_linear

from helpers.kernel_paths import Level, path_of, supports

LINEAR = [Level(variant, "default") for variant in test_flash_linear.LINEAR]


def of_backends(*backends: str) -> tuple:
    cells = [cell for cell in test_backends.cells() if cell.values[2] == backends]
    factors = dict(test_backends.factors_of("softmax", backends))
    kinds = test_backends.ARRAYS[backends][0]
    return cells, test_backends.levels(backends), factors, kinds


ARRAYS = {
    "flash": (
        list(test_flash.quick_cells()),
        test_flash.levels(),
        test_flash.FACTORS,
        ("pairwise",),
    ),
    "decode": (list(test_decode.cells()), test_decode.levels(), test_decode.FACTORS, ("pairwise",)),
    "flash_linear": (
        list(test_flash_linear.cells()),
        LINEAR,
        test_flash_linear.FACTORS,
        ("linear",),
    ),
    "eager and tiled": of_backends("eager", "tiled"),
    "sdpa": of_backends("sdpa"),
    "linear": of_backends("linear"),
}


def is_quick(cell: Any) -> bool:
    return not any(mark.name == "slow" for mark in cell.marks)


@pytest.mark.parametrize(("cells", "levels", "factors", "kinds"), ARRAYS.values(), ids=ARRAYS)
def test_every_path_meets_every_setting(
    cells: list[Any], levels: list[Level], factors: dict[str, tuple], kinds: tuple[str, ...]
) -> None:
    met: dict[Any, set] = {}
    for cell in filter(is_quick, cells):
        variant, row = cell.values[:2]
        settings = met.setdefault(path_of(Level(variant, row["params"]), kinds), set())
        settings |= {(name, value) for name, value in row.items() if name != "params"}
    for level in levels:
        wanted = {
            (name, value)
            for name, values in factors.items()
            if name != "params"
            for value in values
            if supports({"params": level, name: value})
        }
        missing = wanted - met.get(path_of(level, kinds), set())
        assert not missing, f"{level}: {path_of(level, kinds)} never meets {missing}"


@pytest.mark.parametrize("name", ["flash", "decode", "flash_linear", "eager and tiled"])
def test_every_variant_and_setting_runs(name: str) -> None:
    """Those whose path another variant stands for have a few rows of their own."""
    cells, levels, _, _ = ARRAYS[name]
    run = {Level(c.values[0], c.values[1]["params"]) for c in cells if is_quick(c)}
    assert set(levels) == run
