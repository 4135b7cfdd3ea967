"""Forward of every pairwise form: o = Σ_j φ(s_ij − τ_i) v_j / Z_i.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q once,
loops once over the keys and values that causality and window allow (see `fold`), and writes its
block of o and, if wanted, its part of lse and of the per-query vectors for the backward.

With ``splits``, there is one program per (batch, head, block of queries, split of the keys), which
writes partial results for `merge_splits`.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import factor_out, finish, walk
from attnzoo.backends.triton.common.merge import store_split
from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    key_blocks,
    load_decay,
    load_segments,
    load_vectors,
    place_mask,
    query_tile,
    store_tile,
)
from attnzoo.backends.triton.flash.segments import narrowed

# Lengths and strides change from call to call, and must not trigger a recompilation.
RUNTIME = (
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n o_b o_h o_n mask_b mask_h mask_m mask_n "
    "heads group queries keys left right splits"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def flash_forward(
    # stat, weight_sum and lse are outputs: per-query vectors or None. With SUM, stat is Z. With
    # ONLINE and no weight_sum, stat is log2 Σ 2^s. With ONLINE and weight_sum, stat is the largest
    # score m and weight_sum is Σ 2^{s−m}. With SHIFTED, stat is M and weight_sum is Z.
    # lse, and with ONLINE weight_sum and the m beside it, do not include the sink. Of a query
    # without keys stat is 0 with ONLINE, weight_sum and Z are 1, and lse is −∞.
    q, k, v, o, stat, weight_sum, lse,
    k_descriptor, v_descriptor,  # for TMA, or both None
    gain, tau, shape, sink, alibi, key_bias, base, peak, factor,  # vectors or None
    decay,  # [B, H] or None
    mask, q_segments, k_segments, ranges,  # ranges: see `segments`
    blocks, counts,  # key blocks with nonzero weights, per tile of MAP_M queries; or None
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, eps, heads, group, queries, keys, left, right,
    splits,  # or None; with splits, o, stat and weight_sum are the parts of o, m and Z
    ACT: tl.constexpr, DISTANCE: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    ONLINE: tl.constexpr, SUM: tl.constexpr, PEAKED: tl.constexpr, LATE: tl.constexpr,
    NORMALIZER: tl.constexpr, SHIFTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, MAP_M: tl.constexpr, ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, at, start, index, q, q_tile = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN, splits
    )
    q_side = (q_tile, (q, q_n * ALIGN, queries, None, b, h), start, tl.arange(0, BLOCK_M))
    i = index[:, None]
    hk = h // group
    k += (b * k_b + hk * k_h) * ALIGN
    v += (b * v_b + hk * v_h) * ALIGN
    if splits is None:
        o += (b * o_b + h * o_h) * ALIGN
    mask_at = place_mask(mask, b, h, mask_b, mask_h, MASK_ALIGN)
    if mask_m is not None:
        mask_m = mask_m.to(tl.int64) * MASK_ALIGN
    if k_segments is not None:
        k_segments += b * keys
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    # The vectors are [BM, 1] each.
    vectors = load_vectors(i, at, scale, gain, tau, shape, alibi, base, peak, queries, UNIT, UNIT)
    segment = load_segments(q_segments, b * queries, i, queries)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, peak)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    k_matrix = (k, k_n * ALIGN, keys, k_descriptor, b, hk)
    v_matrix = (v, v_n * ALIGN, keys, v_descriptor, b, hk)
    tiles_kv = (k_matrix, v_matrix, d, dv)
    late = None  # scores are computed before the maximum
    if LATE is not None:
        q_tile, late = factor_out(q_tile, vectors, LATE)
        q_side = (q_tile, q_side[1], start, q_side[3])

    # m is the running maximum of the scores (ONLINE), or of 0 and the scores (SHIFTED).
    m = tl.full([BLOCK_M], float("-inf") if ONLINE else 0.0, tl.float32)
    peak_phi = tl.full([BLOCK_M], SMALLEST, tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tile_row = b * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    low, high = narrowed(low, high, ranges, tile_row, BLOCK_N)
    if blocks is not None:
        map_row = (b * heads + h) * tl.cdiv(queries, MAP_M) + start // MAP_M
        blocks += map_row * tl.cdiv(keys, BLOCK_N)
        low, high = 0, tl.load(counts + map_row)
    if splits is not None:
        split, span = tl.program_id(0) % splits, tl.cdiv(high - low, splits)
        low = tl.minimum(low + split * span, high)
        high = tl.minimum(low + span, high)
        full = tl.minimum(tl.maximum(full, low), high)
    if SPLIT and blocks is None:
        acc, m, z, peak_phi = walk(
            acc, m, z, peak_phi, low, full, q_side, late, i, tiles_kv, size, vectors, segment,
            where, None,
            ACT, DISTANCE, UNIT, VANISHES, ONLINE, SUM, PEAKED, NORMALIZER, SHIFTED,
            D, DV, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        low = full
    acc, m, z, peak_phi = walk(
        acc, m, z, peak_phi, low, high, q_side, late, i, tiles_kv, size, vectors, segment,
        where, blocks,
        ACT, DISTANCE, UNIT, VANISHES, ONLINE, SUM, PEAKED, NORMALIZER, SHIFTED,
        D, DV, BLOCK_N, PART, True, PRECISION,
    )  # fmt: skip
    if PEAKED:
        acc *= peak_phi[:, None]

    if splits is not None:
        at = at * splits + split * queries
        store_split(
            o, stat, weight_sum, at, index, queries, dv, acc, m, z, ONLINE, SUM, SHIFTED, DV
        )  # fmt: skip
    else:
        acc = finish(
            acc, m, z, at, index, queries, vectors, stat, weight_sum, lse, sink, tau, factor,
            eps, ACT, UNIT, ONLINE, SUM, NORMALIZER, SHIFTED,
        )  # fmt: skip
        store_tile(o, index, o_n * ALIGN, queries, dv, DV, acc)
