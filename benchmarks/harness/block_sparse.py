"""Inputs on which a sparse normalizer has something to skip.

On i.i.d. Gaussian inputs each row's few keys lie anywhere, so hardly a block of 64 × 64 weights is
empty, and a kernel that skips empty blocks has nothing to gain. In trained models tokens that
belong together find each other. `block_sparse` makes inputs of that kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commandline.errors import UsageError

BLOCK = 64
GROUPS = 16
GAP = 16.0


def block_sparse(q: Tensor, k: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, N, D) of N(0, 1) noise, moved to the centres of groups.

    Each run of 64 tokens belongs to one of 16 groups, drawn anew for each batch and head. The
    centres are orthogonal, and as long as makes the score D^-½·q·k of two tokens `GAP` on average
    in the same group and 0 in different ones, with the same spread, √(1 + 2·GAP/√D), about both.
    That is further apart than entmax's support is wide (1/(α−1) in the scores), so that all but
    about one in 16 of the 64 × 64 blocks have no weight; under causality fewer at short lengths,
    where the diagonal, which always has some, is a larger share.
    """
    batch, heads, length, dim = q.shape
    if dim < GROUPS:
        raise UsageError(
            f"block-sparse inputs need a head dimension of at least {GROUPS}, got {dim}"
        )
    device = q.device
    square = torch.randn(dim, dim, generator=generator, device=device)
    centres = torch.linalg.qr(square).Q[:GROUPS] * (GAP * dim**0.5) ** 0.5
    runs = -(-length // BLOCK)
    drawn = torch.randint(GROUPS, (batch, heads, runs), generator=generator, device=device)
    mine = centres[drawn].repeat_interleave(BLOCK, dim=2)[:, :, :length]  # [B, H, N, D]
    return q + mine, k + mine
