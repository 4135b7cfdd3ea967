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

from attnzoo.backends.triton.common.groups import (
    INTEGERS,
    MaskStrides,
    Matrix,
    QueryVectors,
    Scoring,
    Side,
    Size,
)
from attnzoo.backends.triton.common.scores import capped, load_head, load_vectors, scores
from attnzoo.backends.triton.common.tile import larger, load_block, load_queries, row_peaks, times
from attnzoo.backends.triton.flash.segments import blocks_of_keys

# A step is the last one of a query if |Z − 1| ≤ RESIDUAL before the step. Convergence is quadratic,
# so every weight is then accurate to 1e-6. With many equal scores, rounding τ alone can change Z by
# more than RESIDUAL. A step is therefore also the last one if it changes t = τ − (maximum score) by
# at most LAST_PLACES · t.
RESIDUAL = tl.constexpr(1e-5)
LAST_PLACES = tl.constexpr(5e-7)
MAX_STEPS = tl.constexpr(100)


@triton.jit(do_not_specialize=INTEGERS)
def threshold(
    q, k, solved, vectors, terms, visible,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    heads, group, queries, keys, left, right, rule, tile,
):  # fmt: skip
    size = Size(queries, keys, left, right)
    block, q, q_tile = load_queries(q, q_b, q_h, q_n, heads, queries, tile)
    b, h, hk, index = block.batch, block.head, block.head // group, block.first + block.local
    i = index[:, None]  # [BM, 1]
    k += (b * k_b + hk * k_h) * tile.ALIGN
    strides = MaskStrides(mask_b, mask_h, mask_m, mask_n, tile.MASK_ALIGN)
    map_row = (b * heads + h) * tl.cdiv(queries, tile.BLOCK_M) + block.first // tile.BLOCK_M
    blocks = solved.blocks + map_row * tl.cdiv(keys, tile.BLOCK_N)
    live = solved.live + map_row * tl.cdiv(keys, tile.BLOCK_N)
    k_matrix = Matrix(k, k_n * tile.ALIGN, keys, None, b, hk)
    q_matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    loaded = load_vectors(i, block.at, queries, vectors, terms, rule)
    head = load_head(b, h, i, heads, terms, visible, strides, size)
    if rule.ALPHA is None:
        alpha = tl.load(vectors.shape + block.at + index, mask=index < queries, other=1.5)
        a = alpha - 1.0
    else:
        a = tl.full([tile.BLOCK_M], rule.ALPHA - 1.0, tl.float32)

    # Loops use r = score / late, with late > 0: queries with a negative factor flip q's sign. The
    # factor is then applied to r − m, which is exactly 0 for each of several equal maxima. If the
    # factor came first, the compiler could fuse it with the subtraction, which then would not give
    # 0 for large scores. Where something is added to the products, r is the score.
    late = tl.full([tile.BLOCK_M, 1], 1.0, tl.float32)
    factor, sign = loaded.factor, late
    if rule.PLAIN:
        # late is not 0, because 0 times the −∞ of hidden keys is NaN. A NaN must stay.
        late = tl.maximum(tl.abs(factor), 1e-37, propagate_nan=tl.PropagateNan.ALL)
        if rule.LATE == "flip":
            sign = tl.where(factor < 0.0, -1.0, 1.0)
            if tile.PART is None:  # otherwise the product reads q from memory
                q_tile = (q_tile.to(tl.float32) * sign).to(q.dtype.element_ty)
                sign = tl.full([tile.BLOCK_M, 1], 1.0, tl.float32)
        loaded = QueryVectors(
            loaded.gain, sign, loaded.tau, loaded.shape, loaded.slope, loaded.offset, loaded.peak,
            loaded.threshold, loaded.hash, loaded.cut, loaded.last,
        )  # fmt: skip
    q_side = Side(q_tile, q_matrix, block.first, block.local)
    scoring = Scoring(loaded, head, vectors, terms, visible, strides, size)

    low, full, high = blocks_of_keys(block, visible.ranges, size, tile)
    if not tile.SPLIT:
        full = low
    # Find the maximum m of r. List the blocks that can have nonzero weights, given the running
    # maximum. The list is ascending: blocks that all queries see are its first ``full_length``
    # entries. For rows beyond the last query m is ∞, so that no block counts for them.
    m = tl.where(index < queries, float("-inf"), float("inf"))
    reach = -1.0 / a  # a score this far below the maximum has weight 0
    length = 0
    if tile.SPLIT:
        m, length = find_peaks(
            m, length, low, full, q_side, i, k_matrix, scoring, late, reach, blocks, rule, tile,
            False,
        )  # fmt: skip
    full_length = length
    m, length = find_peaks(
        m, length, full, high, q_side, i, k_matrix, scoring, late, reach, blocks, rule, tile, True
    )
    # NaN if a score of the query is NaN. Then τ is NaN, and no weight counts.
    top = tl.where(m == float("-inf"), 0.0, m)
    t = tl.zeros([tile.BLOCK_M], tl.float32)  # τ − maximum score
    unsolved, step = length > 0, 0
    while unsolved:
        tl.debug_barrier()  # one thread writes the list, all threads read it
        z, slopes = tl.zeros([tile.BLOCK_M], tl.float32), tl.zeros([tile.BLOCK_M], tl.float32)
        count, edge, length = length, full_length, 0
        if tile.SPLIT:
            z, slopes, length = add_weights(
                z, slopes, length, 0, edge, q_side, i, k_matrix, scoring, late, top, t, blocks,
                rule, tile, False,
            )  # fmt: skip
        full_length = length
        z, slopes, length = add_weights(
            z, slopes, length, edge, count, q_side, i, k_matrix, scoring, late, top, t, blocks,
            rule, tile, True,
        )  # fmt: skip
        t, unsolved_queries = newton(t, z, slopes, a)
        step += 1
        unsolved = (tl.max(unsolved_queries.to(tl.int32), 0) > 0) & (step < MAX_STEPS)
    # Here 0 again for a query without keys, even if its gain is NaN.
    first = tl.where(m == float("-inf"), 0.0, m)
    base = tl.where(m == float("-inf"), 0.0, m * tl.reshape(late, [tile.BLOCK_M]))
    if rule.PLAIN:
        first = tl.where(tl.reshape(factor, [tile.BLOCK_M]) < 0.0, -first, first)
    store_threshold(solved.peak, solved.tau, block.at + index, first, base, t, index < queries)
    tl.store(solved.counts + map_row, length)
    tl.debug_barrier()  # as above, for the last list
    for n in range(length):
        tl.store(live + tl.load(blocks + n), 1)


@triton.jit
def find_peaks(
    m, length, low, high, q_side, i, k_matrix, scoring, late, reach, blocks, rule, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Return the maximum of m and the blocks [low, high), and the new length of the list."""
    late = tl.reshape(late, m.shape)
    for block in range(low, high):
        r = block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE)  # [BM, BN]
        peak = row_peaks(r)
        m = larger(m, peak)
        # r − m is compared with −1/(α−1), because m − 1/(α−1) may round to m for a large m.
        alive = tl.max(((peak - m) * late > reach).to(tl.int32))
        tl.store(blocks + length, block, mask=alive > 0)
        length += alive
    return m, length


@triton.jit
def add_weights(
    z, slopes, length, low, high, q_side, i, k_matrix, scoring, late, top, t, blocks, rule, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Add Σφ and Σφ' of the list's entries [low, high). Keep the entries with nonzero weights."""
    for n in range(low, high):
        block = tl.load(blocks + n)
        r = block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE)  # [BM, BN]
        # [BM, BN]
        phi, slope = rule.ACT((r - top[:, None]) * late - t[:, None], scoring.loaded.shape)
        part = tl.sum(phi, 1)
        z += part
        slopes += tl.sum(slope, 1)
        alive = tl.max((part > 0.0).to(tl.int32))
        # Overwriting the list is safe: its length is at most n, and entry n has been read.
        tl.store(blocks + length, block, mask=alive > 0)
        length += alive
    return z, slopes, length


@triton.jit
def block_scores(block, q_side, i, k_matrix, scoring, rule, tile, EDGE: tl.constexpr):
    """Return r [BM, BN] of a block of keys, −∞ for hidden keys."""
    terms = scoring.terms
    local, first = tl.arange(0, tile.BLOCK_N), tl.full([], tile.BLOCK_N, tl.int32) * block
    k_tile = load_block(k_matrix, first, local, tl.arange(0, tile.BLOCK_D), tile.D, EDGE)  # [BN, D]
    product = times(q_side, Side(k_tile, k_matrix, first, local), tile.D, tile)
    product = capped(product, terms.inner, tile.PRECISION)
    HIDES: tl.constexpr = EDGE or rule.HIDES
    r, _ = scores(product, i, (first + local)[None, :], scoring, rule, EDGE, HIDES)
    return r


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
