"""τ of sparsemax and entmax: Σ_j φ(x_j − τ) = 1 for the q-exponential φ, row by row.

Newton on the norm, τ += (Z − Z^{2−α})/((α−1) Σφ') with Z = Σφ, starting at the row's maximum: there
Z ≥ 1, the steps are monotone from the left, and one is exact when all scores are equal. At α = 2
this is plain Newton (Michelot), exact after finitely many steps. It goes on until every |Z − 1| is
within 1e-6 (1e-13 in fp64), or its τ as close as floating point tells: over many equal scores one
unit in the last place of τ moves Z by more than that.

No key with x ≤ τ − 1/(α−1) can hold weight for a τ that is still too low. After the first step few
keys pass (at α = 1.5 and 4096 Gaussian scores 1.5 %), and the others run on those alone, packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.activations import Q_EXP

ALPHA = {"sparsemax": 2.0, "entmax15": 1.5}
MAX_STEPS = 100
GROUP = 8  # entries looked at together when packing
PACK = 2  # pack where no row keeps more than one group in this many


def solve_threshold(x: Tensor, shape: Tensor | None, activation: str) -> Tensor:
    """τ ≥ 0 for x (..., K) whose row maxima are 0 (a row all −∞ gets τ = 0)."""
    solve = _solve if torch.compiler.is_compiling() else _solve_now
    if shape is None:
        return solve(x, ALPHA[activation], None)
    return solve(x, 0.0, shape.expand(x.shape[:-1]).contiguous())


def _solve_now(x: Tensor, alpha: float, shape: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    alphas = None if shape is None else shape.reshape(-1, 1)
    return _newton(rows, alpha, alphas).view(x.shape[:-1])


@torch.library.custom_op("attnzoo::solve_threshold", mutates_args=())
def _solve(x: Tensor, alpha: float, shape: Tensor | None) -> Tensor:
    # An operator of its own: how many steps it takes depends on the data, which no graph can hold.
    return _solve_now(x, alpha, shape)


@_solve.register_fake
def _(x: Tensor, alpha: float, shape: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _packed(x: Tensor, above: Tensor) -> Tensor:
    """The groups of each row's entries that reach above its bound, packed to the left.

    Groups, because a comparison and an index per entry cost more than a Newton step; a group is
    {j, j + C, …, j + 7C}, so that its maximum is taken over long runs. Returns x itself where some
    row keeps too many.
    """
    rows, keys = x.shape
    columns = keys // GROUP
    if columns == 0:
        return x
    groups = x[:, : columns * GROUP].unflatten(1, (GROUP, columns))
    candidate = groups.amax(1) > above  # [R, C]
    counts = candidate.sum(-1)
    width = max(1, int(counts.max()))
    if width * PACK > columns:
        return x
    index = candidate.view(-1).nonzero()[:, 0]
    row = torch.div(index, columns, rounding_mode="floor")
    first = counts.cumsum(0) - counts
    # Group e of a row lands in column e, whatever column it came from.
    target = torch.arange(index.numel(), device=x.device) - first[row]
    member = torch.arange(GROUP, device=x.device)[:, None]  # [8, groups kept]
    source = row * keys + (index - row * columns) + member * columns
    left_over = x[:, columns * GROUP :]
    packed = x.new_full((rows, GROUP * width), float("-inf"))
    packed.view(-1)[row * (GROUP * width) + target + member * width] = x.view(-1)[source]
    return torch.cat([packed, left_over], dim=-1) if left_over.shape[1] else packed


def _newton(x: Tensor, alpha: float, alphas: Tensor | None) -> Tensor:
    residual, eps = 1e-6 if x.dtype == torch.float32 else 1e-13, torch.finfo(x.dtype).eps
    reach = 1 / (alpha - 1) if alphas is None else 1 / (alphas - 1)
    tau, buffer = x.new_zeros(x.shape[0], 1), torch.empty_like(x)
    for count in range(MAX_STEPS):
        if alphas is None:
            z, step = _step(x, tau, alpha, buffer)
        else:
            z, step = _general_step(x, tau, alphas)
        tau = tau + step
        off = float((z - 1).abs_().masked_fill_(z == 0, 0.0).max())  # an empty row has z = 0
        # The steps are looked at only where they may already be as small as τ can tell.
        if not off > residual or (off < 1e-3 and bool((step.abs() <= 4 * eps * tau).all())):
            break
        if count == 0:
            x = _packed(x, tau - reach)
            buffer = torch.empty_like(x)
    return tau[:, 0]


def _step(x: Tensor, tau: Tensor, alpha: float, u: Tensor) -> tuple[Tensor, Tensor]:
    torch.add(x, 1 / (alpha - 1) - tau, out=u).relu_()
    # An empty row has mass 0: the floor makes its step 0, and no other row comes near it.
    mass = u.sum(-1, keepdim=True).clamp_(min=torch.finfo(u.dtype).tiny)
    if alpha == 2.0:
        count = u.gt_(0).sum(-1, keepdim=True)
        return mass * (count > 0), (mass - 1) * (count > 0) / count.clamp_(min=1)
    # α = 1.5: φ = (u/2)², φ' = u/2.
    root = torch.linalg.vector_norm(u, dim=-1, keepdim=True) / 2
    return root * root, (root * root - root) * 4 / mass


def _general_step(x: Tensor, tau: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    phi = Q_EXP.value(x - tau, alpha)
    z = phi.sum(-1, keepdim=True)
    slope = Q_EXP.slope(x, phi, alpha).sum(-1, keepdim=True)
    # (Z − Z^{2−α})/(α−1), without cancelling as α → 1.
    change = -z * torch.expm1(-(alpha - 1) * z.log()) / (alpha - 1)
    return z, torch.where(z > 0, change / slope, 0.0)
