"""The Triton implementations of activations agree with their definitions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnzoo.backends.triton.common.launch import function
from attnzoo.core import activations
from attnzoo.core.activation import Activation

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned_memory")]


@triton.jit
def evaluate(x, shape, phi, slope, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    shape_tile = None
    if shape is not None:
        shape_tile = tl.load(shape + at)
    value, change = ACT(tl.load(x + at), shape_tile)
    tl.store(phi + at, value)
    tl.store(slope + at, change)


ACTIVATIONS: list[tuple[Activation, float | None]] = [
    (activations.EXP, None),
    (activations.SIGMOID, None),
    (activations.SILU, None),
    (activations.SOFTPLUS, None),
    (activations.SPARSEMAX, None),
    (activations.ENTMAX15, None),
    (activations.TAYLOR[2], None),
    (activations.TAYLOR[4], None),
    *((activations.Q_EXP, alpha) for alpha in (1.001, 1.1, 1.5, 1.9, 2.0)),
]


@pytest.mark.parametrize(("activation", "alpha"), ACTIVATIONS, ids=lambda x: getattr(x, "name", x))
def test_triton_implementations_agree_with_their_activations(
    activation: Activation, alpha: float | None
) -> None:
    assert activation.triton is not None
    s = torch.cat([torch.linspace(-12, 12, 255), torch.tensor([float("-inf")])])
    phi, slope = torch.empty_like(s), torch.empty_like(s)
    shape = None if alpha is None else torch.full_like(s, alpha)
    act = function("triton", activation.triton)
    evaluate[(1,)](s * activation.unit, shape, phi, slope, ACT=act, BLOCK=256)
    exact = s.double() if shape is None else (s.double(), shape.double())
    s64, shape64 = exact if isinstance(exact, tuple) else (exact, None)
    value = activation.value(s64.clone(), shape64)
    change = activation.slope(s64, value, shape64)
    if activation.vanishes:
        assert (phi[-1], slope[-1]) == (0, 0)
    # The allowed relative error for |s| ≤ 12. It is larger for activations with a shape α, because
    # their φ needs log2.
    accuracy = 2e-6 if shape is None else 2e-5
    # `size` allows for cancellation: between the powers of a polynomial, and in sigmoid's slope
    # φ(1 − φ). For sigmoid it is 0.05: accuracy · 0.05 = 1e-7 covers one fp32 rounding of φ near 1.
    size = 0.05 * (activation.name == "sigmoid")
    size = size + 0.0 * s64 if activation.vanishes else activation.value(s64.abs(), None)
    for have, want in ((phi, value), (slope, change)):
        error = (have.double() - want)[:-1].abs()
        assert bool((error <= accuracy * (want.abs() + size)[:-1]).all())


@triton.jit
def evaluate_shape_slope(x, shape, slope, SHAPE_SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(slope + at, SHAPE_SLOPE(tl.load(x + at), tl.load(shape + at)))


@pytest.mark.parametrize("alpha", [1.000001, 1.001, 1.1, 1.5, 1.9, 2.0])
def test_the_slope_of_alpha_agrees_with_its_formula(alpha: float) -> None:
    """∂φ/∂α = φ · (y/u − log u) / a² with a = α − 1, y = ax and u = 1 + y; 0 if u ≤ 0."""
    s = torch.cat([torch.linspace(-12, 12, 511), torch.tensor([float("-inf")])])
    shape, slope = torch.full_like(s, alpha), torch.empty_like(s)
    act = function("triton_shape_slope", activations.Q_EXP.triton_shape_slope)
    evaluate_shape_slope[(1,)](s, shape, slope, SHAPE_SLOPE=act, BLOCK=512)
    a = shape.double() - 1
    y = a * s.double()
    inside = y > -1
    y = y.clamp_min(-1 + 1e-9)
    u, log_u = 1 + y, y.log1p()
    phi = (log_u / a).exp()
    # The formula has no digits left if y is small. There the terms are −φx²/2 · (1 − 4y/3 + …).
    series = -(s.double() ** 2) / 2 * (1 - 4 * y / 3 + 3 * y**2 / 2 - 8 * y**3 / 5)
    want = phi * torch.where(y.abs() < 1e-4, series, (y / u - log_u) / a**2)
    # The rounding of y changes u by eps, and φ = u^{1/a} by a share of eps/(au). The rounding of
    # y/u and log u counts where they cancel.
    size = torch.where(y.abs() < 0.03, 0.0, phi * ((y / u).abs() + log_u.abs()) / a**2)
    error = (slope.double() - want).abs()
    assert bool((error <= (2e-5 + 1.2e-7 / (a * u)) * want.abs() + 1e-6 * size)[inside].all())
    assert not slope[~inside].any()


def test_sigmoid_of_large_scores_is_exactly_0_or_1_and_keeps_nan() -> None:
    x = torch.tensor([-1e30, -300.0, 300.0, 1e30, float("inf"), float("-inf"), float("nan"), 0.0])
    phi, slope = torch.empty_like(x), torch.empty_like(x)
    act = function("triton", activations.SIGMOID.triton)
    evaluate[(1,)](x, None, phi, slope, ACT=act, BLOCK=8)
    assert phi.tolist()[:6] == [0, 0, 1, 1, 1, 0]
    assert phi[7] == 0.5
    assert slope.tolist()[:6] == [0] * 6
    assert bool(phi[6].isnan())
