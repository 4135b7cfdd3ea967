"""Packed sequences on a CPU: one call for all segments of equal lengths, instead of a dense mask.

A row of N tokens costs N² scores under a mask. Its segments, of n tokens each, cost Σ n² scores.
The host must be able to read the ids of the segments without waiting. On a GPU, kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.core.call import Call
from attnzoo.core.checks import is_readable, is_recorded
from attnzoo.functional.prepare import ValidatedCall, choose_backend, why_unsupported

Cut = list[tuple[Tensor, ...]]  # the runs of each row


class Segment(NamedTuple):
    """A segment with queries and keys: its row, and its place among the runs of the row."""

    row: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Runs:
    """Lengths of the runs of tokens with one id, for each row, and the segments they form.

    Attributes:
        queries: Lengths of the runs of queries of each row.
        keys: Lengths of the runs of keys of each row.
        segments: The segments that have queries and keys.
        restart: Whether the last query of a segment has the position of its last key. Otherwise
            tokens have their positions in the row.
    """

    queries: list[list[int]]
    keys: list[list[int]]
    segments: list[Segment]
    restart: bool = False


class Part(NamedTuple):
    """A call on segments of equal lengths, as one batch."""

    segments: list[Segment]
    ready: ValidatedCall


def splits(q: Any, backend: Any) -> bool:
    """Whether sorted segments are split for this backend; None is the preferred one.

    The answer does not depend on the ids, which may still be unsorted.
    """
    if not (isinstance(q, Tensor) and is_readable(q) and not is_recorded()):
        return False
    named = BACKENDS.get(backend) if isinstance(backend, str) else None
    return named is None or not named.walks_segments or named.splits_segments


def runs_of(ready: ValidatedCall, backend: str | None) -> Runs | None:
    """The runs of a call with segments; None if it must run as one call.

    That is so if the call is not split for the backend, if the tokens of a segment are not
    contiguous, if no query has a key, or if the variant has a parameter per key and a query does
    not stand at a key of its segment.
    """
    call = ready.call
    if call.segments is None or not splits(ready.q, backend):
        return None
    if not all(map(is_readable, call.segments)):
        return None
    queries, keys, segments = [], [], []
    for row, ids in enumerate(zip(*(x.numpy() for x in call.segments))):
        (of_queries, query_lengths), (of_keys, key_lengths) = map(_runs, ids)
        key_run = {x: i for i, x in enumerate(of_keys)}
        if len(key_run) < len(of_keys) or len(set(of_queries)) < len(of_queries):
            return None
        segments += [Segment(row, i, key_run[x]) for i, x in enumerate(of_queries) if x in key_run]
        queries.append(query_lengths)
        keys.append(key_lengths)
    runs = Runs(queries, keys, segments)
    if not segments or (_per_key(ready) and not _own_keys_inside(call, runs)):
        return None
    return runs


def runs_of_sequences(queries: list[int], keys: list[int]) -> Runs:
    """The sequences of `varlen_attention`, of these lengths, as segments of one row."""
    pairs = enumerate(zip(queries, keys, strict=True))
    segments = [Segment(0, i, i) for i, pair in pairs if min(pair) > 0]
    return Runs([queries], [keys], segments=segments, restart=True)


def _runs(ids: np.ndarray) -> tuple[list[int], list[int]]:
    """The ids of the runs of equal ids, and the lengths of the runs."""
    ends = np.flatnonzero(np.append(ids[1:] != ids[:-1], True)[: len(ids)])
    return ids[ends].tolist(), np.diff(ends, prepend=-1).tolist()


def _per_key(ready: ValidatedCall) -> bool:
    return any(param.per_key for param in ready.variant.params)


def _origins(call: Call, runs: Runs) -> Iterator[tuple[int, int, int]]:
    """For each segment: number of queries, number of keys, position of the first query.

    The position is relative to the first key of the segment.
    """
    starts = [[[0, *accumulate(lengths)] for lengths in side] for side in (runs.queries, runs.keys)]
    for row, i, j in runs.segments:
        queries, keys = runs.queries[row][i], runs.keys[row][j]
        origin = keys - queries
        if not runs.restart:
            origin = call.query_origin - call.key_origin + starts[0][row][i] - starts[1][row][j]
        yield queries, keys, origin


def _own_keys_inside(call: Call, runs: Runs) -> bool:
    """Whether the position of each query is that of a key of its segment."""
    return all(0 <= at <= keys - queries for queries, keys, at in _origins(call, runs))


def _groups(ready: ValidatedCall, runs: Runs) -> dict[tuple[int, int, int], list[Segment]]:
    """Segments by number of queries, number of keys and position of the first query.

    The group with the most scores comes first, so that later ones fit in the memory it has freed.
    """
    call = ready.call
    positional = ready.variant.by_position or _per_key(ready) or call.relative_bias is not None
    positional = positional or call.left is not None or call.right is not None
    groups: dict[tuple[int, int, int], list[Segment]] = {}
    for segment, (queries, keys, origin) in zip(runs.segments, _origins(call, runs)):
        # Without positions, segments with other origins may share a call.
        key = (queries, keys, origin if positional else keys - queries)
        groups.setdefault(key, []).append(segment)

    def scores(item: tuple[tuple[int, int, int], list[Segment]]) -> int:
        (queries, keys, _), segments = item
        return len(segments) * queries * keys

    return dict(sorted(groups.items(), key=scores, reverse=True))


def parts_of(ready: ValidatedCall, runs: Runs) -> Iterator[Part]:
    """Split a call into calls on segments of equal lengths, each a batch of segments.

    The call with the most scores comes first.
    """
    groups, call = _groups(ready, runs), ready.call
    even = _even(runs) if len(groups) == 1 else None
    cuts = _Cuts(ready, runs, even)
    for (queries, keys, origin), segments in groups.items():
        q, k, v = cuts.tensors(segments)
        mask, params = cuts.mask(segments), cuts.params(segments)
        segment_call = replace(
            call, batch=len(segments), queries=queries, keys=keys, query_origin=origin,
            key_origin=0, segments=None, mask=mask,
        )  # fmt: skip
        reason = why_unsupported(ready.variant, segment_call, params) if runs.restart else None
        yield Part(segments, ValidatedCall(q, k, v, segment_call, ready.variant, params, reason))


def _even(runs: Runs) -> int | None:
    """Number of segments per row if they cover all tokens in order, as many in each row."""
    counts = {len(lengths) for lengths in (*runs.queries, *runs.keys)}
    count = max(counts)
    expected = [Segment(row, i, i) for row in range(len(runs.queries)) for i in range(count)]
    return count if len(counts) == 1 and runs.segments == expected else None


def _fold(x: Tensor, count: int) -> Tensor:
    return rearrange(x, "b h (s n) d -> (b s) h n d", s=count)


def _cut(x: Tensor, lengths: list[list[int]], dim: int) -> Cut:
    """Cut each row of x (B or 1, …) into its runs along ``dim``.

    The backward of a split is one concatenation. That of a slice would fill a whole row.
    """
    rows = x.expand(len(lengths), *x.shape[1:]).unbind(0)
    return [row.split(row_lengths, dim - 1) for row, row_lengths in zip(rows, lengths, strict=True)]


def _stack(pieces: list[Tensor]) -> Tensor:
    return pieces[0][None] if len(pieces) == 1 else torch.stack(pieces)


class _Cuts:
    """The tensors of a call, cut into their runs once for all parts."""

    def __init__(self, ready: ValidatedCall, runs: Runs, even: int | None) -> None:
        self.ready, self.runs, self.even = ready, runs, even
        if even is None:
            self.q = _cut(ready.q, runs.queries, 2)
            self.k, self.v = (_cut(x, runs.keys, 2) for x in (ready.k, ready.v))
        mask = ready.call.mask
        self.key_mask = self.dense_mask = None
        if mask is not None and mask.shape[2] == 1:
            self.key_mask = _cut(mask, runs.keys, 3)
        elif mask is not None:
            self.dense_mask = _cut(mask, runs.queries, 2)
            ends = ([0, *accumulate(lengths)] for lengths in runs.keys)
            self.columns = [[slice(*pair) for pair in pairwise(bounds)] for bounds in ends]
        self.per_query, self.per_key = {}, {}
        for param in ready.variant.params:
            value = ready.params[param.name]
            if not isinstance(value, Tensor) or not (param.per_token or param.per_key):
                continue
            if value.shape[0] == 1 and value.shape[2] == 1:
                continue  # one value per head
            if param.per_key:
                self.per_key[param.name] = _cut(value, runs.keys, 2)
            else:
                self.per_query[param.name] = _cut(value, runs.queries, 2)

    def tensors(self, segments: list[Segment]) -> tuple[Tensor, ...]:
        """q, k and v of segments of equal lengths, (S, H, n, D)."""
        if self.even is not None:
            count = self.even
            return tuple(_fold(x, count) for x in (self.ready.q, self.ready.k, self.ready.v))
        return _of_queries(self.q, segments), *(_of_keys(x, segments) for x in (self.k, self.v))

    def mask(self, segments: list[Segment]) -> Tensor | None:
        """The mask of segments of equal lengths, (S, H or 1, n or 1, n)."""
        if self.key_mask is not None:
            return _of_keys(self.key_mask, segments)
        if self.dense_mask is None:
            return None
        cut, columns = self.dense_mask, self.columns
        return _stack([cut[row][i][..., columns[row][j]] for row, i, j in segments])

    def params(self, segments: list[Segment]) -> dict[str, Any]:
        """The parameters of segments of equal lengths."""
        cut_params = {name: _of_queries(cut, segments) for name, cut in self.per_query.items()}
        cut_params |= {name: _of_keys(cut, segments) for name, cut in self.per_key.items()}
        return self.ready.params | cut_params


def _of_queries(cut: Cut, segments: list[Segment]) -> Tensor:
    return _stack([cut[row][i] for row, i, _ in segments])


def _of_keys(cut: Cut, segments: list[Segment]) -> Tensor:
    return _stack([cut[row][j] for row, _, j in segments])


def attend_segments(
    ready: ValidatedCall, runs: Runs, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """The output (B, H, Nq, Dv) in the dtype of the inputs, and lse if the call asks for it."""
    call, even = ready.call, None
    outs: list[list[Tensor | None]] = [[None] * len(lengths) for lengths in runs.queries]
    lses: list[list[Tensor | None]] = [[None] * len(lengths) for lengths in runs.queries]
    for segments, part in parts_of(ready, runs):
        chosen = choose_backend(part, backend)
        out, lse = chosen.backend.run(part.q, part.k, part.v, part.call, chosen.form)
        out = out.to(call.input_dtype)  # [S, H, n, Dv]
        if len(segments) == sum(map(len, runs.queries)) and (even := _even(runs)):
            # In memory the heads of one token are adjacent, as varlen_attention returns them.
            out = rearrange(out, "(b s) h n d -> b (s n) h d", s=even).transpose(1, 2)
            if lse is not None:
                lse = rearrange(lse, "(b s) h n -> b (s n) h", s=even).transpose(1, 2)
            return out, lse
        pieces = zip(
            segments, out.transpose(1, 2).unbind(0), [None] * len(segments) if lse is None else lse
        )
        for (row, i, _), piece, piece_lse in pieces:
            outs[row][i], lses[row][i] = piece, piece_lse
    out = _join(outs, runs, ready.q.new_zeros(1, call.heads, call.value_dim))
    if not call.return_lse:
        return out.transpose(1, 2), None
    nothing = ready.q.new_full((1, call.heads), float("-inf"), dtype=call.dtype)
    transposed = [[None if x is None else x.mT for x in row_lses] for row_lses in lses]
    return out.transpose(1, 2), _join(transposed, runs, nothing).transpose(1, 2)


def _join(pieces: list[list[Tensor | None]], runs: Runs, nothing: Tensor) -> Tensor:
    """The pieces (n, H, …) as (B, N, H, …). A piece that is None is ``nothing`` for all tokens."""
    rows = []
    for row_pieces, lengths in zip(pieces, runs.queries, strict=True):
        filled = [
            nothing.expand(n, *nothing.shape[1:]) if x is None else x
            for x, n in zip(row_pieces, lengths, strict=True)
        ]
        rows.append(torch.cat(filled))
    return _stack(rows)
