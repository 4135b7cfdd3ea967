"""Outputs and gradients of eager, tiled, sdpa and linear agree with the fp64 definition.

Testing all combinations of settings would take too long, so most variants run a covering array:
cases in which every pair of settings occurs. ``eager`` and ``tiled`` share an array. ``sdpa`` and
``linear`` have arrays of their own, limited to the settings that `coverage_table.py` lists for
them. Uninitialized memory is filled with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import attnzoo
from helpers.agreement import disagreements, dropout_factors, make, reference
from helpers.cases import ALL_VARIANTS, CASES
from helpers.coverage_table import RUNS, VARIANT_BACKENDS, levels_of
from helpers.covering import label
from helpers.kernel_paths import Level, quick_rows, supports, variant_rows

SHAPES = (1, 1), (17, 17), (128, 128), (200, 200)
SHAPES += (1, 200), (63, 128), (128, 63), (200, 17)
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
FACTORS = {
    "shape": SHAPES,
    "dtype": DTYPES,
    "mask": ("none", "bool", "keys", "float", "float keys"),
    "mask_gradient": (True,),
    "span": ("full", "causal", "window", "pair"),
    "heads": ("mha", "gqa", "mqa"),
    "params": ("default",),
    "values": ("same", "other"),
    "bias": (None, "alibi", "table"),
    "segments": (False, True),
    "dropout": (False, True),
    "lse": (False, True),
}


def all_allowed(case: dict[str, Any]) -> bool:
    return True


def sdpa_allowed(case: dict[str, Any]) -> bool:
    """sdpa supports a causal call only if it has no mask and Nq is 1 or Nk."""
    queries, keys = case.get("shape", (1, 1))
    causal = case.get("span") == "causal"
    return not causal or (case.get("mask", "none") == "none" and queries in (1, keys))


def factors(variant: str, backend: str | None = None) -> tuple[tuple[str, tuple], ...]:
    """For each factor, the values that the variant (and the backend, if given) supports."""
    levels = levels_of(variant, FACTORS)
    default = Level(variant, "default")
    levels["shape"] = tuple(x for x in SHAPES if supports({"params": default, "shape": x}))
    if backend in ("sdpa", "linear"):
        no = (False,)
        levels.update(span=("full", "causal"), bias=(None,), segments=no, dropout=no, lse=no)
    if backend == "sdpa":
        levels.update(values=("same",), mask_gradient=no)
        if variant == "adaptive_temperature":
            levels["params"] = ("default",)
    if backend == "linear":
        levels.update(mask=("none", "keys"), segments=(False, True))
        if variant == "taylor":
            levels["params"] = ("default",)
    return tuple(levels.items())


# Backends that share cases -> (the kinds of forms they support, a filter of the cases).
ARRAYS = {
    ("eager", "tiled"): (("pairwise", "linear"), all_allowed),
    ("sdpa",): (("pairwise",), sdpa_allowed),
    ("linear",): (("linear",), all_allowed),
}


def factors_of(variant: str, backends: tuple[str, ...]) -> tuple[tuple[str, tuple], ...]:
    return factors(variant, None if "eager" in backends else backends[0])


def variants_on(backends: tuple[str, ...]) -> list[str]:
    """The variants that the backends (a key of `ARRAYS`) support."""
    if "eager" in backends:
        return ALL_VARIANTS
    return [variant for variant in ALL_VARIANTS if VARIANT_BACKENDS[variant][backends[0]] is RUNS]


def levels(backends: tuple[str, ...]) -> list[Level]:
    """All pairs of a variant and its parameters that the backends support."""
    return [
        Level(variant, params)
        for variant in variants_on(backends)
        for params in dict(factors_of(variant, backends))["params"]
    ]


def cases() -> Iterator[Any]:
    """Yield quick cases for each kernel path (see `kernel_paths`) and slow cases per variant.

    The cases of the Triton backends are in `test_flash`, `test_decode` and `test_flash_linear`.
    """
    for backends, (kinds, allowed) in ARRAYS.items():
        here, name = levels(backends), "-".join(backends)
        widest = {**FACTORS, **dict(factors_of("softmax", backends))}
        thin = {key: values[0] for key, values in widest.items()}
        thin |= {"shape": (17, 17), "heads": "gqa", "span": "causal"}
        if allowed({**thin, "mask": "keys"}):
            thin["mask"] = "keys"
        thins = [{**thin, "dtype": dtype} for dtype in (torch.float64, torch.bfloat16)]
        for seed, (variant, case) in enumerate(quick_rows(widest, here, allowed, thins, kinds)):
            slow = CASES[variant].expensive and math.prod(case["shape"]) > 400
            yield pytest.param(
                variant, case, backends, seed, id=f"quick-{name}-{variant}-{label(case)}",
                marks=[pytest.mark.slow] if slow else [],
            )  # fmt: skip
        of_variant = partial(factors_of, backends=backends)
        for variant, seed, case in variant_rows(variants_on(backends), of_variant, allowed, kinds):
            yield pytest.param(
                variant, case, backends, seed,
                id=f"{name}-{variant}-{label(case)}", marks=pytest.mark.slow,
            )  # fmt: skip


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("variant", "case", "backends", "seed"), list(cases()))
def test_agrees_with_the_definition(
    variant: str, case: dict[str, Any], backends: tuple[str, ...], seed: int
) -> None:
    inputs = make(variant, case, seed=10 * seed)
    errors = []
    exact, keep = None, 1.0
    for backend in backends:
        if exact is None or case["dropout"]:  # dropout masks differ by backend
            keep = dropout_factors(variant, backend, inputs)
            exact = reference(variant, inputs, keep)
        errors += disagreements(variant, backend, inputs, exact, keep)
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [-1e9, "lowest"])
def test_sdpa_does_not_change_with_a_number_added_to_a_row_of_the_mask(
    low: float | str, dtype: torch.dtype
) -> None:
    """Softmax ignores it. torch's fused kernel would lose log Z next to it in the backward."""
    leaves = [x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, 70, 16)]
    number = torch.finfo(dtype).min if low == "lowest" else low
    results = []
    for added in (0.0, number):
        mask = torch.zeros(70, 70, dtype=dtype)
        mask[:5] = added
        mask[:, 60:] = float("-inf")
        out = attnzoo.attention(*leaves, attn_mask=mask, backend="sdpa")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for have, want in zip(*results, strict=True):
        assert torch.equal(have, want)
