"""Which weights dropout keeps: a function of (seed, batch, head, query, key) alone.

`tiled` and `flash` compute it in blocks, of any size and in any order, and the backward computes it
again from the saved seed. With a stateful generator the mask would depend on the order of the
blocks. `tiled` uses `retained`, the kernels `triton.common.dropout.retained`: the same mask for the
same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.core.call import Call

_MAX_UINT32 = 0xFFFFFFFF


def new_seed(call: Call) -> Tensor:
    """Draw a seed from the device's torch generator, so that torch.manual_seed applies."""
    return torch.randint(0, _MAX_UINT32 + 1, (), dtype=torch.int64, device=call.device)


def in_24_bits(p: float) -> float:
    """The probability with which weights are dropped: p rounded down to a multiple of 2⁻²⁴.

    It is exact in fp32, which kernels take.
    """
    return int(p * 2**24) / 2**24


def keep_scale(p: float) -> float:
    """The factor of the weights that are kept: 1 / (1 − p) for the rounded p.

    With 1 − 10⁻⁹ instead of its rounded value the mean would be 60 times as large.
    """
    return 1.0 / (1.0 - in_24_bits(p))


def _hash(x: Tensor) -> Tensor:
    """A one-to-one hash of 32-bit integers (multiply-xorshift)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MAX_UINT32
    x = ((x ^ (x >> 15)) * 0x6D2B79F5) & _MAX_UINT32
    return x ^ (x >> 16)


def retained(rows: Tensor, keys: Tensor, seed: Tensor, p: float) -> Tensor:
    """Return the mask (…, keys) of the weights that are kept.

    rows: int64 (…), the index of (batch, head, query). keys: int64 (keys,), indices of keys.
    """
    # Key indices are hashed before they are combined with row indices. Otherwise the masks of two
    # rows could be shifted copies of each other.
    of_rows = _hash((rows ^ seed) & _MAX_UINT32)[..., None]
    bits = _hash(of_rows ^ _hash((keys + 0x9E3779B9) & _MAX_UINT32))
    return bits >= int(in_24_bits(p) * (_MAX_UINT32 + 1))
