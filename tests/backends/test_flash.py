"""flash agrees with the fp64 definition: outputs and all gradients, over covering arrays.

The kernels run in Triton's interpreter. It is slow, so the arrays are smaller than those of
`test_backends`. Blocks of 32 to 128 rows and keys make several blocks of 128, whole ones and cut
ones under a mask. The quick arrays are those of the kernels' paths, see `kernel_paths`; slow are
an array of each variant's own, and 200 rows with more heads once per variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch

from helpers.agreement import disagreements, make
from helpers.cases import NO_LSE
from helpers.coverage_table import CONSTANT_PARAMETERS, FLASH, levels_of
from helpers.covering import covering, label
from helpers.kernel_paths import Level, quick_rows

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]


FACTORS = {
    "shape": ((1, 1), (63, 63), (128, 128), (17, 63), (128, 17), (1, 200)),
    "batch": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "mask_gradient": (False,),
    "span": ("full", "causal", "window", "pair"),
    "heads": ("2 heads", "gqa", "3 of 1"),
    "params": ("default",),
    "values": ("same",),
    "dims": ((16, 16), (40, 40), (64, 64), (40, 24)),
    "alibi": (False, True),
    "segments": (False, True),
    "dropout": (False,),
    "lse": (False, True),
    "layout": ("contiguous", "bnhd", "sliced"),
}
# Their exact gradient through the statistics is in tiled.
FIXED = ("adaptive_temperature",)


def allowed(row: dict[str, Any]) -> bool:
    """Long rows are slow: once, and with two heads."""
    queries, keys = row.get("shape", (1, 1))
    large = queries + keys > 100
    square = (queries, keys) == (128, 128) and row.get("heads", "2 heads") != "2 heads"
    return not square and not (large and row.get("batch", 1) == 2)


def factors(variant: str) -> tuple[tuple[str, tuple], ...]:
    learned = "per_head" if (variant, "flash") in CONSTANT_PARAMETERS else "learned"
    return tuple(levels_of(variant, FACTORS, variant not in FIXED, learned).items())


def levels() -> list[Level]:
    """All settings of all variants that run here."""
    return [Level(v, params) for v in FLASH for params in dict(factors(v))["params"]]


# For what adds no path: a mask under causality, groups of heads, gradients.
THIN = [
    {name: values[0] for name, values in FACTORS.items()}
    | {"shape": (63, 63), "span": "causal", "mask": "bool", "heads": "gqa", "dtype": dtype}
    for dtype in (torch.float32, torch.bfloat16)
]


def quick_cells() -> Iterator[Any]:
    for seed, (variant, row) in enumerate(quick_rows(FACTORS, levels(), allowed, THIN)):
        yield pytest.param(variant, row, seed, id=f"quick-{variant}-{label(row)}")


def cells() -> Iterator[Any]:
    """The array of each variant, in which all pairs of settings occur."""
    for variant in FLASH:
        for seed, row in enumerate(covering(factors(variant), allowed)):
            name = f"{variant}-{label(row)}"
            yield pytest.param(variant, row, seed, id=name, marks=pytest.mark.slow)


def long_cells() -> Iterator[Any]:
    """One row of 200 queries and keys per variant, with another span and mask each time."""
    spans, dtypes = cycle(("causal", "full", "window", "pair")), cycle(FACTORS["dtype"])
    masks, heads = cycle(("none", "keys", "none")), cycle(("2 heads", "3 of 1"))
    for seed, variant in enumerate(FLASH):
        row = {name: levels[0] for name, levels in factors(variant)}
        row.update(shape=(200, 200), span=next(spans), dtype=next(dtypes), mask=next(masks))
        row.update(
            heads=next(heads),
            params=dict(factors(variant))["params"][-1],
            lse=variant not in NO_LSE,
            window=120 if row["span"] == "window" else (100, 60),  # they hold whole blocks
        )
        name = f"{variant}-{label(row)}"
        yield pytest.param(variant, row, seed, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("variant", "row", "seed"), [*quick_cells(), *cells(), *long_cells()])
def test_agrees_with_the_definition(variant: str, row: dict[str, Any], seed: int) -> None:
    assert disagreements(variant, "flash", make(variant, row, seed=10 * seed)) == []
