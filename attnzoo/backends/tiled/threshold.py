"""τ of sparsemax and entmax: Σ_j φ(x_j − τ) = 1 for the q-exponential φ, row by row.

Newton on the norm, τ += (Z − Z^{2−α})/((α−1) Σφ') with Z = Σφ, starting at the row's maximum: there
Z ≥ 1, the steps are monotone from the left, and one is exact when all scores are equal. At α = 2
this is plain Newton (Michelot), exact after finitely many steps. It goes on until every |Z − 1| is
within 1e-6 (1e-13 in fp64), or its τ as close as floating point tells: over many equal scores one
unit in the last place of τ moves Z by more than that.

A step is four cheap passes over the scores. Packing the few keys that can still hold weight after
the first step (1.5 % of 4096 Gaussian scores) was tried and cost as much as it saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.core.activations import Q_EXP

ALPHA = {"sparsemax": 2.0, "entmax15": 1.5}
MAX_STEPS = 100


def solve_threshold(x: Tensor, shape: Tensor | None, activation: str) -> Tensor:
    """τ ≥ 0 for x (..., K) whose row maxima are 0; a row all −∞ gets τ = 0, one with NaN NaN."""
    rows = x.reshape(-1, x.shape[-1])
    if shape is None:
        return _newton(rows, ALPHA[activation], None).view(x.shape[:-1])
    alphas = shape.expand(x.shape[:-1]).reshape(-1, 1)
    return _newton(rows, 0.0, alphas).view(x.shape[:-1])


def _newton(x: Tensor, alpha: float, alphas: Tensor | None) -> Tensor:
    residual, eps = 1e-6 if x.dtype == torch.float32 else 1e-13, torch.finfo(x.dtype).eps
    tau, buffer = x.new_zeros(x.shape[0], 1), torch.empty_like(x)
    for _ in range(MAX_STEPS):
        if alphas is None:
            excess, step = _step(x, tau, alpha, buffer)
        else:
            excess, step = _general_step(x, tau, alphas)
        tau = tau + step
        # Z comes down on 1 from above; a row without keys has Z = 0 and is not waited for, and
        # neither is one with NaN.
        most = float(excess.nan_to_num(nan=0.0).max())
        if not most > residual:
            break
        # Looked at only where the steps may already be as small as τ can tell.
        if most < 1e-3 and not bool((step.abs() > 4 * eps * tau).any()):
            break
    return tau[:, 0]


def _step(x: Tensor, tau: Tensor, alpha: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """How far Σφ (α = 2), or its root (α = 1.5), is above 1; and the step of τ."""
    torch.add(x, 1 / (alpha - 1) - tau, out=u).relu_()
    mass = u.sum(-1, keepdim=True)
    if alpha == 2.0:
        excess, count = mass - 1, u.gt_(0).sum(-1, keepdim=True)
        return excess, excess * (count > 0) / count.clamp_(min=1)
    # With u = 2 + x − τ: φ = (u/2)², φ' = u/2, √Z = |u|/2. Rows without keys stay where they are.
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    excess = norm - 2
    return excess, norm * excess / mass.clamp_(min=torch.finfo(u.dtype).tiny)


def _general_step(x: Tensor, tau: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    phi = Q_EXP.value(x - tau, alpha)
    z = phi.sum(-1, keepdim=True)
    slope = Q_EXP.slope(x, phi, alpha).sum(-1, keepdim=True)
    # (Z − Z^{2−α})/(α−1), without cancelling as α → 1.
    change = -z * torch.expm1(-(alpha - 1) * z.log()) / (alpha - 1)
    return z - 1, torch.where(z > 0, change / slope, 0.0)
