"""The blocks of queries that a program of `backward_kv` reads: a range, or the list of a map."""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.groups import Size

# An entry of `list_queries` is head · TILES + tile, with the index of the head in its group. The
# number is a power of two, so that no step divides.
TILES = tl.constexpr(1 << 20)


@triton.jit(do_not_specialize=["group", "queries", "keys", "left", "right"])
def list_queries(
    live, blocks, counts, group, queries, keys, left, right,
    MAP_M: tl.constexpr, MAP_N: tl.constexpr, SPLIT: tl.constexpr, HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """For each tile of keys, list the tiles of queries with nonzero weights for these keys.

    Grid: one program per (batch, key/value head, tile of keys). The first counts[0] entries are
    tiles that need masks. With SPLIT, the last counts[1] are tiles whose queries see all keys.
    """
    tiles_m, tiles_n = tl.cdiv(queries, MAP_M), tl.cdiv(keys, MAP_N)
    map_row = tl.program_id(0).to(tl.int64)
    bh, column = map_row // tiles_n, map_row % tiles_n
    size = Size(queries, keys, left, right)
    first, last = full_blocks(column.to(tl.int32) * MAP_N, 0, tiles_m, size, MAP_M, MAP_N, HAS_MASK)
    edges, full, most = 0, 0, group * tiles_m
    blocks += map_row * most
    for low in range(0, most, CHUNK):
        index = low + tl.arange(0, CHUNK)  # [CHUNK], as all vectors here
        head, tile = index // tiles_m, index % tiles_m
        # The heads of a group are adjacent in ``live``, [B·H, tiles_m, tiles_n].
        flag = live + (bh * most + index) * tiles_n + column
        flag = tl.load(flag, mask=index < most, other=0).to(tl.int32)
        entry, is_full = head * TILES + tile, flag * 0
        if SPLIT:
            is_full = flag * ((tile >= first) & (tile < last)).to(tl.int32)
            # A running sum gives each entry its position: the order is fixed, without atomics.
            tl.store(blocks + most - full - tl.cumsum(is_full, 0), entry, mask=is_full > 0)
            full += tl.sum(is_full, 0)
        edge = flag - is_full
        tl.store(blocks + edges + tl.cumsum(edge, 0) - 1, entry, mask=edge > 0)
        edges += tl.sum(edge, 0)
    tl.store(counts + 2 * map_row, edges)
    tl.store(counts + 2 * map_row + 1, full)


@triton.jit
def full_blocks(
    start, low, high, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_MASK: tl.constexpr
):
    """Return (first, last): in the blocks [first, last) all queries exist and see all keys.

    ``low`` and ``high`` are from `query_blocks`. Keys that do not exist need no attention: each
    key has its own row of the result, and rows beyond the last key are not stored. But a mask
    has no entries for them.
    """
    offset = size.queries - size.keys
    first, last = low, size.queries // BLOCK_M
    if size.right is not None:
        last_key = tl.minimum(start + BLOCK_N, size.keys) - 1
        first = tl.cdiv(tl.maximum(last_key - size.right + offset, 0), BLOCK_M)
    if size.left is not None:
        last = tl.minimum(tl.maximum(start + size.left + 1 + offset, 0) // BLOCK_M, last)
    first = tl.minimum(tl.maximum(first, low), high)
    last = tl.minimum(tl.maximum(last, first), high)
    if HAS_MASK:
        last = tl.where(start + BLOCK_N <= size.keys, last, first)
    return first, last
