"""Scales and gains that are negative or 0, and scores that are NaN or infinite, in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from cases import CASES, rand
from coverage_table import FORWARD_ONLY, PAIRS, TRAINED, precise

N = 12
every_pair = pytest.mark.parametrize(("variant", "backend"), PAIRS)
# Those whose scores take a gain, which may be negative.
GAINS = {
    "ssmax": {"s": torch.tensor([-0.4, 0.0]), "b": torch.tensor([-0.5, 0.0])},
    "asentmax": {
        "beta": torch.tensor([-0.6, 0.0]),
        "gamma": torch.tensor([0.5, 0.0]),
        "delta": torch.tensor([-1.0, 0.0]),
    },
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(N, N, dtype=torch.bool).tril(2)},
}


def qkv(dtype: torch.dtype) -> list[Tensor]:
    return [rand(1, 2, N, 8, seed=seed).to(dtype) for seed in (1, 2, 3)]


def results(
    variant: str, backend: str, inputs: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """The output, and the gradients of q, k and v where the backend has any."""
    trains = backend not in FORWARD_ONLY
    leaves = [x.clone().requires_grad_(trains) for x in inputs]
    out = attnzoo.attention(*leaves, variant, backend=backend, **options)
    if not trains:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, rand(*out.shape).to(out.dtype))]


def agrees(variant: str, backend: str, options: dict[str, Any]) -> None:
    """Output and gradients are those of the definition in fp64."""
    inputs = qkv(precise(backend))
    found = results(variant, backend, inputs, options)
    exact = results(variant, "eager", [x.double() for x in inputs], options)
    for have, want in zip(found, exact):
        tolerance = 1e-10 if have.dtype == torch.float64 else 2e-5
        assert torch.allclose(have.double(), want, rtol=tolerance, atol=tolerance)


def takes(variant: str, backend: str, options: dict[str, Any]) -> bool:
    """The variant has a meaning for these arguments, and the backend takes them."""
    plan = attnzoo.explain(*qkv(precise(backend)), variant, backend=backend, **options)
    return plan.chosen is not None


# ---- scales and gains that are not positive ---------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@every_pair
def test_a_scale_that_is_negative_or_zero(variant: str, backend: str, mask: str) -> None:
    for scale in (-0.7, 0.0):
        options = {**MASKS[mask], "scale": scale, **CASES[variant].params}
        if variant == "cosformer":
            with pytest.raises(ValueError, match="any scale above 0"):
                attnzoo.attention(*qkv(torch.float32), variant, backend=backend, **options)
        elif takes(variant, backend, options):
            agrees(variant, backend, options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("variant", "backend"), [pair for pair in PAIRS if pair.values[0] in GAINS]
)
def test_a_gain_that_is_negative_or_zero(variant: str, backend: str, mask: str) -> None:
    agrees(variant, backend, {**MASKS[mask], "scale": -0.4, **GAINS[variant]})


ANY_SCALE = pytest.mark.parametrize("variant", [x for x in CASES if x != "cosformer"])


@ANY_SCALE
def test_a_negative_scale_by_default(variant: str) -> None:
    """Whatever backend is chosen; long enough that few scores are no reason to choose."""
    q, k, v = (rand(1, 2, 300, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    options = {"is_causal": True, **CASES[variant].params}
    out = attnzoo.attention(q, k, v, variant, scale=-0.7, **options)
    assert torch.allclose(out, attnzoo.attention(-q, k, v, variant, scale=0.7, **options))


@ANY_SCALE
def test_a_scale_below_what_fp32_can_tell_is_zero(variant: str) -> None:
    q, k, v = (rand(1, 2, 300, 8, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    options = {"is_causal": True, **CASES[variant].params}
    zero = attnzoo.attention(q, k, v, variant, scale=0.0, **options)
    for scale in (1e-46, -1e-50):
        out = attnzoo.attention(q, k, v, variant, scale=scale, **options)
        assert torch.allclose(out, zero, atol=1e-6)
