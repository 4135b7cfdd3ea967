"""A call cut into blocks of query rows, and the scores of a block: what `tiled` walks over.

A block holds about 8 MiB of scores over several heads, because a batched product needs the batch:
one head at a time is half as fast on a CPU. Keys that causality and window put out of a block's
reach are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.call import Call, cut

SCORES = 2**21  # in a block
ROWS = 128  # at most, in a block
HEADS = 8  # wanted in a block, before its rows are made fewer


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of some heads of a call, with the keys in their reach."""

    call: Call
    batches: slice
    heads: slice
    rows: slice
    keys: slice
    kv: slice  # of the flattened (batch, key/value head)

    def of(self, row: Tensor) -> Tensor:
        """The part of a row tensor, broadcastable to (b, h, rows)."""
        return cut(row, self.batches, self.heads, self.rows)

    def take(self, x: Tensor) -> Tensor:
        """The block of q-like x (B, H, Nq, D) as [kv, G·rows, D] in the call's dtype."""
        part = x[self.batches, self.heads, self.rows].to(self.call.dtype)
        return part.reshape(self.kv.stop - self.kv.start, -1, x.shape[-1])

    def shape(self) -> tuple[int, int, int]:
        return self.call.batch, self.call.heads, self.call.queries


def blocks(call: Call) -> Iterator[Block]:
    """Blocks that cover all rows with at least one key in reach of causality and window."""
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
            part = slice(low, min(low + rows, stop))
            yield from _heads_of(call, part, batches, heads)


def _heads_of(call: Call, rows: slice, batches: int, heads: int) -> Iterator[Block]:
    for b in range(0, call.batch, batches):
        over_b = slice(b, min(b + batches, call.batch))
        for h in range(0, call.heads, heads):
            over_h = slice(h, min(h + heads, call.heads))
            part, keys = call.block(over_b, over_h, rows)
            # Several batches come with all their heads, so the flat range has no gaps.
            first = over_b.start * call.kv_heads + over_h.start // call.group
            yield Block(
                part, over_b, over_h, rows, keys, slice(first, first + part.batch * part.kv_heads)
            )


def flat_keys(x: Tensor, call: Call) -> Tensor:
    """k or v as contiguous [B·Hkv, Nk, D] in the call's dtype."""
    return x.to(call.dtype).reshape(-1, *x.shape[2:]).contiguous()


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
    scale = block.call.scale
    if gain is None:
        return block.take(q) * scale
    factor = (block.of(gain) * scale).expand(block.shape())
    return block.take(q) * factor.reshape(block.kv.stop - block.kv.start, -1, 1)


def block_scores(
    block: Block, scaled: Tensor, keys: Tensor, scratch: Scratch, vanishes: bool
) -> tuple[Tensor, list[tuple[slice, Tensor]]]:
    """Scores [b, h, rows, keys] with the bias, and where keys are invisible.

    With ``vanishes`` those are −∞ already and the list is empty; otherwise φ has to be masked.
    """
    s = product(scaled, keys[block.kv, block.keys], scratch)
    s = s.view(*block.shape(), -1)
    bias = block.call.bias
    if isinstance(bias, Tensor):
        s.add_(bias)
    hidden = block.call.hidden()
    if not vanishes:
        return s, hidden
    hide(s, hidden, float("-inf"))
    return s, []


def hide(s: Tensor, hidden: list[tuple[slice, Tensor]], value: float) -> None:
    for columns, where in hidden:
        s[..., columns].masked_fill_(where, value)


class ScoreGradients:
    """Takes dS block by block and turns it into the gradients of what the scores are made of."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, gain: Tensor | None) -> None:
        self.q, self.gain = q, gain
        self.keys = flat_keys(k, call)
        self.dq = torch.zeros(q.shape, dtype=call.dtype, device=call.device)
        self.dk = torch.zeros_like(self.keys)
        rows = (call.batch, call.heads, call.queries)
        self.dgain = None if gain is None else self.dq.new_zeros(rows)
        self.dmask = None if call.mask is None else _like(call.mask, call.dtype)
        self.dalibi = None if call.alibi is None else _like(call.alibi, call.dtype)

    def add(self, block: Block, ds: Tensor, scaled: Tensor) -> None:
        """ds: [b, h, rows, keys]; scaled: the queries the scores were made from."""
        flat = ds.view(scaled.shape[0], scaled.shape[1], -1)
        part = (block.batches, block.heads, block.rows)
        self.dk[block.kv, block.keys].baddbmm_(flat.transpose(1, 2), scaled)
        dq = torch.bmm(flat, self.keys[block.kv, block.keys]).view(*block.shape(), -1)
        dq *= block.call.scale
        if self.dgain is None or self.gain is None:
            self.dq[part] = dq
        else:
            # From the un-gained sum: dividing by a gain of 0 (log 1) would lose it.
            self.dgain[part] = (dq * self.q[part].to(dq.dtype)).sum(-1)
            self.dq[part] = dq * block.of(self.gain)[..., None]
        if self.dmask is not None:
            target = cut(self.dmask, *part, block.keys)
            target += ds.sum_to_size(target.shape)
        if self.dalibi is not None:
            target = cut(self.dalibi, slice(None), block.heads)
            target -= (ds * block.call.distance.abs()).sum_to_size(*target.shape, 1)[..., 0]

    def tensors(
        self, k: Tensor, mask: Tensor | None, alibi: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, mask, alibi and gain, in the dtypes and shapes of their inputs."""
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


def _like(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """An accumulator for the gradient of x, or None where none is wanted."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device) if x.requires_grad else None


def constant(call: Call) -> Call:
    """The call without the tensors that an autograd function takes as inputs of their own."""
    return replace(call, mask=None, alibi=None)
