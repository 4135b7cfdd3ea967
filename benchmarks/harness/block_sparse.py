"""Block-sparse inputs: most 64 × 64 blocks of the weight matrix are 0 for a sparse normalizer.

On i.i.d. Gaussian inputs the few keys with nonzero weight are scattered, so almost no block is
empty and a kernel that skips empty blocks gains nothing. In trained models nearby tokens often
attend to the same keys. `block_sparse` makes inputs in which nearby tokens attend to the same keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commandline.errors import UsageError

BLOCK = 64
GROUPS = 16
GAP = 16.0


def block_sparse(q: Tensor, k: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Adds a group centre to each query and key, (B, H, N, D) with N(0, 1) entries.

    Each block of 64 tokens belongs to one of 16 groups, drawn per batch and head. The centres are
    orthogonal. The score D^-½·q·k has mean `GAP` for tokens of the same group and 0 for others;
    both have standard deviation √(1 + 2·GAP/√D). Entmax gives weight 0 to scores more than 1/(α−1)
    below the largest one. GAP is larger than that, so only about one in 16 blocks has any weight.
    In short causal calls the share is larger, because every diagonal block has weight.
    """
    batch, heads, length, dim = q.shape
    if dim < GROUPS:
        raise UsageError(f"--head-dim must be at least {GROUPS} for block-sparse inputs, got {dim}")
    device = q.device
    square = torch.randn(dim, dim, generator=generator, device=device)
    centres = torch.linalg.qr(square).Q[:GROUPS] * (GAP * dim**0.5) ** 0.5
    blocks = -(-length // BLOCK)
    group = torch.randint(GROUPS, (batch, heads, blocks), generator=generator, device=device)
    shift = centres[group].repeat_interleave(BLOCK, dim=2)[:, :, :length]  # [B, H, N, D]
    return q + shift, k + shift
