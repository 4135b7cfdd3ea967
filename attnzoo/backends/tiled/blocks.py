"""A call cut into blocks of query rows, and the scores of a block: what `tiled` walks over.

A block holds about 4 MiB of scores over a few heads: a batched product needs a batch for each core,
and larger blocks fall out of the cache. Keys that causality and window put out of a block's reach
are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.call import Call, score_dtype
from attnzoo.core.visibility import cut

SCORES = 2**20  # in a block: 4 MiB of fp32
ROWS = 128  # at most, in a block
HEADS = 2  # wanted in a block, before its rows are made fewer

Hidden = list[tuple[slice, Tensor]]

NUMBERS = ("scale", "left", "right", "query_origin", "key_origin")


def numbers_of(call: Call) -> dict[str, Any]:
    """The numbers of a call, as keywords of an operator."""
    return {name: getattr(call, name) for name in NUMBERS}


def call_of(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    alibi: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    *,
    value_dim: int = 0,
    **numbers: Any,
) -> Call:
    """The call again, from the tensors and the numbers that an operator was given."""
    batch, heads, queries, head_dim = q.shape
    segments = None
    if q_segments is not None and k_segments is not None:
        segments = q_segments, k_segments
    return Call(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=score_dtype(q),
        input_dtype=q.dtype,
        device=q.device,
        mask=mask,
        alibi=alibi,
        segments=segments,
        **numbers,
    )


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of some heads of a call, with the keys in their reach."""

    whole: Call
    batches: slice
    heads: slice
    rows: slice
    keys: slice
    kv: slice  # of the flattened (batch, key/value head)
    edges: Hidden | None  # what causality and window hide, where nothing else hides

    @property
    def call(self) -> Call:
        """The call that the block is: made only where masks, ALiBi or a definition ask for it."""
        return self.whole.block(self.batches, self.heads, self.rows)[0]

    @property
    def part(self) -> tuple[slice, slice, slice]:
        return self.batches, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(s.stop - s.start for s in self.part)  # type: ignore[return-value]

    def of(self, row: Tensor) -> Tensor:
        """The part of a row tensor, broadcastable to (b, h, rows)."""
        return cut(row, *self.part)

    def flat(self, x: Tensor) -> Tensor:
        """[b, h, rows, D] as [kv, G·rows, D]: the heads of a group share their keys."""
        b, h, rows = self.shape
        count = self.kv.stop - self.kv.start
        return x.reshape(count, b * h // count * rows, x.shape[-1])


def blocks(call: Call) -> Iterator[Block]:
    """Blocks that cover all rows with at least one key in reach of causality and window."""
    bare = call.mask is None and call.segments is None
    for start in range(0, call.queries, ROWS):
        stop = min(start + ROWS, call.queries)
        keys = call.key_range(slice(start, stop))
        width = keys.stop - keys.start
        if width == 0 or call.batch == 0 or call.heads == 0:
            continue
        heads = max(call.group, min(call.heads, HEADS) // call.group * call.group)
        rows = max(1, min(stop - start, SCORES // (width * heads)))
        heads = SCORES // (width * rows) // call.group * call.group
        heads = min(call.heads, max(call.group, heads))
        batches = max(1, SCORES // (width * rows * heads)) if heads == call.heads else 1
        for low in range(start, stop, rows):
            over = slice(low, min(low + rows, stop))
            keys = call.key_range(over)
            if keys.start == keys.stop:
                continue  # the first of these rows may stand before all keys
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
            # Several batches come with all their heads, so the flat range has no gaps.
            first = over_b.start * call.kv_heads + over_h.start // call.group
            size = (over_b.stop - b) * (over_h.stop - h) // call.group
            yield Block(call, over_b, over_h, rows, keys, slice(first, first + size), edges)


def flat_keys(x: Tensor, call: Call) -> Tensor:
    """k or v as contiguous [B·Hkv, Nk, D] in the call's dtype."""
    return x.to(call.dtype).flatten(0, 1).contiguous()


class Scratch:
    """One buffer that the blocks of a walk share, grown to the largest."""

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
    """a @ bᵀ for [n, M, D] and [n, K, D], in the scratch: [n, M, K]."""
    out = scratch.view(a.shape[0], a.shape[1], b.shape[1])
    return torch.bmm(a, b.transpose(1, 2), out=out)


def scaled_queries(block: Block, q: Tensor, gain: Tensor | None) -> Tensor:
    """gain · scale · q of the block, [kv, G·rows, D]."""
    part, scale = q[block.part].to(block.whole.dtype), block.whole.scale
    factor = scale if gain is None else (block.of(gain) * scale)[..., None]
    return block.flat(part * factor)


def block_scores(
    block: Block, scaled: Tensor, keys: Tensor, scratch: Scratch, vanishes: bool
) -> tuple[Tensor, Hidden]:
    """Scores [b, h, rows, keys] with the bias, and where keys are invisible.

    With ``vanishes`` those are −∞ already and the list is empty; otherwise φ has to be masked.
    """
    flat = product(scaled, keys[block.kv, block.keys], scratch)
    s = flat.view(*block.shape, flat.shape[-1])
    hidden = block.edges
    if hidden is None or block.whole.has_bias:
        part = block.call
        hidden = part.hidden() if hidden is None else hidden
        if isinstance(bias := part.bias, Tensor):
            s.add_(bias)
    if not vanishes:
        return s, hidden
    hide(s, hidden, float("-inf"))
    return s, []


def hide(s: Tensor, hidden: Hidden, value: float) -> None:
    for columns, where in hidden:
        s[..., columns].masked_fill_(where, value)


class ScoreGradients:
    """Takes dS block by block and turns it into the gradients of what the scores are made of."""

    def __init__(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        gain: Tensor | None,
        wants_mask: bool,
        wants_alibi: bool,
    ) -> None:
        self.call, self.q, self.gain = call, q, gain
        self.keys = flat_keys(k, call)
        self.dq = torch.zeros(q.shape, dtype=call.dtype, device=call.device)
        self.dk = torch.zeros_like(self.keys)
        rows = (call.batch, call.heads, call.queries)
        self.dgain = None if gain is None else self.dq.new_zeros(rows)
        self.dmask, self.dalibi = (
            self.dq.new_zeros(x.shape) if wanted and x is not None else None
            for x, wanted in ((call.mask, wants_mask), (call.alibi, wants_alibi))
        )

    def add(self, block: Block, ds: Tensor, scaled: Tensor) -> None:
        """ds: [b, h, rows, keys]; scaled: the queries the scores were made from."""
        flat = block.flat(ds)
        self.dk[block.kv, block.keys].baddbmm_(flat.transpose(1, 2), scaled)
        dq = torch.bmm(flat, self.keys[block.kv, block.keys]).view(*block.shape, scaled.shape[-1])
        dq *= block.whole.scale
        if self.dgain is None or self.gain is None:
            self.dq[block.part] = dq
        else:
            # From the sum before the gain: a gain of 0 (log 1) cannot be divided out.
            self.dgain[block.part] = (dq * self.q[block.part].to(dq.dtype)).sum(-1)
            self.dq[block.part] = dq * block.of(self.gain)[..., None]
        if self.dmask is not None:
            target = cut(self.dmask, *block.part, block.keys)
            target += ds.sum_to_size(target.shape)
        if self.dalibi is not None:
            target = cut(self.dalibi, slice(None), block.heads)
            target -= (ds * block.call.distance.abs()).sum_to_size(*target.shape, 1)[..., 0]

    def tensors(self, k: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, mask, alibi and gain, in the dtypes and shapes of their inputs."""
        mask, alibi = self.call.mask, self.call.alibi
        return (
            self.dq.to(self.q.dtype),
            self.dk.view(k.shape).to(k.dtype),
            None if self.dmask is None or mask is None else self.dmask.to(mask.dtype),
            None if self.dalibi is None or alibi is None else self.dalibi.to(alibi.dtype),
            None if self.dgain is None or self.gain is None else reduce_row(self.dgain, self.gain),
        )


def reduce_row(gradient: Tensor, row: Tensor) -> Tensor:
    """A gradient per (b, h, i) summed to the shape that the row broadcasts from."""
    return gradient.sum_to_size(row.shape).to(row.dtype)


def solid(q: Tensor, *grads: Tensor | None) -> tuple[Tensor, ...]:
    """What an operator returns for them: a gradient that is not there has no elements."""
    return tuple(q.new_empty(0) if x is None else x for x in grads)


def fake_gradient(q: Tensor, x: Tensor | None, wanted: bool) -> Tensor:
    """For the fake of an operator: in x's shape and dtype, or without elements."""
    return x.new_empty(x.shape) if wanted and x is not None else q.new_empty(0)
