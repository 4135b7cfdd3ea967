"""The memory layout of a linear form's state in the kernels: (B, Hkv, F, `width`) in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def width(value_dim: int) -> int:
    """Columns of a state: values, then the normalizer, each padded to a multiple of four."""
    return (value_dim + 3) // 4 * 4 + 4


def pack(sums: Tensor, value_dim: int) -> Tensor:
    """Convert sums (…, F, Dv + 1) to the kernels' layout (…, F, `width`)."""
    values, normalizer = sums[..., :-1], sums[..., -1:]
    return torch.cat([pad(values, (0, -value_dim % 4)), pad(normalizer, (0, 3))], dim=-1)


def unpack(state: Tensor, value_dim: int) -> Tensor:
    """Convert a state (…, F, `width`) back to sums (…, F, Dv + 1)."""
    return torch.cat([state[..., :value_dim], state[..., -4:-3]], dim=-1)
