"""Solves Σ_j φ(x_j − τ) = 1 for τ, one τ per query, for a convex φ with φ(0) ≥ 1.

The solver is Newton's method. τ starts at the largest score, where Z = Σφ ≥ 1, and increases
monotonically. For a q-exponential the method solves Z^{α−1} = 1: τ += (Z − Z^{2−α})/((α−1) Σφ').
One such step is exact if all scores are equal. At α = 2 this is plain Newton (Michelot), exact
after finitely many steps.

On a CPU the iteration ends when Z − 1 ≤ 1e-6 (1e-13 in fp64) for every query, or when τ changes by
only a few units in the last place. The second test is needed for many equal scores: one unit in the
last place of τ then changes Z by more than the tolerance. A GPU would have to wait for the host
after each step, so for a q-exponential it takes `enough_steps`.

A step takes four passes over all scores. After the first step, few scores can still have nonzero
weight (1.5 % of 4096 Gaussian scores at α = 1.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.core.activation import Activation
from attnzoo.core.device import is_cpu

FAST = (1.5, 2.0)  # values of α for which `_fast_step` is used
MAX_STEPS = 100
SMALLEST_POWER = 2.0**-21  # of α − 1


def solve_threshold(x: Tensor, shape: Tensor | None, activation: Activation) -> Tensor:
    """Return τ ≥ 0 [...] for scores x [..., K] with maximum 0. τ is 0 if all scores are −∞.

    τ is NaN if any score is NaN.
    """
    scores = x.reshape(-1, x.shape[-1])
    shapes = None if shape is None else shape.expand(x.shape[:-1]).reshape(-1, 1)
    return _newton(scores, shapes, activation).view(x.shape[:-1])


def enough_steps(x: Tensor, keys: int, activation: Activation) -> int | None:
    """A number of steps after which Z − 1 is within the tolerance for all scores ``x`` of ``keys``.

    None if the number is unknown, or on a CPU, which tests the results of each step.

    f = Z^{α−1} − 1 is convex in τ. If a step multiplies f by a and f' by b, then a + b ≤ 1, so that
    it divides f·f' by at least 4. With n keys, f ≤ n^{α−1} and 1 ≤ |f'|/(α−1) ≤ n^{α−1}. At the end
    f/(α−1) is to be at most the tolerance.
    """
    if is_cpu(x.device) or activation.alpha is None:
        return None
    power = (1.0, SMALLEST_POWER) if activation.alpha == "shape" else (activation.alpha - 1,)
    start = max(2 * p * math.log2(max(keys, 1)) - math.log2(p) for p in power)
    return math.ceil((start - math.log2(tolerance(x.dtype))) / 2)


def tolerance(dtype: torch.dtype) -> float:
    """The largest Z − 1 of a solution."""
    return 1e-6 if dtype == torch.float32 else 1e-13


def _newton(x: Tensor, shape: Tensor | None, activation: Activation) -> Tensor:
    steps = enough_steps(x, x.shape[1], activation)
    if steps is not None and shape is not None:
        return _solve_q_exp(x, shape, steps)
    buffer = torch.empty_like(x)

    def step(tau: Tensor) -> tuple[Tensor, Tensor]:
        if activation.alpha in FAST:
            return _fast_step(x, tau, activation.alpha, buffer)
        return newton_step(*threshold_sums(x, tau, shape, activation), shape, activation)

    return newton(step, x.new_zeros(x.shape[0], 1), steps)[:, 0]


def _solve_q_exp(x: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """τ after ``steps`` steps for a tensor α. A step takes half the operations of `newton_step`."""
    a = alpha - 1
    minus, inverse, tiny = -a, 1 / a, torch.finfo(x.dtype).tiny
    c, empty = torch.zeros_like(x[:, :1]), None  # c = −(α−1)τ
    u, phi = torch.empty_like(x), torch.empty_like(x)
    for _ in range(steps):
        torch.addcmul(c, x, a, out=u).clamp_(min=-1)
        z = torch.special.xlog1py(inverse, u, out=phi).exp_().sum(-1, keepdim=True)
        slope = phi.div_(u.add_(1).clamp_(min=tiny)).sum(-1, keepdim=True)  # φ' = φ/u
        empty = z == 0 if empty is None else empty
        c = torch.mul(z.log(), minus).expm1_().mul_(z).div_(slope).add_(c)
    assert empty is not None
    return (c / minus).masked_fill_(empty, 0.0)[:, 0]


def newton(
    step: Callable[[Tensor], tuple[Tensor, Tensor]], tau: Tensor, steps: int | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> Tensor:  # fmt: skip
    """Iterate ``step``, which takes τ and returns Z − 1 and what to add to τ.

    ``steps``: how many steps to take without a test of their results.
    ``agreed`` takes whether this process has solved for its rows, and returns whether to end.
    """
    for _ in range(steps or MAX_STEPS):
        excess, change = step(tau)
        tau = tau + change
        if steps is None and agreed(solved(largest_excess(excess), change, tau)):
            break
    return tau


def largest_excess(excess: Tensor) -> float:
    """The largest Z − 1. Z approaches 1 from above. Queries without keys (Z = 0) or with NaN do not
    delay the end."""
    return float(excess.nan_to_num(nan=0.0).max())


def solved(excess: float, step: Tensor, tau: Tensor) -> bool:
    """Whether the iteration may end; see the module docstring."""
    if not excess > tolerance(tau.dtype):
        return True
    # This test costs a pass over τ. It is skipped while steps surely exceed the rounding of τ.
    eps = torch.finfo(tau.dtype).eps
    return excess < 1e-3 and not bool((step.abs() > 4 * eps * tau).any())


def _fast_step(x: Tensor, tau: Tensor, alpha: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σφ − 1 (α = 2) or 2√Σφ − 2 (α = 1.5), and the step to add to τ: both [rows, 1]."""
    torch.add(x, 1 / (alpha - 1) - tau, out=u).relu_()
    total = u.sum(-1, keepdim=True)
    if alpha == 2.0:
        excess, count = total - 1, u.gt_(0).sum(-1, keepdim=True)
        return excess, excess * (count > 0) / count.clamp_(min=1)
    # With u = 2 + x − τ: φ = (u/2)², φ' = u/2, √Z = |u|/2. Without keys the step is 0.
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    excess = norm - 2
    return excess, norm * excess / total.clamp_(min=torch.finfo(u.dtype).tiny)


def threshold_sums(
    x: Tensor, tau: Tensor, shape: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Return Σφ and Σφ', both [rows, 1]."""
    activation.check_slopes()
    at = x - tau
    phi = activation.value(at, shape)
    slope = activation.slope(at, phi, shape)
    return phi.sum(-1, keepdim=True), slope.sum(-1, keepdim=True)


def newton_step(
    z: Tensor, slope: Tensor, shape: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Return Z − 1 and the step to add to τ, from Z = Σφ and Σφ'. NaN stays NaN."""
    alpha = shape if activation.alpha == "shape" else activation.alpha
    change = z - 1
    if alpha is not None:  # (Z − Z^{2−α})/(α−1), without cancellation as α → 1
        change = -z * torch.expm1(-(alpha - 1) * z.log()) / (alpha - 1)
    return z - 1, torch.where(z == 0, 0.0, change / slope)
