"""Inputs on which a sparse normalizer has something to skip, and how much that is.

On i.i.d. Gaussian inputs each row's few keys lie anywhere, so hardly a block of 64 × 64 weights is
empty, and a kernel that skips empty blocks has nothing to gain. In trained models tokens that
belong together find each other. `block_sparse` makes inputs of that kind.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from commandline.errors import UsageError

BLOCK = 64
GROUPS = 16
GAP = 16.0
# Scores that are held at once while blocks are counted.
SCORES = 2**25


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


def block_sparsity(
    q: Tensor, k: Tensor, variant: str, is_causal: bool, params: dict[str, Any], heads: int = 2
) -> float:
    """The share of 64 × 64 blocks in which every weight of a head is exactly 0.

    Of the first batch's first ``heads`` heads; under causality of the blocks on and below the
    diagonal. The weights are the definition's, in fp32, some query rows at a time.
    """
    q, k = (x.detach()[:1, :heads].float() for x in (q, k))
    length = q.shape[2]
    step = max(BLOCK, SCORES // (q.shape[1] * length) // BLOCK * BLOCK)
    empty = total = 0
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = stop if is_causal else length
        keys = k[:, :, :seen]
        w = attnzoo.attention_weights(
            q[:, :, start:stop], keys, keys, variant, is_causal=is_causal, **params
        )
        w = F.pad((w != 0).float(), (0, -seen % BLOCK, 0, (start - stop) % BLOCK))
        held = F.max_pool2d(w.flatten(0, 1)[:, None], BLOCK)[:, 0] > 0  # [H, rows/64, keys/64]
        visible = torch.ones_like(held)
        if is_causal:
            visible = visible.tril(start // BLOCK)
        empty += (visible & ~held).sum().item()
        total += visible.sum().item()
    return empty / total
