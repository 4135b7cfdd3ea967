"""Which keys each query may see, and how many: causality, window, mask and segments.

Query i stands at position ``query_origin + i`` and key j at ``key_origin + j``. Causality and
window let a query at position p see the keys p − left … p + right. None means no bound, and
causality means right = 0. Mask and segments hide further keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from attnzoo.core.tensor_cache import TensorCache

SMALL_SCORES = 2**10  # up to this many queries × keys, visible keys and distances are cached too
_ROWS = 256  # number of rows of a dense mask to count at once


def cut(tensor: Tensor, *slices: slice) -> Tensor:
    """Slice the leading dimensions, except those of size 1, which broadcast."""
    return tensor[tuple(s if n > 1 else slice(None) for s, n in zip(slices, tensor.shape))]


def visible_entries(mask: Tensor) -> Tensor:
    """Entries of a mask that leave a key visible: True, or any number but −∞."""
    return mask if mask.dtype == torch.bool else mask != float("-inf")


class FullRows(NamedTuple):
    """What a block of queries needs to know of its rows in the whole call."""

    counts: Tensor  # n_i
    positions: Tensor | None  # `Visibility.places`; None if the variant does not need them


@dataclass(frozen=True, eq=False, kw_only=True)
class Visibility:
    """The visible keys of each query of a call."""

    batch: int
    heads: int
    queries: int
    keys: int
    dtype: torch.dtype  # of scores, per-query vectors and sums: fp32, or fp64 for fp64 inputs
    device: torch.device
    query_origin: int
    key_origin: int = 0
    left: int | None = None
    right: int | None = None
    mask: Tensor | None = None  # [B|1, H|1, Nq|1, Nk], bool or float
    segments: tuple[Tensor, Tensor] | None = None  # int64 [B, Nq], [B, Nk]
    full_rows: FullRows | None = None  # set in a block of queries
    cache: TensorCache | None = field(default=None, init=False)  # see `with_cache`

    @property
    def counts(self) -> Tensor:
        """n_i, the number of keys that query i may see; broadcasts to (B, H, Nq). Do not modify.

        Against scores (B, H, Nq, Nk) use ``call.counts[..., None]``.
        """
        if self.full_rows is not None:
            return self.full_rows.counts
        return self._cached("counts", lambda: _count_visible(self))

    @property
    def places(self) -> Tensor:
        """Position of each query within its sequence, from 0; broadcasts to (B, H, Nq).

        A sequence begins at the first key of the query's segment that the mask does not hide, so
        that padding on the left is not counted. Causality and window do not change it.
        """
        if self.full_rows is not None:
            if self.full_rows.positions is None:
                raise ValueError("a variant that uses call.places must have absolute=True")
            return self.full_rows.positions
        return self._cached("places", lambda: _places(self))

    def with_full_rows(self, absolute: bool) -> Self:
        """A copy whose blocks know n_i and, if ``absolute``, the `places` of their queries."""
        return replace(self, full_rows=FullRows(self.counts, self.places if absolute else None))

    @property
    def log_n(self) -> Tensor:
        """log max(n_i, 1), in the shape of ``counts``. Do not modify."""
        return self._cached("log_n", lambda: self.counts.clamp(min=1).log())

    @property
    def sees_no_later_key(self) -> bool:
        """Whether the call is causal, or all queries stand at or after the last key."""
        causal = self.right is not None and self.right <= 0
        return causal or self.keys == 0 or self.query_origin - self.key_origin >= self.keys - 1

    @property
    def sees_all(self) -> bool:
        """True if causality and window hide no key.

        False with a mask, with segments or without keys.
        """
        if self.mask is not None or self.segments is not None or self.keys == 0:
            return False
        first = self.query_origin - self.key_origin
        if self.right is not None and first + self.right < self.keys - 1:
            return False
        return self.left is None or first + self.queries - 1 - self.left <= 0

    @property
    def visible(self) -> Tensor:
        """True where query i may see key j; bool, broadcasts to (B, H, Nq, Nk)."""
        return self._cached("visible", self._visible, dense=True)

    def _visible(self) -> Tensor:
        distance = self.distance
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (distance <= self.left)
        if self.right is not None:
            seen = seen & (distance >= -self.right)
        seen = seen[None, None]
        if self.mask is not None:
            seen = seen & visible_entries(self.mask)
        if self.segments is not None:
            queries, keys = self.segments
            seen = seen & (queries[:, None, :, None] == keys[:, None, None, :])
        return seen

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, (Nq,)."""
        return torch.arange(self.queries, device=self.device) + self.query_origin

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys, (Nk,)."""
        return torch.arange(self.keys, device=self.device) + self.key_origin

    @property
    def distance(self) -> Tensor:
        """Position of query i minus position of key j, (Nq, Nk)."""
        return self._cached("distance", self._distance, dense=True)

    def _distance(self) -> Tensor:
        return self.query_positions[:, None] - self.key_positions

    @property
    def aligned(self) -> bool:
        """Whether the last query has the position of the last key (causality at bottom right)."""
        return self.query_origin + self.queries == self.key_origin + self.keys

    @property
    def key_mask(self) -> bool:
        """Whether there is a mask and its query dimension is 1."""
        return self.mask is not None and self.mask.shape[2] == 1

    def key_range(self, rows: slice) -> slice:
        """The range of keys that causality and window allow for the queries ``rows``."""
        first = self.query_origin - self.key_origin + rows.start
        last = first + rows.stop - rows.start - 1
        start = 0 if self.left is None else max(0, min(self.keys, first - self.left))
        stop = self.keys if self.right is None else max(0, min(self.keys, last + self.right + 1))
        return slice(start, max(start, stop))

    def hidden(self) -> list[tuple[slice, Tensor]]:
        """The invisible entries as pairs (slice of keys, bool (…, Nq, keys of the slice)).

        Without mask and segments, the slices hold only keys that causality or the window hides
        from some query.
        """
        if self.mask is not None or self.segments is not None:
            return [(slice(0, self.keys), ~self.visible)]
        offset = self.query_origin - self.key_origin
        hidden = []
        if self.right is not None and (start := max(0, offset + self.right + 1)) < self.keys:
            columns = slice(start, self.keys)
            hidden.append((columns, self.distance[:, columns] < -self.right))
        if self.left is not None:
            stop = min(self.keys, offset + self.queries - 1 - self.left)
            if stop > 0:
                columns = slice(0, stop)
                hidden.append((columns, self.distance[:, columns] > self.left))
        return hidden

    def rows(self, batches: slice, heads: slice, rows: slice, **changes: Any) -> Self:
        """A copy for a block of queries and the keys in their `key_range`.

        ``changes`` are new values of other fields.
        """
        keys = self.key_range(rows)
        mask, segments, full_rows = self.mask, self.segments, self.full_rows
        if full_rows is not None:
            full_rows = FullRows(
                cut(full_rows.counts, batches, heads, rows),
                None
                if full_rows.positions is None
                else cut(full_rows.positions, batches, heads, rows),
            )
        if mask is not None:
            mask = cut(mask, batches, heads, rows, keys)
        if segments is not None:
            segments = segments[0][batches, rows], segments[1][batches, keys]
        return replace(
            self,
            batch=batches.stop - batches.start,
            heads=heads.stop - heads.start,
            queries=rows.stop - rows.start,
            keys=keys.stop - keys.start,
            query_origin=self.query_origin + rows.start,
            key_origin=self.key_origin + keys.start,
            mask=mask,
            segments=segments,
            full_rows=full_rows,
            **changes,
        )

    def with_cache(self) -> Self:
        """A copy that caches counts and log_n, and in small calls visible and distance.

        The call must have no mask, ALiBi, relative bias or segments. ``dataclasses.replace`` of the
        copy gives an object that caches nothing.
        """
        copy = replace(self)
        object.__setattr__(copy, "cache", TensorCache(self.device))
        return copy

    def _cached(self, name: str, make: Callable[[], Tensor], dense: bool = False) -> Tensor:
        if self.cache is None or (dense and self.queries * self.keys > SMALL_SCORES):
            return make()
        return self.cache.get(name, make)


def _places(call: Visibility) -> Tensor:
    """`Visibility.places` in the dtype of scores."""
    at = (call.query_positions - call.key_origin).view(1, 1, -1)
    if call.keys > 0 and (call.mask is not None or call.segments is not None):
        at = at - _first_keys(call)
    return at.clamp(min=0).to(call.dtype)


def _first_keys(call: Visibility) -> Tensor:
    """Index of the first key that mask and segments leave visible, 0 if there is none."""
    if call.mask is None:
        return _first_of_segments(call)
    if call.key_mask and call.segments is None:
        return visible_entries(call.mask).byte().argmax(-1)
    rows = _blocks(replace(call, left=None, right=None))
    return torch.cat([block.visible.byte().argmax(-1) for block in rows], dim=-1)


def _first_of_segments(call: Visibility) -> Tensor:
    """Index of the first key of each query's segment, 0 if it has none, (B, 1, Nq)."""
    assert call.segments is not None
    queries, keys = _dense_ranks(*call.segments)
    position = torch.arange(call.keys, device=call.device).expand_as(keys)
    none = keys.new_full((len(keys), call.queries + call.keys), call.keys)  # one entry per rank
    first = none.scatter_reduce(-1, keys, position, "amin").gather(-1, queries)
    return (first % call.keys)[:, None]


def _count_visible(call: Visibility) -> Tensor:
    """n_i in the dtype of scores; broadcasts to (B, H, Nq)."""
    if call.queries == 0:
        return torch.zeros(1, 1, 0, dtype=call.dtype, device=call.device)
    if call.mask is not None and call.mask.shape[2] > 1:
        return _count_dense(call)
    if call.mask is None and call.segments is None and call.left is None:
        return _count_before(call)
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


def _count_before(call: Visibility) -> Tensor:
    """n_i if at most causality hides keys. Needs fewer operations than the general case."""
    shape = 1, 1, call.queries
    if call.right is None:
        return torch.full(shape, call.keys, dtype=call.dtype, device=call.device)
    start = call.query_origin - call.key_origin + call.right + 1
    last = torch.arange(start, start + call.queries, device=call.device).view(shape)
    return last.clamp_(0, call.keys).to(call.dtype)


def _bounds(call: Visibility) -> tuple[Tensor, Tensor]:
    """The keys [first, last) that causality and window allow for each query: two tensors (Nq,)."""
    at = torch.arange(call.queries, device=call.device) + (call.query_origin - call.key_origin)
    first = torch.zeros_like(at) if call.left is None else (at - call.left).clamp(0, call.keys)
    if call.right is None:
        return first, torch.full_like(at, call.keys)
    last = (at + call.right + 1).clamp(0, call.keys)
    return first, torch.maximum(first, last)


def _prefix(seen: Tensor) -> Tensor:
    """Exclusive cumulative sum along the last dimension, with the total at the end."""
    return torch.nn.functional.pad(seen.long().cumsum(-1), (1, 0))


def _count_segments(call: Visibility, first: Tensor, last: Tensor, seen: Tensor | None) -> Tensor:
    """n_i with segments.

    Keys are sorted by (segment, position). The keys that segments, causality and window allow a
    query are then one contiguous range. Keys that the mask hides are not counted.
    """
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
    """Replace segment ids by ranks 0, 1, …, so that rank · (Nk + 1) fits an int64."""
    ids, index = torch.cat([queries, keys], dim=-1).sort(dim=-1)
    step = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).long()
    ranks = torch.zeros_like(ids).scatter(-1, index, step.cumsum(-1))
    return ranks[:, : queries.shape[-1]], ranks[:, queries.shape[-1] :]


def _count_dense(call: Visibility) -> Tensor:
    return torch.cat([rows.visible.sum(-1, dtype=call.dtype) for rows in _blocks(call)], dim=-1)


def _blocks(call: Visibility) -> Iterator[Visibility]:
    """Blocks of a few queries each, with all keys that causality and window allow them."""
    for start in range(0, max(call.queries, 1), _ROWS):
        stop = min(start + _ROWS, call.queries)
        yield call.rows(slice(0, call.batch), slice(0, call.heads), slice(start, stop))
