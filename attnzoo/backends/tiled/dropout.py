"""The dropout factors of the weights of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.dropout import keep_scale, retained
from attnzoo.backends.tiled.blocks import Block
from attnzoo.core.call import Call


def keep_mask(block: Block, call: Call, seed: Tensor) -> Tensor:
    """Return [b, h, rows, keys] in the call's dtype: 0 for dropped weights, else 1/(1 − p)."""
    b, h, i, j = (
        torch.arange(s.start, s.stop, device=call.device)
        for s in (block.batches, block.heads, block.rows, block.keys)
    )
    rows = (b[:, None, None] * call.heads + h[:, None]) * call.queries + i
    return retained(rows, j, seed, call.dropout_p).to(call.dtype) * keep_scale(call.dropout_p)
