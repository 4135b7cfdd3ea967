"""The activations of the shipped variants.

The entmax family is the q-exponential φ(x) = [1 + (α−1)x]_+^{1/(α−1)} in the units of the scores:
φ(0) = 1, φ' = φ^{2−α}, and α → 1 gives exp (Peters et al. 2019, arXiv:1905.05702, with τ shifted
by 1/(α−1)).
"""

from __future__ import annotations

from math import e, factorial, log2

import torch
from torch import Tensor

from attnzoo.core.activation import Activation

TRITON = "attnzoo.backends.triton.common.activations:"  # followed by the activation's name

EXP = Activation(
    "exp",
    lambda s, shape: s.exp_(),
    lambda s, phi, shape: phi,
    triton=TRITON + "exp",
    unit=log2(e),
    exponential=True,
    convex=True,
    positive=True,
    increasing=True,
)

SIGMOID = Activation(
    "sigmoid",
    lambda s, shape: s.sigmoid_(),
    lambda s, phi, shape: phi.addcmul(phi, phi, value=-1),
    triton=TRITON + "sigmoid",
    unit=log2(e),
    positive=True,
    # softplus(s). torch's softplus is inexact above its threshold of 20.
    integral=lambda s, shape: -torch.nn.functional.logsigmoid(-s),
    increasing=True,
)

RELU = Activation(
    "relu",
    lambda s, shape: s.relu_(),
    lambda s, phi, shape: (phi > 0).to(phi.dtype),
    triton=TRITON + "relu",
    increasing=True,
)

RELU2 = Activation(
    "relu2",
    lambda s, shape: s.relu_().square_(),
    lambda s, phi, shape: 2 * phi.sqrt(),
    triton=TRITON + "relu2",
    increasing=True,
)


def _relu_power_slope(s: Tensor, phi: Tensor, power: Tensor | None) -> Tensor:
    assert power is not None
    return torch.where(s > 0, power * s.clamp(min=0).pow(power - 1), 0.0)


def _relu_power_shape_slope(s: Tensor, phi: Tensor, power: Tensor | None) -> Tensor:
    # Scores of 0 and below are replaced, so that the logarithm is finite.
    return torch.where(s > 0, phi * torch.where(s > 0, s, 1.0).log(), 0.0)


def _relu_power(s: Tensor, power: Tensor | None) -> Tensor:
    assert power is not None
    # NaN stays NaN.
    return torch.where(s <= 0, 0.0, torch.where(s <= 0, 1.0, s).pow(power))


RELU_POWER = Activation(
    "relu_power",
    _relu_power,
    _relu_power_slope,
    _relu_power_shape_slope,
    triton=TRITON + "relu_power",
    triton_shape_slope=TRITON + "relu_power_shape_slope",
    increasing=True,
)

SILU = Activation(
    "silu",
    lambda s, shape: torch.nn.functional.silu(s),
    # σ + φ(1 − σ). 1 − σ(s) is computed as σ(−s), which keeps its digits for large s.
    lambda s, phi, shape: s.sigmoid().addcmul_(phi, s.neg().sigmoid_()),
    vanishes=False,  # φ(−∞) is −∞ · 0
    triton=TRITON + "silu",
    unit=log2(e),
)

SOFTPLUS = Activation(
    "softplus",
    lambda s, shape: -torch.nn.functional.logsigmoid(-s),
    lambda s, phi, shape: s.sigmoid(),
    triton=TRITON + "softplus",
    unit=log2(e),
    increasing=True,
)


def _exp_less_one(s: Tensor, most: Tensor) -> Tensor:
    """(e^s − 1) · e^{−M} for s ≤ M. expm1 keeps the digits of small s."""
    down = (-most).exp()
    return torch.where(s.abs() < 1, s.clamp(-1, 1).expm1() * down, (s - most).exp() - down)


def _softpick(s: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return _exp_less_one(s, most).relu_()


def _softpick_slope(s: Tensor, phi: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return torch.where(s > 0, (s - most).exp(), 0.0)


def _softpick_normalizer_slope(s: Tensor, mu: Tensor, most: Tensor | None) -> Tensor:
    assert most is not None
    return (s - most).exp() * s.sign()


SOFTPICK = Activation(
    "softpick",
    _softpick,
    _softpick_slope,
    vanishes=False,
    normalizer=lambda s, most: _exp_less_one(s, most).abs_(),  # type: ignore[arg-type]
    normalizer_slope=_softpick_normalizer_slope,
    shifted=True,
    triton=TRITON + "softpick",
    unit=log2(e),
    increasing=True,
)

IDENTITY = Activation(
    "identity",
    lambda s, shape: s,
    lambda s, phi, shape: torch.ones_like(s),
    vanishes=False,
    increasing=True,
)

SPARSEMAX = Activation(
    "sparsemax",
    lambda s, shape: s.add_(1).relu_(),
    lambda s, phi, shape: (phi > 0).to(phi.dtype),
    triton=TRITON + "sparsemax",
    alpha=2.0,
    increasing=True,
)

ENTMAX15 = Activation(
    "entmax15",
    lambda s, shape: torch.add(s.new_ones(()), s, alpha=0.5, out=s).relu_().square_(),
    # φ' = √φ is computed as φ · rsqrt(φ): most φ are 0, and on some CPUs √0 is ten times slower.
    lambda s, phi, shape: phi.clamp_min(torch.finfo(phi.dtype).tiny).rsqrt_().mul_(phi),
    triton=TRITON + "entmax15",
    alpha=1.5,
    increasing=True,
)


def _q_exp(s: Tensor, alpha: Tensor | None) -> Tensor:
    assert alpha is not None
    # log1p is accurate for small (α−1)s. Clamping its argument at −1 implements [·]_+.
    inner = ((alpha - 1) * s).clamp_min_(-1.0)
    return inner.log1p_().div_(alpha - 1).exp_()


def _q_exp_slope(s: Tensor, phi: Tensor, alpha: Tensor | None) -> Tensor:
    assert alpha is not None
    # Outside the support the slope is 0, but φ^{2−α} would give 0⁰ = 1 at α = 2.
    return torch.where(phi > 0, phi.pow(2 - alpha), 0.0)


def _q_exp_shape_slope(s: Tensor, phi: Tensor, alpha: Tensor | None) -> Tensor:
    """∂φ/∂α = φ·[x/(a·u) − log(u)/a²] with a = α − 1, u = 1 + ax; its limit at α = 1 is −φx²/2."""
    assert alpha is not None
    a = alpha - 1
    inside = phi > 0
    x = torch.where(inside, s, 0.0)
    y = a * x
    closed = x / (a * (1 + y)) - torch.log1p(y) / (a * a)
    # The two terms of `closed` cancel for small y. The series x² Σ_k (−1)^{k−1} (k−1)/k y^{k−2}
    # replaces them there.
    series = torch.zeros_like(y)
    for k in range(10, 1, -1):
        series = series * y + (-1) ** (k - 1) * (k - 1) / k
    log_slope = torch.where(y.abs() < 3e-2, x * x * series, closed)
    return torch.where(inside, phi * log_slope, 0.0)


Q_EXP = Activation(
    "q_exp",
    _q_exp,
    _q_exp_slope,
    _q_exp_shape_slope,
    triton=TRITON + "q_exp",
    triton_shape_slope=TRITON + "q_exp_shape_slope",
    alpha="shape",
    increasing=True,
)


def _taylor(order: int) -> Activation:
    """The activation φ(s) = Σ_{p ≤ order} s^p / p!, which is positive only for even orders."""

    def value(s: Tensor, shape: Tensor | None, top: int = order) -> Tensor:
        if top == 1:
            return s + 1
        # Horner's scheme, with one pass over s per power.
        total = torch.add(s.new_tensor(1 / factorial(top - 1)), s, alpha=1 / factorial(top))
        for power in reversed(range(top - 1)):
            torch.addcmul(s.new_tensor(1 / factorial(power)), total, s, out=total)
        return total

    return Activation(
        f"taylor{order}",
        value,
        lambda s, phi, shape: value(s, shape, order - 1),
        vanishes=False,
        triton=f"{TRITON}taylor{order}" if order in (2, 4) else None,
        positive=True,
        quadratic=(1.0, 1.0, 0.5) if order == 2 else None,
    )


# The Taylor activations by order. The largest order is 170, because 171! overflows a float. The
# activations are created at import, because torch.compile does not support activations created
# inside a compiled call.
TAYLOR = {order: _taylor(order) for order in range(2, 171, 2)}
