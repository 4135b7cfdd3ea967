"""The range of keys that share a segment with a tile of queries, and the reverse.

Without it, packed sequences would cost N² instead of Σ n_i². The range of a tile reaches from the
first to the last entry of the other side whose segment lies between the smallest and the largest
segment of the tile. If segments are sorted, it holds little more than the segments of the tile. If
they are not, it may hold all entries. Masks in the kernels decide in both cases.

The ranges are computed on the device, so no call waits for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.triton.common.launch import Launch
from attnzoo.backends.triton.common.tile import key_blocks
from attnzoo.backends.triton.common.tiles import Config


@triton.jit(do_not_specialize=["count", "other_count"])
def segment_ranges(
    segments, others, ranges, count, other_count, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the range (first, last + 1) of ``others`` for each tile of BLOCK ``segments``.

    ``segments`` is int64 [B, count], ``others`` int64 [B, other_count], and ``ranges`` int32
    [B, tiles, 2]. Grid: one program per (batch, tile). The range of a tile that shares no segment
    is empty: (other_count, 0).
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(count, BLOCK)
    b, start = row // tiles, row % tiles * BLOCK
    i = tl.minimum(start + tl.arange(0, BLOCK), count - 1)
    ids = tl.load(segments + b * count + i)  # [BLOCK]
    lowest, highest = tl.min(ids, 0), tl.max(ids, 0)
    first, last = tl.zeros([], tl.int32) + other_count, tl.zeros([], tl.int32)
    # All entries are read, because ids need not be sorted.
    for begin in range(0, other_count, CHUNK):
        j = begin + tl.arange(0, CHUNK)  # [CHUNK]
        other_ids = tl.load(others + b * other_count + j, mask=j < other_count, other=0)
        inside = (other_ids >= lowest) & (other_ids <= highest) & (j < other_count)
        first = tl.minimum(first, tl.min(tl.where(inside, j, other_count), 0))
        last = tl.maximum(last, tl.max(tl.where(inside, j + 1, 0), 0))
    tl.store(ranges + 2 * row, first)
    tl.store(ranges + 2 * row + 1, last)


@triton.jit
def narrowed(low, high, ranges, row, BLOCK: tl.constexpr):
    """The part of the blocks [low, high) that holds the range of a tile, see `segment_ranges`."""
    if ranges is not None:
        low = tl.maximum(low, tl.load(ranges + 2 * row) // BLOCK)
        high = tl.minimum(high, tl.cdiv(tl.load(ranges + 2 * row + 1), BLOCK))
        low = tl.minimum(low, high)
    return low, high


@triton.jit
def blocks_of_keys(block, ranges, size, tile):
    """Return (low, full, high) of `key_blocks`, for the keys that a `QueryBlock` may see."""
    low, full, high = key_blocks(
        block.first, size.queries, size.keys, size.left, size.right, tile.BLOCK_M, tile.BLOCK_N
    )
    row = block.batch * tl.cdiv(size.queries, tile.BLOCK_M) + block.first // tile.BLOCK_M
    low, high = narrowed(low, high, ranges, row, tile.BLOCK_N)
    return low, full, high


@triton.jit
def list_of_keys(block, heads, size, tile):
    """Return the row in `Maps.counts` and the offset in `Maps.blocks` of a `QueryBlock`."""
    row = (block.batch * heads + block.head) * tl.cdiv(size.queries, tile.MAP_M)
    row += block.first // tile.MAP_M
    return row, row * tl.cdiv(size.keys, tile.BLOCK_N)


def ranges_of(
    layout: Layout, block: int, arch: int, of_keys: bool = False
) -> tuple[Tensor | None, list[Launch]]:
    """Return the ranges of `segments` for tiles of ``block`` queries or keys, and their launch.

    Without segments: None and no launch.
    """
    segments, others = layout.q_segments, layout.k_segments
    if segments is None or others is None:
        return None, []
    if of_keys:
        segments, others = others, segments
    batch, count = segments.shape
    tiles = triton.cdiv(count, block)
    ranges = segments.new_empty(batch, tiles, 2, dtype=torch.int32)
    args = {
        "segments": segments, "others": others, "ranges": ranges, "count": count,
        "other_count": others.shape[1], "BLOCK": block, "CHUNK": 128 if arch == 0 else 1024,
    }  # fmt: skip
    return ranges, [Launch(segment_ranges, batch * tiles, args, Config(1, 1, 4, 1))]
