"""The tokens of a call in the order of their segments, for backends that walk tokens in order.

Segment ids may have any order. A stable sort puts the tokens of a segment side by side and leaves
them in the order of their positions. It runs on the device, so no call waits for the ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.core.call import Call


class PackedTokens(NamedTuple):
    """Where the tokens of a call are after the sort.

    Attributes:
        positions: Position of each token before the sort, (N,), or (B, N) if rows differ.
        order: Index of the token at each place, (B, N); None if tokens are sorted already.
        bounds: int32 (B, 2, N): for each place the first place of its segment, and the place after
            the last.
        skipped: Number of tokens before the queries, see `in_one_sequence`.
    """

    positions: Tensor
    order: Tensor | None
    bounds: Tensor
    skipped: int

    def sort(self, x: Tensor) -> Tensor:
        """Tokens x (B or 1, H, N, D) in the order of segments."""
        return x if self.order is None else _take(x, self.order)

    def sorted_positions(self) -> Tensor:
        """The position of the token at each place, (N,) or (B, N)."""
        if self.order is None:
            return self.positions
        return self.positions.expand_as(self.order).gather(-1, self.order)

    def queries(self, x: Tensor) -> Tensor:
        """Undo `sort`, and return the queries."""
        x = x if self.order is None else _take(x, self.order.argsort(-1))
        return x[:, :, self.skipped :]


def in_one_sequence(
    q: Tensor, k: Tensor, v: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Call, PackedTokens]:
    """The call as one of equally many queries and keys, which have the same segments.

    If queries and keys have ids of their own, the keys and then the queries are the tokens: a
    token that is no key is hidden by a key mask, and one that is no query has an output that
    nothing reads. The number of tokens, and the cost, is then that of both.
    """
    assert call.segments is not None
    of_queries, ids = call.segments
    positions, skipped = call.key_positions, 0
    if of_queries is not ids:
        skipped = call.keys
        positions = torch.cat([positions, call.query_positions])
        ids = torch.cat([ids, of_queries], dim=1)
        mask = call.mask
        if mask is None:
            mask = torch.ones(1, 1, 1, call.keys, dtype=torch.bool, device=call.device)
        mask = pad(mask, (0, call.queries))
        q, k, v = pad(q, (0, 0, skipped, 0)), *(pad(x, (0, 0, 0, call.queries)) for x in (k, v))
        tokens = call.keys + call.queries
        call = replace(call, queries=tokens, keys=tokens, segments=(ids, ids), mask=mask)
    order = None
    if call.longest is None:
        if skipped:
            # A stable sort leaves a key before the query at its position, which sees it.
            by_position = positions.argsort(stable=True)
            ids, order = ids[:, by_position].sort(dim=-1, stable=True)
            order = by_position[order]
        else:
            ids, order = ids.sort(dim=-1, stable=True)
    ids = ids.contiguous()
    ends = [torch.searchsorted(ids, ids, right=x, out_int32=True) for x in (False, True)]
    bounds = torch.stack(ends, dim=1)
    if call.longest is not None:  # sequences whose positions restart
        positions = positions - bounds[:, 0]
    return q, k, v, call, PackedTokens(positions, order, bounds, skipped)


def features_at(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, positions: Tensor
) -> Tensor:
    """Features (B, H, N, F) of tokens x (B, H, N, D) at positions (N,), or (B, N)."""
    if positions.dim() == 1:
        return function(x, positions)
    # A feature map takes one position per token, so that the tokens of all rows are one sequence.
    tokens = x.transpose(0, 1).flatten(1, 2)[None]  # [1, H, B·N, D]
    features = function(tokens, positions.flatten())
    return features[0].unflatten(1, positions.shape).transpose(0, 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (B or 1, H, N, D) at the places ``index`` (B, N)."""
    rows = index.shape[0]
    return x.expand(rows, *x.shape[1:]).gather(
        2, index[:, None, :, None].expand(rows, x.shape[1], -1, x.shape[3])
    )
