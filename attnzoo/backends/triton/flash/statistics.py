"""Computes lse = log Σ e^s and the entropy of softmax(s), in nats, in one pass over the keys.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q and
the keys that causality and window allow, and writes its block of lse and entropy. Given ``peak``
instead, it writes the largest score of each query, and computes no exponentials.

With Z = Σ e^{s−m} and T = Σ (s−m) e^{s−m}: lse = m + log Z, H = log Z − T/Z. When the maximum m
changes to m', T becomes e^{m−m'} (T + (m−m') Z).
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.fold import factor_out, factored
from attnzoo.backends.triton.common.groups import INTEGERS, MaskStrides, Matrix, Scoring, Side, Size
from attnzoo.backends.triton.common.scores import capped, load_head, load_vectors, out_of_unit
from attnzoo.backends.triton.common.tile import larger, load_block, load_queries, row_peaks, times
from attnzoo.backends.triton.flash.segments import blocks_of_keys


@triton.jit(do_not_specialize=INTEGERS)
def row_stats(
    q, k, k_descriptor, lse, entropy, peak, vectors, terms, visible,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, left, right, rule, tile,
):  # fmt: skip
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    k += (b * k_b + hk * k_h) * tile.ALIGN
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, k_descriptor, b, hk)
    factor = None
    if rule.LATE is not None:
        q_tile, factor = factor_out(q_tile, loaded.factor, rule.LATE)
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    m = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    z, t = tl.zeros([tile.BLOCK_M], tl.float32), tl.zeros([tile.BLOCK_M], tl.float32)
    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    if tile.SPLIT:
        m, z, t = _add_keys(
            m, z, t, low, full, q_side, factor, i, k_matrix, scoring, rule, tile, False,
            peak is not None,
        )  # fmt: skip
        low = full
    m, z, t = _add_keys(
        m, z, t, low, high, q_side, factor, i, k_matrix, scoring, rule, tile, True, peak is not None
    )
    inside = index < queries
    if peak is None:
        store_statistics(m, z, t, lse + block.at + index, entropy + block.at + index, inside)
    else:
        tl.store(peak + block.at + index, out_of_unit(m, 1.0 / LN2), mask=inside)


@triton.jit
def _add_keys(
    m, z, t, low, high, q_side, factor, i, k_matrix, scoring, rule, tile, EDGE: tl.constexpr,
    ONLY_PEAK: tl.constexpr,
):  # fmt: skip
    """Return m, Z and T [BM], updated with the blocks of keys [low, high)."""
    visible = scoring.visible
    local, d = tl.arange(0, tile.BLOCK_N), tl.arange(0, tile.BLOCK_D)
    HIDES: tl.constexpr = EDGE or visible.mask is not None or visible.k_segments is not None
    for n in range(low, high):
        first = n * tile.BLOCK_N
        j = (first + local)[None, :]  # [1, BN]
        k_tile = load_block(k_matrix, first, local, d, tile.D, EDGE)  # [BN, D]
        product = times(q_side, Side(k_tile, k_matrix, first, local), tile.D, tile)  # [BM, BN]
        product = capped(product, scoring.terms.inner, tile.PRECISION)
        s, scaled = factored(product, factor, i, j, scoring, rule, EDGE, HIDES)
        if ONLY_PEAK:
            m = larger(m, row_peaks(s) * scaled)
        else:
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
    x = s * factor[:, None] - base[:, None]  # [BM, BN]
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
