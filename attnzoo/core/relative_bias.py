"""A bias by relative position: ALiBi, or a table with one entry per relative position and head.

A bias is stored as one tensor ``values``, [1, H, W]. With W = 1 they are ALiBi's slopes m_h, and

    bias_hij = −m_h · |p_i − p_j|

for a query at position p_i and a key at p_j. With W = 2R + 1 they are a table r_h, and

    bias_hij = r_h[R + clamp(p_j − p_i, −R, R)]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.core.checks import DTYPES, check_dense, is_readable, shown


def bias_of(values: Tensor, distance: Tensor) -> Tensor:
    """The bias [1, H, …] where the query's position minus the key's is ``distance`` […]."""
    if is_alibi(values):
        return -values[(...,) + (None,) * (distance.dim() - 1)] * distance.abs()
    radius = values.shape[-1] // 2
    return values[:, :, radius - distance.clamp(-radius, radius)]


def is_alibi(values: Tensor) -> bool:
    """Whether the values are slopes, not a table."""
    return values.shape[-1] == 1


def add_gradient(total: Tensor, ds: Tensor, first: int) -> None:
    """Add to ``total`` [1, H, W] the gradient of the values from that of a bias, [B, H, Nq, Nk].

    ``first`` is the position of the first key minus that of the first query. The sums over
    diagonals need no atomic additions, so the result is the same in each run.
    """
    ds = ds.sum(0, keepdim=True)
    queries, keys = ds.shape[-2:]
    # In rows of queries + keys entries, read as rows that are one shorter, each diagonal is a
    # column. The last query comes first, so column 0 has the smallest relative position.
    rows = torch.nn.functional.pad(ds.flip(-2), (0, queries)).flatten(-2)
    by_position = rows[..., : queries * (queries + keys - 1)]
    by_position = by_position.unflatten(-1, (queries, queries + keys - 1)).sum(-2)
    smallest = first - (queries - 1)
    if is_alibi(total):
        position = torch.arange(by_position.shape[-1], device=ds.device) + smallest
        total -= (by_position * position.abs()).sum(-1, keepdim=True)
        return
    last, size = total.shape[-1] - 1, by_position.shape[-1]
    entry = last // 2 + smallest  # of column 0, before it is clamped
    start = min(max(0, 1 - entry), size)  # the columns before it are clamped to entry 0
    stop = max(start, min(size, last - entry))  # those from here on to the last entry
    total[..., 0] += by_position[..., :start].sum(-1)
    total[..., entry + start : entry + stop] += by_position[..., start:stop]
    total[..., last] += by_position[..., stop:].sum(-1)


def check_relative_bias(
    alibi: Any, table: Any, heads: int, q: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """The validated values, from the arguments ``alibi`` and ``relative_bias`` of a call."""
    if alibi is None and table is None:
        return None
    if alibi is not None and table is not None:
        raise ValueError(
            f"relative_bias must be None with alibi, got {shown(table)}; pass one of the two"
        )
    x: Any = alibi if table is None else table
    name = "alibi" if table is None else "relative_bias"
    check_dense(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    check_shape(name, x, heads, "query head")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    return as_values(name, x, dtype)


def check_shape(name: str, x: Tensor, heads: int, unit: str) -> None:
    """Raise unless the argument has one slope, or one row of a table, per ``unit``."""
    if name == "alibi" and x.shape != (heads,):
        raise ValueError(
            f"alibi must have one slope per {unit}, shape ({heads},), got {tuple(x.shape)}"
        )
    width = x.shape[1] if x.dim() == 2 else 0
    if name == "relative_bias" and (width < 3 or width % 2 == 0 or x.shape[0] != heads):
        raise ValueError(
            f"relative_bias must have an odd number of at least 3 entries per {unit}, shape "
            f"({heads}, 2R + 1), got {tuple(x.shape)}"
        )


def as_values(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [1, H, W] of an argument whose shape and dtype are valid.

    They have the dtype of scores, so that the gradients of several blocks or segments are not
    added in 16 bits.
    """
    values = x.to(dtype)
    if is_readable(x) and not bool(values.detach().isfinite().all()):
        raise ValueError(f"{name} must be finite in {dtype}, got {_not_finite(x, dtype)}")
    return values.view(1, -1, 1) if x.dim() == 1 else values[None]


def _not_finite(x: Tensor, dtype: torch.dtype) -> str:
    if x.dim() == 1:
        return str(x.tolist())
    head, entry = (int(n[0]) for n in (~x.to(dtype).isfinite()).nonzero(as_tuple=True))
    return f"{x[head, entry].item()} at [{head}, {entry}]"
