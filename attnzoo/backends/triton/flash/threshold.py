"""Solves Σ_j φ(s_ij − τ_i) = 1 for τ (sparsemax, entmax); lists blocks with nonzero weights.

Grid: one program per (batch, head, block of BLOCK_M queries). A program reads its block of q
and, in each solver step, the keys that can still have nonzero weight. It writes its block of τ,
the list of key blocks with nonzero weights, and a flag for each of these blocks.

The solver is Newton's method for Z^{α−1} = 1 with Z = Σφ: τ += (Z − Z^{2−α})/((α−1) Σφ'). τ starts
at the maximum of each query's scores and increases monotonically. For equal scores one step is
exact. A score at or below τ − 1/(α−1) has weight 0, also in later steps, because τ only grows. Each
step drops the key blocks that have only such scores. Forward and backward read only the blocks that
are left.

All steps run in one launch, so that the host does not wait for the result of each step.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    key_blocks,
    load_block,
    load_segments,
    load_vectors,
    query_tile,
    scores,
    times,
)

# A step is the last one of a query if |Z − 1| ≤ RESIDUAL before the step. Convergence is quadratic,
# so every weight is then accurate to 1e-6. With many equal scores, rounding τ alone can change Z by
# more than RESIDUAL. With t = τ − (maximum score), a step is therefore also the last one if it
# changes t by at most LAST_PLACES · t.
RESIDUAL = tl.constexpr(1e-5)
LAST_PLACES = tl.constexpr(5e-7)
MAX_STEPS = tl.constexpr(100)

RUNTIME = (
    "q_b q_h q_n k_b k_h k_n mask_b mask_h mask_m mask_n heads group queries keys left right"
).split()


@triton.jit(do_not_specialize=RUNTIME)
def threshold(
    q, k, tau, blocks, counts,  # blocks: int32 [B·H, tiles of queries, tiles of keys]
    live,  # uint8, shaped as blocks, initially 0: 1 where a tile has nonzero weights
    gain, shape, alibi, mask, q_segments, k_segments,
    q_b, q_h, q_n, k_b, k_h, k_n, mask_b, mask_h, mask_m, mask_n,
    scale, heads, group, queries, keys, left, right,
    ACT: tl.constexpr, ALPHA: tl.constexpr,  # ALPHA: None if shape holds α
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, h, at, start, index, q_side = query_tile(
        q, q_b, q_h, q_n, heads, queries, D, BLOCK_D, BLOCK_M, ALIGN
    )
    i = index[:, None]
    k += (b * k_b + (h // group) * k_h) * ALIGN
    mask_at = h * 0
    if mask is not None:
        mask_at = b * mask_b + h * mask_h
    if k_segments is not None:
        k_segments += b * keys
    map_row = (b * heads + h) * tl.cdiv(queries, BLOCK_M) + start // BLOCK_M
    blocks += map_row * tl.cdiv(keys, BLOCK_N)
    live += map_row * tl.cdiv(keys, BLOCK_N)
    d, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    k_matrix = (k, k_n * ALIGN, keys, None, b, h // group)
    vectors = load_vectors(i, at, scale, gain, None, shape, alibi, queries, 1.0, 1.0)
    segment = load_segments(q_segments, b * queries, i, queries)
    where = (mask, mask_at, mask_m, mask_n, k_segments, alibi)
    size = (queries, keys, left, right)
    if ALPHA is None:
        a = tl.load(shape + at + index, mask=index < queries, other=1.5) - 1.0  # α − 1
    else:
        a = tl.full([BLOCK_M], ALPHA - 1.0, tl.float32)

    low, _, high = key_blocks(start, queries, keys, left, right, BLOCK_M, BLOCK_N)
    # Find the maximum m. List the blocks that can have nonzero weights, given the running maximum.
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    kept, has_nan = 0, tl.zeros([BLOCK_M], tl.int32)
    for n in range(low, high):
        first = n * BLOCK_N
        j = first + local
        k_tile = load_block(k_matrix, first, local, d, D, True)
        product = times(q_side, (k_tile, k_matrix, first, local), D, PART, PRECISION)
        s = scores(product, i, j[None, :], vectors, segment, where, size, 1.0, True, True)[0]
        peak = tl.max(s, 1)
        m = tl.maximum(m, peak)
        has_nan = tl.maximum(has_nan, tl.max((s != s).to(tl.int32), 1))
        # s − m is compared with −1/(α−1), because m − 1/(α−1) may round to m for a large m.
        alive = tl.max((s - m[:, None] > (-1.0 / a)[:, None]).to(tl.int32))
        tl.store(blocks + kept, n, mask=alive > 0)
        kept += alive
    base = tl.where(m == float("-inf"), 0.0, m)

    t = tl.zeros([BLOCK_M], tl.float32)  # τ − base
    unsolved, step = kept > 0, 0
    while unsolved:
        tl.debug_barrier()  # one thread writes the list, all threads read it
        z, slopes = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        count, kept = kept, 0
        for n in range(count):
            block = tl.load(blocks + n)
            first = block * BLOCK_N
            j = first + local
            k_tile = load_block(k_matrix, first, local, d, D, True)
            product = times(q_side, (k_tile, k_matrix, first, local), D, PART, PRECISION)
            s = scores(product, i, j[None, :], vectors, segment, where, size, 1.0, True, True)[0]
            x = s - base[:, None] - t[:, None]
            phi, slope = ACT(x, vectors[2])
            z += tl.sum(phi, 1)
            slopes += tl.sum(slope, 1)
            alive = tl.max((x > (-1.0 / a)[:, None]).to(tl.int32))
            # Overwriting the list is safe: kept is at most n, and entry n has been read.
            tl.store(blocks + kept, block, mask=alive > 0)
            kept += alive
        t, unsolved_queries = newton(t, z, slopes, a)
        step += 1
        unsolved = (tl.max(unsolved_queries.to(tl.int32), 0) > 0) & (step < MAX_STEPS)
    # tl.max ignores NaN, so τ is set to NaN for queries with NaN among their scores.
    found = tl.where(has_nan > 0, float("nan"), round_tau(base, t, a))
    tl.store(tau + at + index, found, mask=index < queries)
    tl.store(counts + map_row, kept)
    tl.debug_barrier()
    for n in range(kept):
        tl.store(live + tl.load(blocks + n), 1)


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
def round_tau(base, t, a):
    """Return τ = base + t, rounded down if rounding to nearest would increase τ too much.

    The limit is half of the increase at which the largest weight becomes 0. For large scores,
    rounding could exceed that and set all weights to 0. Rounding down increases all weights, and
    the division by their sum corrects this.
    """
    found = base + t
    lost = found - base - t > 0.5 * (1.0 / a - t)
    return tl.where(lost, found - tl.abs(found) * 1.2e-7, found)
