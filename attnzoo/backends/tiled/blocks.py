"""Splits a call into blocks of queries and computes the scores of a block, for `tiled`.

On a CPU a block holds up to about 4 MiB of scores, because larger blocks do not fit in the cache. A
block has several heads, because a batched product needs one batch entry per core. On a GPU a block
holds 64 MiB, because each of its 20 to 400 operations is a launch. Scores of keys that causality
and window hide from a whole block are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.backends.dropout import keep_scale, retained
from attnzoo.backends.shared_operands import Layout
from attnzoo.core.call import Call, score_dtype
from attnzoo.core.device import is_cpu
from attnzoo.core.visibility import cut

SCORES = 2**20  # per block: 4 MiB of fp32
ROWS = 128  # largest number of queries per block
HEADS = 2  # smallest number of heads per block; the number of queries is reduced first
LARGE_SCORES = 2**24  # per block on a GPU: 64 MiB of fp32
MOST_ROWS = 1024  # largest number of queries per block on a GPU

Hidden = list[tuple[slice, Tensor]]  # ranges of keys, and masks of the hidden keys in them


def layout_of(call: Call) -> Layout:
    """Return the layout of a call for the operators of `tiled`."""
    segments = call.segments or (None, None)
    return Layout(
        call.scale, call.left, call.right, call.mask, *segments, call.relative_bias, call.softcap
    )


def call_of(
    q: Tensor, k: Tensor, layout: Layout, origin: int, value_dim: int = 0, dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Call:  # fmt: skip
    """Rebuild the call from operands of an operator. Query i is at the position ``origin + i``."""
    batch, heads, queries, head_dim = q.shape
    segments = None
    if layout.q_segments is not None and layout.k_segments is not None:
        segments = layout.q_segments, layout.k_segments
    return Call(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        head_dim=head_dim,
        value_dim=value_dim,
        scale=layout.scale,
        dtype=score_dtype(q),
        input_dtype=q.dtype,
        device=q.device,
        query_origin=origin,
        left=layout.left,
        right=layout.right,
        softcap=layout.softcap,
        mask=layout.mask,
        relative_bias=layout.relative_bias,
        segments=segments,
        dropout_p=dropout_p,
        return_lse=return_lse,
    )


@dataclass(frozen=True, eq=False)
class Block:
    """A range of queries and heads of a call, and the keys that causality and window allow."""

    parent: Call
    batches: slice
    heads: slice
    rows: slice
    keys: slice
    kv: slice  # range of the flattened (batch, key/value head)
    edges: Hidden | None  # keys hidden by causality and window; None with a mask or segments

    @property
    def call(self) -> Call:
        """The block as a call. It is needed only for a mask, segments, ALiBi or a definition."""
        return self.parent.block(self.batches, self.heads, self.rows)[0]

    @property
    def part(self) -> tuple[slice, slice, slice]:
        return self.batches, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(s.stop - s.start for s in self.part)  # type: ignore[return-value]

    def of(self, vector: Tensor) -> Tensor:
        """The block's part of a per-query vector, broadcastable to (b, h, rows)."""
        return cut(vector, *self.part)

    def flat(self, x: Tensor) -> Tensor:
        """Reshape [b, h, rows, D] to [kv, G·rows, D], because the heads of a group share keys."""
        b, h, rows = self.shape
        count = self.kv.stop - self.kv.start
        return x.reshape(count, b * h // count * rows, x.shape[-1])


def _sizes(call: Call) -> tuple[int, int, int]:
    """The numbers of scores and queries that a block has at most, and of heads at least."""
    if is_cpu(call.device):
        return SCORES, ROWS, HEADS
    # With few queries, causality hides fewer of the scores of a block. Blocks have more queries
    # only if all heads together have too few scores.
    per_row = max(1, call.batch * call.heads * call.keys)
    return LARGE_SCORES, max(ROWS, min(MOST_ROWS, LARGE_SCORES // per_row)), 1


def blocks(call: Call) -> Iterator[Block]:
    """Return blocks that cover all queries for which causality and window allow a key."""
    bare = call.mask is None and call.segments is None
    scores, most_rows, fewest_heads = _sizes(call)
    for start in range(0, call.queries, most_rows):
        stop = min(start + most_rows, call.queries)
        keys = call.key_range(slice(start, stop))
        width = keys.stop - keys.start
        if width == 0 or call.batch == 0 or call.heads == 0:
            continue
        heads = max(call.group, min(call.heads, fewest_heads) // call.group * call.group)
        rows = max(1, min(stop - start, scores // (width * heads)))
        heads = scores // (width * rows) // call.group * call.group
        heads = min(call.heads, max(call.group, heads))
        batches = max(1, scores // (width * rows * heads)) if heads == call.heads else 1
        for low in range(start, stop, rows):
            over = slice(low, min(low + rows, stop))
            keys = call.key_range(over)
            if keys.start == keys.stop:
                continue  # causality and window allow no key
            first = call.block(slice(0, 1), slice(0, call.group), over)[0] if bare else None
            edges = None if first is None else first.hidden()
            yield from _heads_of(call, over, keys, edges, batches, heads)


def _heads_of(
    call: Call, rows: slice, keys: slice, edges: Hidden | None, batches: int, heads: int
) -> Iterator[Block]:
    for b in range(0, call.batch, batches):
        over_b = slice(b, min(b + batches, call.batch))
        for h in range(0, call.heads, heads):
            over_h = slice(h, min(h + heads, call.heads))
            # A block with several batch entries has all heads. Its (batch, key/value head) pairs
            # are therefore a contiguous range.
            first = over_b.start * call.kv_heads + over_h.start // call.group
            size = (over_b.stop - b) * (over_h.stop - h) // call.group
            yield Block(call, over_b, over_h, rows, keys, slice(first, first + size), edges)


def flat_keys(x: Tensor, call: Call) -> Tensor:
    """k or v as contiguous [B·Hkv, Nk, D] in the call's dtype."""
    return x.to(call.dtype).flatten(0, 1).contiguous()


class Scratch:
    """A buffer that all blocks share. It grows to the size of the largest block."""

    def __init__(self, call: Call) -> None:
        self.buffer = torch.empty(0, dtype=call.dtype, device=call.device)

    def view(self, *shape: int) -> Tensor:
        size = 1
        for n in shape:
            size *= n
        if self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=self.buffer.dtype, device=self.buffer.device)
        return self.buffer[:size].view(shape)


def product(a: Tensor, b: Tensor, scratch: Scratch) -> Tensor:
    """a @ bᵀ for [n, M, D] and [n, K, D], written to the scratch buffer: [n, M, K]."""
    out = scratch.view(a.shape[0], a.shape[1], b.shape[1])
    return torch.bmm(a, b.transpose(1, 2), out=out)


def reduce_vector(gradient: Tensor, vector: Tensor) -> Tensor:
    """Sum a gradient (B, H, Nq) to the shape of ``vector``, which was broadcast to (B, H, Nq)."""
    return gradient.sum_to_size(vector.shape).to(vector.dtype)


def keep_mask(block: Block, call: Call, seed: Tensor) -> Tensor:
    """Return [b, h, rows, keys] in the call's dtype: 0 for dropped weights, else 1/(1 − p)."""
    b, h, i, j = (
        torch.arange(s.start, s.stop, device=call.device)
        for s in (block.batches, block.heads, block.rows, block.keys)
    )
    rows = (b[:, None, None] * call.heads + h[:, None]) * call.queries + i
    return retained(rows, j, seed, call.dropout_p).to(call.dtype) * keep_scale(call.dropout_p)
