"""The memory layouts of a linear form's state in the kernels.

Between operators a state is (B, Hkv, F, `width`) in fp32. The state of a chunk has the same layout
if features are fp32. If they are bf16, each number is stored as bf16 parts that add up to it: two
of a value, three of the normalizer. See `split`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

NORMALIZER = 32  # columns of the normalizer in bf16, of which three are used


def width(value_dim: int, dtype: torch.dtype = torch.float32) -> int:
    """Columns of a state: values and normalizer, each padded so that it begins at 16 bytes."""
    if dtype == torch.bfloat16:
        return (value_dim + 7) // 8 * 16 + NORMALIZER
    return (value_dim + 3) // 4 * 4 + 4


def pack(sums: Tensor, value_dim: int) -> Tensor:
    """Convert sums (…, F, Dv + 1) to the kernels' layout (…, F, `width`)."""
    values, normalizer = sums[..., :-1], sums[..., -1:]
    return torch.cat([pad(values, (0, -value_dim % 4)), pad(normalizer, (0, 3))], dim=-1)


def unpack(state: Tensor, value_dim: int) -> Tensor:
    """Convert a state (…, F, `width`) back to sums (…, F, Dv + 1)."""
    return torch.cat([state[..., :value_dim], state[..., -4:-3]], dim=-1)


def split(state: Tensor, value_dim: int, dtype: torch.dtype) -> Tensor:
    """Convert a state (…, F, `width`) to the layout of a chunk's state; ``dtype`` of features."""
    if dtype != torch.bfloat16:
        return state
    values, normalizer = state[..., :value_dim], state[..., -4:-3]
    parts = [pad(part, (0, -value_dim % 8)) for part in _parts(values, 2)]
    last = torch.cat(_parts(normalizer, 3), dim=-1)
    return torch.cat([*parts, pad(last, (0, NORMALIZER - 3))], dim=-1)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` bf16 tensors whose sum is as close to x as possible."""
    found = []
    for _ in range(count):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return found
