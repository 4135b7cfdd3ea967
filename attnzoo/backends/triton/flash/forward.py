"""Forward: a block of queries walks over the keys once; see `fold` for what comes of it."""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import finish, walk
from attnzoo.backends.triton.common.tile import (
    key_blocks,
    load_rows,
    load_segments,
    query_tile,
    store_tile,
)

# Lengths and strides change from call to call: none of them may compile a kernel anew.
RUNTIME = (
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n o_b o_h o_n mask_b mask_h mask_m mask_n "
    "heads group queries keys left right"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def flash_forward(
    # stat: log2 Σ with the sink (ONLINE), or Z (SUM); with mass, both rows or None, m and Z apart
    q, k, v, o, stat, mass, lse,
    gain, tau, shape, sink, alibi,  # rows or None
    mask, q_segments, k_segments,
    blocks, counts,  # of each tile of MAP_M queries: the blocks of keys that hold weight; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    ONLINE: tl.constexpr, SUM: tl.constexpr, PEAKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, MAP_M: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, at, start, index, q_side = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN
    )
    i = index[:, None]
    k += (b * k_b + (h // group) * k_h) * ALIGN
    v += (b * v_b + (h // group) * v_h) * ALIGN
    o += (b * o_b + h * o_h) * ALIGN
    mask_at = h * 0
    if mask is not None:
        mask_at = b * mask_b + h * mask_h
    if k_segments is not None:
        k_segments += b * keys
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = load_rows(i, at, scale, gain, tau, shape, alibi, queries, UNIT, UNIT)  # each [BM, 1]
    segment = load_segments(q_segments, b * queries, i, queries)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi)
    size = (queries, keys, left, right)
    tiles_kv = (k, v, k_n * ALIGN, v_n * ALIGN, d, dv)

    # The running maximum of the scores (ONLINE), or of φ (PEAKED).
    m = tl.full([BLOCK_M], float("-inf") if ONLINE else 1.0, tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    if blocks is not None:
        line = (b * heads + h) * tl.cdiv(queries, MAP_M) + start // MAP_M
        blocks += line * tl.cdiv(keys, BLOCK_N)
        low, high = 0, tl.load(counts + line)
    if blocks is not None or not SPLIT:
        acc, m, z = walk(
            acc, m, z, low, high, q_side, i, tiles_kv, size, rows, segment, where, blocks,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip
    else:
        acc, m, z = walk(
            acc, m, z, low, full, q_side, i, tiles_kv, size, rows, segment, where, None,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        acc, m, z = walk(
            acc, m, z, full, high, q_side, i, tiles_kv, size, rows, segment, where, None,
            ACT, UNIT, VANISHES, ONLINE, SUM, PEAKED, D, DV, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip

    acc = finish(
        acc, m, z, at, index, queries, rows, stat, mass, lse, sink, tau,
        ACT, UNIT, ONLINE, SUM, PEAKED,
    )  # fmt: skip
    store_tile(o, index, o_n * ALIGN, queries, dv, DV, acc)
