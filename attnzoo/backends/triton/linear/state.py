"""The memory layouts of a linear form's state in the kernels; see `layout`.

Between operators a state (B, Hkv, F, WIDTH) is in fp32. So is the state of a chunk if features are
fp32. If they are bf16, each number is stored as bf16 parts that add up to it: two of a value, three
of the normalizer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Columns of a normalizer in bf16, of which three are used. A block must have enough for copies of
# 16 bytes.
NORMALIZER = 32


class StateLayout(NamedTuple):
    """Columns of a state: PARTS times VALUES, then those of the normalizer."""

    PARTS: int
    VALUES: int  # columns of values, padded so that each part begins at 16 bytes
    WIDTH: int  # all columns


def layout(value_dim: int, dtype: torch.dtype = torch.float32) -> StateLayout:
    if dtype == torch.bfloat16:
        values = (value_dim + 7) // 8 * 8
        return StateLayout(2, values, 2 * values + NORMALIZER)
    values = (value_dim + 3) // 4 * 4
    return StateLayout(1, values, values + 4)


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
    values, normalizer = unpack(state, value_dim)
    parts = [pad(part, (0, -value_dim % 8)) for part in _parts(values, 2)]
    last = torch.cat(_parts(normalizer, 3), dim=-1)
    return torch.cat([*parts, pad(last, (0, NORMALIZER - 3))], dim=-1)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` bf16 tensors whose sum is as close to x as possible."""
    parts = []
    for _ in range(count):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return parts
