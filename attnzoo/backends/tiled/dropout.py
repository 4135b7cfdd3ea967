"""Dropout whose random numbers depend on (seed, batch, head, query, key), not on the block size.

The backward of `tiled` draws the same mask again from the saved seed. With a stateful generator the
mask would depend on the order of the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.tiled.blocks import Block
from attnzoo.core.call import Call

_MAX_UINT32 = 0xFFFFFFFF


def new_seed(call: Call) -> Tensor:
    """Draw a seed from the device's torch generator, so that torch.manual_seed applies."""
    return torch.randint(0, _MAX_UINT32 + 1, (), dtype=torch.int64, device=call.device)


def _hash(x: Tensor) -> Tensor:
    """A one-to-one hash of 32-bit integers (multiply-xorshift)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MAX_UINT32
    x = ((x ^ (x >> 15)) * 0x6D2B79F5) & _MAX_UINT32
    return x ^ (x >> 16)


def keep_mask(block: Block, call: Call, seed: Tensor) -> Tensor:
    """Return [b, h, rows, keys] in the call's dtype: 0 for dropped weights, else 1/(1 − p)."""
    b, h, i, j = (
        torch.arange(s.start, s.stop, device=call.device)
        for s in (block.batches, block.heads, block.rows, block.keys)
    )
    row = (b[:, None, None] * call.heads + h[:, None]) * call.queries + i
    # Key indices are hashed before they are combined with row indices. Otherwise the masks of two
    # rows could be shifted copies of each other.
    bits = _hash(_hash(row ^ seed)[..., None] ^ _hash(j + 0x9E3779B9))
    keep = bits >= int(call.dropout_p * (_MAX_UINT32 + 1))
    return keep.to(call.dtype) / (1 - call.dropout_p)
