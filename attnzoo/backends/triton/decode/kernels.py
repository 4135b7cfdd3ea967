"""Pairwise attention of few queries, with the keys split among programs.

`decode` and `decode_products` have one program per (batch, key/value head, split of the keys). A
program reads the queries of all heads of the group as one tile, reads each of its keys and values
once, and writes partial results. Row r of the tile belongs to the group's head r // queries and to
query r % queries, as in a (B, H, Nq) vector. The other kernels have one program per (batch, head,
query), which reads the partial results of all splits. With one split, `decode` and
`decode_products` write the final results, and `merge_splits` and `decode_stats` are not launched.

If scores are needed before the weights (for a threshold, or a gain from statistics),
`decode_products` first writes the products q kᵀ, 4 bytes per row and key. The following kernels
read the products instead of the keys.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.fold import finish, walk
from attnzoo.backends.triton.common.merge import MOST_SPLITS, store_split
from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    capped,
    load_block,
    load_decay,
    load_segments,
    load_vectors,
    place_mask,
    scores,
    store_tile,
    times,
)
from attnzoo.backends.triton.flash.segments import narrowed
from attnzoo.backends.triton.flash.statistics import add_scores, store_statistics
from attnzoo.backends.triton.flash.threshold import MAX_STEPS, newton, store_threshold

RUNTIME = (
    "q_b q_h q_n k_b k_h k_n v_b v_h v_n o_b o_h o_n mask_b mask_h mask_m mask_n "
    "heads group queries keys left right first last span splits width"
).split()


@triton.jit
def packed(heads, group, queries, splits, BLOCK_M: tl.constexpr):
    """Return (split, batch · Hkv + key/value head, batch, lane, r, head, query) of this program.

    lane [BM] is 0 … BM − 1. r, head and query [BM, 1] are the row number, head and query of each
    lane. Lanes beyond the last row repeat the last row.
    """
    split = tl.program_id(0) % splits
    bh = (tl.program_id(0) // splits).to(tl.int64)
    kv_heads = heads // group
    lane = tl.arange(0, BLOCK_M)
    r = tl.minimum(lane, group * queries - 1)[:, None]
    return split, bh, bh // kv_heads, lane, r, bh % kv_heads * group + r // queries, r % queries


@triton.jit
def split_blocks(first, last, span, split, splits, ranges, b, BLOCK_N: tl.constexpr):
    """Return the blocks of keys [low, high) of this split.

    With ``ranges``, see `flash.segments`, the splits share the range of the batch.
    """
    if ranges is not None:
        first, last = narrowed(first, last, ranges, b, BLOCK_N)
        span = tl.cdiv(last - first, splits)
    low = first + split * span
    return low, tl.minimum(low + span, last)


@triton.jit
def packed_queries(
    q, b, h, i, q_b, q_h, q_n, D: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr
):
    """Return the queries [BM, D], a pointer to the batch, and the memory offset of each row."""
    at = tl.reshape((h * q_h + i.to(tl.int64) * q_n) * ALIGN, [h.shape[0]])
    q += b * q_b * ALIGN
    matrix = (q, 1, 1 << 62, None, b, b)
    return load_block(matrix, b * 0, at, tl.arange(0, BLOCK_D), D, False), q, at


@triton.jit(do_not_specialize=RUNTIME)
def decode_products(
    q, k, products,  # fp32 [B·Hkv, rows, width], q kᵀ
    m, z, t,  # fp32 [B·Hkv, splits, rows]; z, t: None without statistics
    lse, entropy,  # vectors, for statistics with one split, without m, z, t; else None
    gain, alibi, key_bias, base, decay, mask, q_segments, k_segments, ranges,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right, first, last, span, splits, width,
    DISTANCE: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write q kᵀ and, per split, the maximum m of each row; for statistics, also Z and T.

    For statistics with one split, write lse and entropy instead of m, Z and T.
    """
    split, bh, b, lane, r, h, i = packed(heads, group, queries, splits, BLOCK_M)
    rows_here = group * queries
    q_tile, q, q_at = packed_queries(q, b, h, i, q_b, q_h, q_n, D, BLOCK_D, ALIGN)
    q_side = (q_tile, (q, 1, 1 << 62, None, b, b), b * 0, q_at)
    k += (b * k_b + bh % (heads // group) * k_h) * ALIGN
    at = bh * rows_here
    vectors = load_vectors(r, at, scale, gain, None, None, alibi, base, None, rows_here, UNIT, UNIT)
    segment = load_segments(q_segments, b * queries, i, queries)
    if k_segments is not None:
        k_segments += b * keys
    mask_at = place_mask(mask, b, h, mask_b, mask_h, 1)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, None)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    # [BM, 1]. products + j points to the products with key j.
    products += (at + r) * width - first * BLOCK_N
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z_i, t_i = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    matrix, local = (k, k_n * ALIGN, keys, None, b, h), tl.arange(0, BLOCK_N)
    low, high = split_blocks(first, last, span, split, splits, ranges, b, BLOCK_N)
    for n in range(low, high):
        start = n * BLOCK_N
        j = start + local  # [BN]
        k_tile = load_block(matrix, start, local, tl.arange(0, BLOCK_D), D, True)  # [BN, D]
        product = times(q_side, (k_tile, matrix, start, local), D, PART, PRECISION)  # [BM, BN]
        tl.store(products + j[None, :], product, mask=(lane < rows_here)[:, None])
        product = capped(product, inner, PRECISION)
        s = scores(
            product, i, j[None, :], vectors, segment, where, size, UNIT, DISTANCE, True, True
        )[0]
        if z is None and entropy is None:
            m_i = tl.maximum(m_i, tl.max(s, 1))
        else:
            m_i, z_i, t_i = add_scores(m_i, z_i, t_i, s, tl.full([BLOCK_M], 1.0, tl.float32), True)
    inside = lane < rows_here
    if entropy is not None:
        store_statistics(m_i, z_i, t_i, lse + at + lane, entropy + at + lane, inside)
    else:
        part = (bh * splits + split) * rows_here + lane
        tl.store(m + part, m_i, mask=inside)
        if z is not None:
            tl.store(z + part, z_i, mask=inside)
            tl.store(t + part, t_i, mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def decode(
    q, k, v, products,  # either q and k, or products of an earlier pass; the others are None
    part, m, z,  # fp32 [B·Hkv, splits, rows, DV] and [B·Hkv, splits, rows]; m, z or None
    o, lse, sink, factor,  # for one split, without part, m and z; else None
    gain, tau, shape, alibi, key_bias, base, peak, decay, mask, q_segments, k_segments, ranges,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, eps, heads, group, queries, keys, left, right, first, last, span, splits, width,
    ACT: tl.constexpr, DISTANCE: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    ONLINE: tl.constexpr, SUM: tl.constexpr, PEAKED: tl.constexpr,
    NORMALIZER: tl.constexpr, SHIFTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the partial result of this program's split, or the output of the only split."""
    split, bh, b, lane, r, h, i = packed(heads, group, queries, splits, BLOCK_M)
    rows_here = group * queries
    hk = bh % (heads // group)
    at = bh * rows_here
    vectors = load_vectors(r, at, scale, gain, tau, shape, alibi, base, peak, rows_here, UNIT, UNIT)
    segment = load_segments(q_segments, b * queries, i, queries)
    if k_segments is not None:
        k_segments += b * keys
    mask_at = place_mask(mask, b, h, mask_b, mask_h, 1)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, peak)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    if k is None:
        q_side = products + (at + r) * width - first * BLOCK_N  # pointers [BM, 1], to key 0
    else:
        k += (b * k_b + hk * k_h) * ALIGN
        q_tile, q, q_at = packed_queries(q, b, h, i, q_b, q_h, q_n, D, BLOCK_D, ALIGN)
        q_side = (q_tile, (q, 1, 1 << 62, None, b, b), b * 0, q_at)
    v += (b * v_b + hk * v_h) * ALIGN
    dv = tl.arange(0, BLOCK_DV)
    d = tl.arange(0, BLOCK_D)
    v_matrix = (v, v_n * ALIGN, keys, None, b, hk)
    if k is None:  # Triton 3.9 does not compile a tuple with a variable that is None
        tiles_kv = (None, v_matrix, None, dv)
    else:
        tiles_kv = ((k, k_n * ALIGN, keys, None, b, hk), v_matrix, d, dv)
    m_i = tl.full([BLOCK_M], float("-inf") if ONLINE else 0.0, tl.float32)
    z_i, peak_phi = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], SMALLEST, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    low, high = split_blocks(first, last, span, split, splits, ranges, b, BLOCK_N)
    acc, m_i, z_i, peak_phi = walk(
        acc, m_i, z_i, peak_phi, low, high, q_side, None, i, tiles_kv, size, vectors, segment,
        where, None,
        ACT, DISTANCE, UNIT, VANISHES, ONLINE, SUM, PEAKED, NORMALIZER, SHIFTED,
        D, DV, BLOCK_N, PART, True, PRECISION,
    )  # fmt: skip
    if PEAKED:
        acc *= peak_phi[:, None]
    if part is None:
        acc = finish(
            acc, m_i, z_i, at, lane, rows_here, vectors, None, None, lse, sink, tau, factor,
            eps, ACT, UNIT, ONLINE, SUM, NORMALIZER, SHIFTED,
        )  # fmt: skip
        o += (b * o_b + h * o_h + i.to(tl.int64) * o_n) * ALIGN
        store_tile(o, lane, 0, rows_here, dv, DV, acc)
    else:
        here = (bh * splits + split) * rows_here
        store_split(part, m, z, here, lane, rows_here, dv, acc, m_i, z_i, ONLINE, SUM, SHIFTED, DV)


@triton.jit(do_not_specialize=RUNTIME)
def decode_stats(m, z, t, lse, entropy, group, queries, splits):
    """Write lse and entropy of one query, from the partial results of all splits."""
    row = tl.program_id(0).to(tl.int64)
    rows_here = group * queries
    every = tl.arange(0, MOST_SPLITS)[None, :]
    start = row // rows_here * splits * rows_here + row % rows_here
    at, inside = start + every * rows_here, every < splits
    peaks = tl.load(m + at, mask=inside, other=float("-inf"))
    top = tl.max(peaks, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    # A split without keys has m = −∞ and Z = T = 0. Its shift must be finite: −∞ · 0 is NaN.
    shift = tl.maximum(peaks - base[:, None], -200.0)
    decay = tl.exp2(shift)
    sums = tl.load(z + at, mask=inside, other=0.0)
    entropy_sums = tl.load(t + at, mask=inside, other=0.0)
    total = tl.sum(decay * sums, 1)
    entropy_sum = tl.sum(decay * (entropy_sums + shift * sums), 1)
    one = row + tl.zeros([1], tl.int32)
    store_statistics(top, total, entropy_sum, lse + one, entropy + one, one >= 0)


@triton.jit(do_not_specialize=RUNTIME)
def decode_threshold(
    products, m, candidates, peak, tau,  # candidates: fp32, shaped as products
    gain, shape, alibi, key_bias, base, decay, mask, q_segments, k_segments,
    mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right, first, splits, width,
    ACT: tl.constexpr, DISTANCE: tl.constexpr,
    ALPHA: tl.constexpr,  # None if the vector shape holds α
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve for τ of one query; see `flash.threshold`.

    A key has weight 0 if its score is 1/(α−1) or more below the maximum. The other scores are first
    copied to ``candidates``: of 32768 standard Gaussian scores 0.1 % at α = 2, 2 % at α = 1.5, and
    all as α → 1. Each step of the solver reads only the copies.
    """
    row = tl.program_id(0).to(tl.int64)
    rows_here = group * queries
    b, h = row // (heads * queries), row // queries % heads
    one = tl.zeros([1, 1], tl.int32)
    i = one + (row % queries).to(tl.int32)
    vectors = load_vectors(one, row, scale, gain, None, shape, alibi, base, None, 1, 1.0, 1.0)
    segment = load_segments(q_segments, b * queries, i, queries)
    if k_segments is not None:
        k_segments += b * keys
    mask_at = place_mask(mask, b, h, mask_b, mask_h, 1)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, None)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    MULTIPLE: tl.constexpr = mask is None and alibi is None and DISTANCE is None
    PLAIN: tl.constexpr = MULTIPLE and key_bias is None and base is None
    a = vectors[2] - 1.0  # α − 1, [1, 1]
    if ALPHA is not None:
        a = tl.full([1, 1], ALPHA - 1.0, tl.float32)
    every = tl.arange(0, MOST_SPLITS)[None, :]
    start = row // rows_here * splits * rows_here + row % rows_here
    peaks = tl.load(m + start + every * rows_here, mask=every < splits, other=float("-inf"))
    top = tl.max(peaks, 1)[:, None]
    base = tl.where(top == float("-inf"), 0.0, top)
    products += row * width
    candidates += row * width
    column = tl.arange(0, BLOCK)[None, :]
    kept, has_nan, largest = 0, 0, tl.full([1], float("-inf"), tl.float32)
    for n in range(0, width, BLOCK):
        inside = n + column < width
        product = tl.load(products + n + column, mask=inside, other=0.0)
        j = first * BLOCK_N + n + column
        product = capped(product, inner, PRECISION)
        s = scores(product, i, j, vectors, segment, where, size, 1.0, DISTANCE, True, True)[0]
        s = tl.where(inside, s, float("-inf"))
        alive = (s - top > -1.0 / a).to(tl.int32)
        tl.store(candidates + kept + tl.cumsum(alive, 1) - 1, s - base, mask=alive > 0)
        kept += tl.sum(alive)
        has_nan = tl.maximum(has_nan, tl.max((s != s).to(tl.int32)))
        if PLAIN:
            signed = tl.where(vectors[0] < 0.0, -product, product)
            signed = tl.where(s > float("-inf"), signed, float("-inf"))
            largest = tl.maximum(largest, tl.max(signed, 1))
    t = tl.zeros([1], tl.float32)  # τ − base
    unsolved, step = kept > 0, 0
    tl.debug_barrier()  # threads read candidates that other threads wrote
    while unsolved:
        z, slopes = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
        for n in range(0, kept, BLOCK):
            x = tl.load(candidates + n + column, mask=n + column < kept, other=float("-inf"))
            phi, slope = ACT(x - t[:, None], vectors[2])
            z += tl.sum(phi, 1)
            slopes += tl.sum(slope, 1)
        t, is_unsolved = newton(t, z, slopes, tl.reshape(a, [1]))
        step += 1
        unsolved = (tl.max(is_unsolved.to(tl.int32), 0) > 0) & (step < MAX_STEPS)
    # tl.max ignores NaN, so τ is set to NaN for queries with NaN among their scores.
    t = tl.where(has_nan > 0, float("nan"), t)
    base = tl.reshape(base, [1])
    peak_here = base
    if PLAIN:
        peak_here = tl.where(largest == float("-inf"), 0.0, largest)
        peak_here = tl.where(tl.reshape(vectors[0], [1]) < 0.0, -peak_here, peak_here)
    at = row + tl.arange(0, 1)
    store_threshold(peak, tau, at, peak_here, base, t, tl.arange(0, 1) == 0)
