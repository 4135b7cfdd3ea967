"""n_i: how many keys each row may see, in O(N) memory unless a dense mask is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.core.call import Call

_ROWS = 256  # rows of a dense mask counted at a time


def count_visible(call: Call) -> Tensor:
    """n_i as fp32 (fp64 for fp64 inputs), broadcastable to (B, H, Nq)."""
    if call.queries == 0:
        return torch.zeros(1, 1, 0, dtype=call.dtype, device=call.device)
    if call.mask is not None and call.mask.shape[2] > 1:
        return _count_dense(call)
    first, last = _bounds(call)
    seen = None if call.mask is None else visible_entries(call.mask)[:, :, 0]  # [B|1, H|1, Nk]
    if call.segments is not None:
        counts = _count_segments(call, first, last, seen)
    elif seen is not None:
        before = _prefix(seen)  # [B|1, H|1, Nk+1]
        counts = before[..., last] - before[..., first]
    else:
        counts = (last - first).view(1, 1, -1)
    return counts.to(call.dtype)


def visible_entries(mask: Tensor) -> Tensor:
    """The keys that a mask leaves visible: True, or any finite number."""
    return mask if mask.dtype == torch.bool else mask != float("-inf")


def _bounds(call: Call) -> tuple[Tensor, Tensor]:
    """Row i may see the keys first_i … last_i − 1 as far as causality and window go."""
    at = torch.arange(call.queries, device=call.device) + (call.query_origin - call.key_origin)
    first = torch.zeros_like(at) if call.left is None else (at - call.left).clamp(0, call.keys)
    if call.right is None:
        return first, torch.full_like(at, call.keys)
    last = (at + call.right + 1).clamp(0, call.keys)
    return first, torch.maximum(first, last)


def _prefix(seen: Tensor) -> Tensor:
    """Exclusive running count along the last dimension, with the total at the end."""
    return torch.nn.functional.pad(seen.long().cumsum(-1), (1, 0))


def _count_segments(call: Call, first: Tensor, last: Tensor, seen: Tensor | None) -> Tensor:
    """Sort the keys by (segment, position); a row's keys are then one run, found by bisection."""
    assert call.segments is not None
    queries, keys = _dense_ranks(*call.segments)
    stride = call.keys + 1
    position = torch.arange(call.keys, device=call.device)
    order, index = (keys * stride + position).sort(dim=-1)  # [B, Nk]
    ends = [
        torch.searchsorted(order, (queries * stride + end).contiguous()) for end in (first, last)
    ]
    if seen is None:
        return (ends[1] - ends[0])[:, None]
    batch, heads = call.batch, seen.shape[1]
    seen = seen.expand(batch, heads, -1)
    before = _prefix(seen.gather(-1, index[:, None].expand(batch, heads, -1)))
    low, high = (before.gather(-1, end[:, None].expand(batch, heads, -1)) for end in ends)
    return high - low


def _dense_ranks(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Segment ids as 0, 1, …: any int64 id then times Nk + 1 stays within int64."""
    ids, index = torch.cat([queries, keys], dim=-1).sort(dim=-1)
    step = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).long()
    ranks = torch.zeros_like(ids).scatter(-1, index, step.cumsum(-1))
    return ranks[:, : queries.shape[-1]], ranks[:, queries.shape[-1] :]


def _count_dense(call: Call) -> Tensor:
    counts = []
    for start in range(0, call.queries, _ROWS):
        stop = min(start + _ROWS, call.queries)
        rows, _ = call.block(slice(0, call.batch), slice(0, call.heads), slice(start, stop))
        visible = rows.visible
        counts.append(visible.sum(-1, dtype=call.dtype))
    return torch.cat(counts, dim=-1)
