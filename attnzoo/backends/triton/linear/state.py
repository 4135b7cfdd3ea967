"""The memory layouts of a linear form's state in the kernels; see `layout`.

Between operators a state (B, Hkv, F, WIDTH) is in fp32. So is the state of a chunk if features are
fp32. If they are bf16, each number is stored as bf16 parts that add up to it: two of a value,
and up to six of the normalizer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class StateLayout(NamedTuple):
    """Columns of a state: PARTS times VALUES, then NORMALIZER."""

    PARTS: int
    VALUES: int  # columns of values, padded so that each part begins at 16 bytes
    NORMALIZER: int  # of which one is used, or three in bf16
    WIDTH: int  # all columns


def layout(value_dim: int, bits: int) -> StateLayout:
    """Return the layout of states with 16 or 32 bits per number."""
    parts, unit = 32 // bits, 128 // bits
    values = (value_dim + unit - 1) // unit * unit
    # The bf16 columns are one side of a product, whose block must have enough for copies of 16
    # bytes by all threads.
    normalizer = 32 if bits == 16 else 4
    return StateLayout(parts, values, normalizer, parts * values + normalizer)


def pack(values: Tensor, normalizer: Tensor, features: int) -> Tensor:
    """Return the state (…, features, WIDTH) in fp32 with the sums (…, F, Dv) and (…, F, 1)."""
    columns = [pad(values, (0, -values.shape[-1] % 4)), pad(normalizer, (0, 3))]
    return pad(torch.cat(columns, dim=-1), (0, 0, 0, features - values.shape[-2]))


def unpack(state: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the sums (…, F, Dv) and (…, F, 1) of a state (…, F, WIDTH) in fp32."""
    return state[..., :value_dim], state[..., -4:-3]


def split(state: Tensor, value_dim: int, dtype: torch.dtype) -> Tensor:
    """Convert a state (…, F, WIDTH) in fp32 to the layout for features of this dtype."""
    if dtype != torch.bfloat16:
        return state
    columns, sums = layout(value_dim, 16), unpack(state, value_dim)
    values = [pad(part, (0, columns.VALUES - value_dim)) for part in _parts(sums[0], 2)]
    normalizer = torch.cat(_parts(sums[1], 3), dim=-1)
    return torch.cat([*values, pad(normalizer, (0, columns.NORMALIZER - 3))], dim=-1)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` bf16 tensors whose sum is as close to x as possible."""
    parts = []
    for _ in range(count):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return parts
