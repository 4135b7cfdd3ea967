"""Solves Σ_j φ(s_ij − τ_i) = 1 for τ (sparsemax, entmax); lists blocks with nonzero weights.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q
and, in each solver step, the keys that can still have nonzero weight. It writes its block of the
largest scores and of τ relative to them, the list of key blocks with nonzero weights, and a flag
for each of these blocks.

The solver is Newton's method for Z^{α−1} = 1 with Z = Σφ: τ += (Z − Z^{2−α})/((α−1) Σφ'). τ starts
at the maximum of each query's scores and increases monotonically. For equal scores one step is
exact. A score at or below τ − 1/(α−1) has weight 0, also in later steps, because τ only grows. Each
step drops the key blocks that have only such scores. Forward and backward read only the blocks that
are left. The list is ascending, so the blocks that all queries of the tile see come first; loops
over these have no bounds checks.

All steps run in one launch, so that the host does not wait for the result of each step.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    INTERPRETED,
    capped,
    key_blocks,
    load_block,
    load_decay,
    load_segments,
    load_vectors,
    place_mask,
    query_tile,
    scores,
    times,
)
from attnzoo.backends.triton.flash.segments import narrowed

# A step is the last one of a query if |Z − 1| ≤ RESIDUAL before the step. Convergence is quadratic,
# so every weight is then accurate to 1e-6. With many equal scores, rounding τ alone can change Z by
# more than RESIDUAL. A step is therefore also the last one if it changes t = τ − (maximum score) by
# at most LAST_PLACES · t.
RESIDUAL = tl.constexpr(1e-5)
LAST_PLACES = tl.constexpr(5e-7)
MAX_STEPS = tl.constexpr(100)

RUNTIME = (
    "q_b q_h q_n k_b k_h k_n mask_b mask_h mask_m mask_n heads group queries keys left right"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def threshold(
    q, k, peak, tau, blocks, counts,  # blocks: int32 [B·H, tiles of queries, tiles of keys]
    live,  # uint8, shaped as blocks, initially 0: 1 where a tile has nonzero weights
    gain, shape, alibi, key_bias, base, decay, mask, q_segments, k_segments, ranges,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    scale, inner, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, DISTANCE: tl.constexpr,
    ALPHA: tl.constexpr,  # None if the vector shape holds α
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, FLIPS: tl.constexpr,  # FLIPS: factors may be negative
    PART: tl.constexpr, ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    map_row = (b * heads + h) * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    blocks += map_row * tl.cdiv(keys, BLOCK_N)
    live += map_row * tl.cdiv(keys, BLOCK_N)
    k_matrix = (k, k_n * ALIGN, keys, None, b, h // group)
    vectors = load_vectors(i, at, scale, gain, None, shape, alibi, base, None, queries, 1.0, 1.0)
    segment = load_segments(q_segments, b * queries, i, queries)
    decay_h = load_decay(decay, b * heads + h)
    terms = (key_bias, (b * heads + h) * keys, base, inner, decay_h, None)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi, terms)
    size = (queries, keys, left, right)
    if ALPHA is None:
        a = tl.load(shape + at + index, mask=index < queries, other=1.5) - 1.0  # α − 1
    else:
        a = tl.full([BLOCK_M], ALPHA - 1.0, tl.float32)

    # Loops use r = score / late, with late > 0: queries with a negative factor flip q's sign. The
    # factor is then applied to r − m, which is exactly 0 for each of several equal maxima. If the
    # factor came first, the compiler could fuse it with the subtraction, which then would not give
    # 0 for large scores. Where something is added to the products, r is the score.
    late = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    MULTIPLE: tl.constexpr = mask is None and alibi is None and DISTANCE is None
    PLAIN: tl.constexpr = MULTIPLE and key_bias is None and base is None
    if PLAIN:
        sign, factor = late, vectors[0]
        # late is not 0, because 0 times the −∞ of hidden keys is NaN. A NaN must stay.
        late = tl.maximum(tl.abs(vectors[0]), 1e-37, propagate_nan=tl.PropagateNan.ALL)
        if FLIPS:
            sign = tl.where(vectors[0] < 0.0, -1.0, 1.0)
            if PART is None:  # otherwise the product reads q from memory
                q_tile = (q_side[0].to(tl.float32) * sign).to(q.dtype.element_ty)
                q_side = (q_tile, q_side[1], q_side[2], q_side[3])
                sign = tl.full([BLOCK_M, 1], 1.0, tl.float32)
        vectors = (sign, vectors[1], vectors[2], vectors[3], vectors[4])
    tiles = (q_side, i, k_matrix, vectors, segment, where, size)

    low, full, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    tile_row = b * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    low, high = narrowed(low, high, ranges, tile_row, BLOCK_N)
    if not SPLIT:
        full = low
    # Find the maximum m of r. List the blocks that can have nonzero weights, given the running
    # maximum. The list is ascending: blocks that all queries see are its first ``whole`` entries.
    # For rows beyond the last query m is ∞, so that no block counts for them.
    m = tl.where(index < queries, float("-inf"), float("inf"))
    reach = -1.0 / a  # x at or below it has weight 0
    kept = 0
    if SPLIT:
        m, kept = find_peaks(
            m, kept, low, full, tiles, late, reach, blocks,
            DISTANCE, D, BLOCK_N, PART, False, PRECISION,
        )  # fmt: skip
    whole = kept
    m, kept = find_peaks(
        m, kept, full, high, tiles, late, reach, blocks,
        DISTANCE, D, BLOCK_N, PART, True, PRECISION,
    )  # fmt: skip
    # NaN if a score of the query is NaN. Then τ is NaN, and no weight counts.
    top = tl.where(m == float("-inf"), 0.0, m)
    t = tl.zeros([BLOCK_M], tl.float32)  # τ − maximum score
    unsolved, step = kept > 0, 0
    while unsolved:
        tl.debug_barrier()  # one thread writes the list, all threads read it
        z, slopes = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        count, edge, kept = kept, whole, 0
        if SPLIT:
            z, slopes, kept = add_weights(
                z, slopes, kept, 0, edge, tiles, late, top, t, blocks,
                ACT, DISTANCE, D, BLOCK_N, PART, False, PRECISION,
            )  # fmt: skip
        whole = kept
        z, slopes, kept = add_weights(
            z, slopes, kept, edge, count, tiles, late, top, t, blocks,
            ACT, DISTANCE, D, BLOCK_N, PART, True, PRECISION,
        )  # fmt: skip
        t, unsolved_queries = newton(t, z, slopes, a)
        step += 1
        unsolved = (tl.max(unsolved_queries.to(tl.int32), 0) > 0) & (step < MAX_STEPS)
    # Here 0 again for a query without keys, even if its gain is NaN.
    first = tl.where(m == float("-inf"), 0.0, m)
    base = tl.where(m == float("-inf"), 0.0, m * tl.reshape(late, [BLOCK_M]))
    if PLAIN:
        first = tl.where(tl.reshape(factor, [BLOCK_M]) < 0.0, -first, first)
    store_threshold(peak, tau, at + index, first, base, t, index < queries)
    tl.store(counts + map_row, kept)
    tl.debug_barrier()
    for n in range(kept):
        tl.store(live + tl.load(blocks + n), 1)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_peaks(r):
    """Return the maximum of each row, NaN if an entry is NaN."""
    if INTERPRETED:  # it runs functions given to tl.reduce entry by entry
        has_nan = tl.max((r != r).to(tl.int32), 1) > 0
        return tl.where(has_nan, float("nan"), tl.max(r, 1))
    return tl.reduce(r, 1, larger)


@triton.jit
def find_peaks(
    m, kept, low, high, tiles, late, reach, blocks, DISTANCE: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the maximum of m and the blocks [low, high), and the new length of the list."""
    late = tl.reshape(late, m.shape)
    for block in range(low, high):
        r = block_scores(tiles, block, DISTANCE, D, BLOCK_N, PART, EDGE, PRECISION)
        peak = row_peaks(r)
        m = larger(m, peak)
        # r − m is compared with −1/(α−1), because m − 1/(α−1) may round to m for a large m.
        alive = tl.max(((peak - m) * late > reach).to(tl.int32))
        tl.store(blocks + kept, block, mask=alive > 0)
        kept += alive
    return m, kept


@triton.jit
def add_weights(
    z, slopes, kept, low, high, tiles, late, top, t, blocks,
    ACT: tl.constexpr, DISTANCE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Σφ and Σφ' of the list's entries [low, high). Keep the entries with nonzero weights."""
    for n in range(low, high):
        block = tl.load(blocks + n)
        r = block_scores(tiles, block, DISTANCE, D, BLOCK_N, PART, EDGE, PRECISION)
        phi, slope = ACT((r - top[:, None]) * late - t[:, None], tiles[3][2])
        part = tl.sum(phi, 1)
        z += part
        slopes += tl.sum(slope, 1)
        alive = tl.max((part > 0.0).to(tl.int32))
        # Overwriting the list is safe: kept is at most n, and entry n has been read.
        tl.store(blocks + kept, block, mask=alive > 0)
        kept += alive
    return z, slopes, kept


@triton.jit
def block_scores(
    tiles, block, DISTANCE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return r [BM, BN] of a block of keys, −∞ for hidden keys."""
    q_side, i, k, vectors, segment, where, size = tiles
    local, first = tl.arange(0, BLOCK_N), tl.full([], BLOCK_N, tl.int32) * block
    k_tile = load_block(k, first, local, tl.arange(0, q_side[0].shape[1]), D, EDGE)  # [BN, D]
    product = times(q_side, (k_tile, k, first, local), D, PART, PRECISION)
    product = capped(product, where[6][3], PRECISION)
    j = (first + local)[None, :]
    HIDES: tl.constexpr = (
        EDGE or where[0] is not None or where[4] is not None or where[6][0] is not None
    )
    return scores(product, i, j, vectors, segment, where, size, 1.0, DISTANCE, EDGE, HIDES)[0]


@triton.jit
def newton(t, z, slopes, a):
    """Compute one Newton step from t = τ − base, given Σφ = z and Σφ' = slopes.

    Return the new t, and a mask of the queries that need another step.
    """
    excess = tl.where(z > 0.0, z - 1.0, 0.0)
    # Near Z = 1, z − power loses digits to cancellation. To first order, (z − power)/a is Z − 1.
    power = tl.exp2((1.0 - a) * tl.log2(tl.where(z > 0.0, z, 1.0)))
    change = tl.where(tl.abs(excess) > 0.1, (z - power) / a, excess)
    change = tl.where(slopes > 0.0, change / tl.where(slopes > 0.0, slopes, 1.0), 0.0)
    t += change
    return t, (tl.abs(excess) > RESIDUAL) & (tl.abs(change) > LAST_PLACES * t)


@triton.jit
def store_threshold(peak, tau, at, first, base, t, inside):
    """Store τ relative to the largest score ``base``, and the peak ``first`` that `scores` takes.

    Their sum may round to the largest score, and then has no digit of τ. τ is NaN if the largest
    score is NaN or ∞.
    """
    tl.store(peak + at, first, mask=inside)
    tl.store(tau + at, t + (base - base), mask=inside)
