"""Computes lse = log Σ e^s and the entropy of softmax(s), in nats, in one pass over the keys.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q and
the keys that causality and window allow, and writes its block of lse and entropy.

With Z = Σ e^{s−m} and T = Σ (s−m) e^{s−m}: lse = m + log Z, H = log Z − T/Z. When the maximum m
changes to m', T becomes e^{m−m'} (T + (m−m') Z).
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.fold import factor_out, factored
from attnzoo.backends.triton.common.tile import (
    capped,
    key_blocks,
    load_block,
    load_segments,
    load_vectors,
    out_of_unit,
    place_mask,
    query_tile,
    scores,
    times,
)
from attnzoo.backends.triton.flash.segments import narrowed

RUNTIME = (
    "q_b q_h q_n k_b k_h k_n mask_b mask_h mask_m mask_n heads group queries keys left right"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def row_stats(
    q, k, k_descriptor, lse, entropy, alibi, mask, q_segments, k_segments, ranges,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, LATE: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    MASK_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 1.0 / LN2
    b, h, at, start, index, q, q_tile = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN
    )
    q_side = (q_tile, (q, q_n * ALIGN, queries, None, b, h), start, tl.arange(0, BLOCK_M))
    i = index[:, None]
    k += (b * k_b + (h // group) * k_h) * ALIGN
    mask_at = place_mask(mask, b, h, mask_b, mask_h, MASK_ALIGN)
    if mask_m is not None:
        mask_m = mask_m.to(tl.int64) * MASK_ALIGN
    if k_segments is not None:
        k_segments += b * keys
    d = tl.arange(0, BLOCK_D)
    vectors = load_vectors(i, at, scale, None, None, None, alibi, None, None, queries, UNIT, UNIT)
    segment = load_segments(q_segments, b * queries, i, queries)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, (None, 0, None, inner, None, None))
    size = (queries, keys, left, right)
    k_matrix = (k, k_n * ALIGN, keys, k_descriptor, b, h // group)
    factor = None
    if LATE is not None:
        q_tile, factor = factor_out(q_tile, vectors, LATE)
        q_side = (q_tile, q_side[1], start, q_side[3])
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z, t = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tile_row = b * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    low, high = narrowed(low, high, ranges, tile_row, BLOCK_N)
    if SPLIT:
        m, z, t = _add_keys(
            m, z, t, low, full, q_side, factor, i, k_matrix, d, size, vectors, segment, where,
            UNIT, D, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
        low = full
    m, z, t = _add_keys(
        m, z, t, low, high, q_side, factor, i, k_matrix, d, size, vectors, segment, where,
        UNIT, D, BLOCK_N, PART, True, PRECISION,
    )  # fmt: skip
    store_statistics(m, z, t, lse + at + index, entropy + at + index, index < queries)


@triton.jit
def _add_keys(
    m, z, t, low, high, q_side, factor, i, k_matrix, d, size, vectors, segment, where,
    UNIT: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    local = tl.arange(0, BLOCK_N)
    HIDES: tl.constexpr = EDGE or where[0] is not None or where[4] is not None
    for n in range(low, high):
        first = n * BLOCK_N
        j = first + local
        k_tile = load_block(k_matrix, first, local, d, D, EDGE)  # [BN, D]
        k_side = (k_tile, k_matrix, first, local)
        product = times(q_side, k_side, D, PART, PRECISION)  # [BM, BN]
        product = capped(product, where[6][3], PRECISION)
        if factor is None:
            s = scores(
                product, i, j[None, :], vectors, segment, where, size, UNIT, None, EDGE, HIDES
            )[0]
            scaled = tl.full(m.shape, 1.0, tl.float32)
        else:
            s, scaled = factored(
                product, factor, i, j[None, :], segment, where, size, UNIT, EDGE, HIDES
            )
        m, z, t = add_scores(m, z, t, s, scaled, HIDES)
    return m, z, t


@triton.jit
def add_scores(m, z, t, s, factor, HIDES: tl.constexpr):
    """Return m, Z and T [BM], updated with the scores s · factor, where factor [BM] ≥ 0.

    Without HIDES, no score may be −∞.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    base = m_new
    if HIDES:
        # base is 0 for a query that has not seen a key yet: −∞ − (−∞) would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    shift = tl.where(m == float("-inf"), 0.0, m - base)
    x = s * factor[:, None] - base[:, None]
    if HIDES:
        # exp2(−200) is 0 in fp32. The clamp avoids x · p = −∞ · 0, which is NaN.
        x = tl.maximum(x, -200.0)
    p = tl.exp2(x)
    decay = tl.exp2(shift)
    t = decay * (t + shift * z) + tl.sum(x * p, 1)
    z = decay * z + tl.sum(p, 1)
    return m_new, z, t


@triton.jit
def store_statistics(m, z, t, lse, entropy, inside):
    log_z = tl.log2(z)
    tl.store(lse, out_of_unit(m + log_z, 1.0 / LN2), mask=inside)
    entropy_log2 = tl.where(z > 0.0, log_z - t / tl.where(z > 0.0, z, 1.0), 0.0)
    tl.store(entropy, entropy_log2 * LN2, mask=inside)
