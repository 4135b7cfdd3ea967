"""flash agrees with the fp64 definition: outputs and all gradients, over covering arrays.

Triton's interpreter is slow, so the arrays are smaller than those of `test_backends`. Most blocks
hold 32 or 64 queries or keys, so 70 queries give several blocks. Some blocks are partly masked.
The quick arrays cover the kernel paths (see `kernel_paths`) at shorter lengths. The slow tests are,
for each variant, a covering array and one case of 200 queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch

from helpers.agreement import disagreements, dropout_factors, make
from helpers.cases import CAUSAL_ONLY, NO_LSE
from helpers.coverage_table import FLASH, levels_of
from helpers.covering import label
from helpers.kernel_paths import Level, quick_rows, variant_rows

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]


FACTORS = {
    "shape": ((1, 1), (63, 63), (128, 128), (17, 63), (128, 17), (1, 200)),
    "batch": (1, 2),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "mask_gradient": (True,),
    "span": ("full", "causal", "window", "pair"),
    "heads": ("2 heads", "gqa", "3 of 1"),
    "params": ("default",),
    "values": ("same",),
    "dims": ((16, 16), (40, 40), (64, 64), (40, 24)),
    "bias": (None, "alibi", "table"),
    "segments": (False, True),
    "dropout": (False, True),
    "lse": (False, True),
    "layout": ("contiguous", "bnhd", "sliced"),
}
# The settings of the quick tests. 70 queries or keys give two or three blocks; the last is partly
# masked.
QUICK = {**FACTORS, "shape": ((1, 1), (70, 70), (17, 63), (70, 17), (1, 100))}
# flash does not support the setting differentiable=True of these variants.
FIXED = ("adaptive_temperature",)


def allowed(case: dict[str, Any]) -> bool:
    """Exclude slow cases: Nq + Nk > 100 in batches of 2; Nq = Nk >= 70 with 3 or 4 heads."""
    queries, keys = case.get("shape", (1, 1))
    large = queries + keys > 100
    square = (queries, keys) in ((70, 70), (128, 128)) and case.get("heads", "2 heads") != "2 heads"
    return not square and not (large and case.get("batch", 1) == 2)


def factors(variant: str) -> tuple[tuple[str, tuple], ...]:
    return tuple(levels_of(variant, FACTORS, variant not in FIXED).items())


def levels() -> list[Level]:
    """All pairs of a variant and its parameters that flash supports."""
    return [Level(v, params) for v in FLASH for params in dict(factors(v))["params"]]


# If several pairs (variant, parameters) take the same path through the kernel, one of them is
# tested over all QUICK settings, and the others run only these cases, with two blocks of keys.
THIN = [
    {name: values[0] for name, values in QUICK.items()}
    | {"shape": (40, 40), "span": "causal", "mask": "bool", "heads": "gqa", "dtype": dtype}
    for dtype in (torch.float32, torch.bfloat16)
]


def quick_cases() -> Iterator[Any]:
    for seed, (variant, case) in enumerate(quick_rows(QUICK, levels(), allowed, THIN)):
        yield pytest.param(variant, case, seed, id=f"quick-{variant}-{label(case)}")


def variant_cases() -> Iterator[Any]:
    """Yield slow cases: the covering array of each variant."""
    for variant, seed, case in variant_rows(FLASH, factors, allowed):
        name = f"{variant}-{label(case)}"
        yield pytest.param(variant, case, seed, id=name, marks=pytest.mark.slow)


def long_cases() -> Iterator[Any]:
    """Yield one slow case per variant, with 200 queries and keys. Span and mask vary."""
    spans, dtypes = cycle(("causal", "full", "window", "pair")), cycle(FACTORS["dtype"])
    masks, heads = cycle(("none", "keys", "none")), cycle(("2 heads", "3 of 1"))
    for seed, variant in enumerate(FLASH):
        case = {name: levels[0] for name, levels in factors(variant)}
        span = next(spans) if variant not in CAUSAL_ONLY else "causal"
        case.update(shape=(200, 200), span=span, dtype=next(dtypes), mask=next(masks))
        case.update(
            heads=next(heads),
            params=dict(factors(variant))["params"][-1],
            lse=variant not in NO_LSE,
            window=120 if case["span"] == "window" else (100, 60),  # wider than a block
        )
        name = f"{variant}-{label(case)}"
        yield pytest.param(variant, case, seed, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("variant", "case", "seed"), [*quick_cases(), *variant_cases(), *long_cases()]
)
def test_agrees_with_the_definition(variant: str, case: dict[str, Any], seed: int) -> None:
    inputs = make(variant, case, seed=10 * seed)
    keep = dropout_factors(variant, "flash", inputs)
    assert disagreements(variant, "flash", inputs, keep=keep) == []
