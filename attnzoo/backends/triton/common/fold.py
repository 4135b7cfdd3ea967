"""The loop over keys of a pairwise form: o_i = Σ_j φ(s_ij − τ_i) v_j / Z_i, block by block.

`walk` accumulates a partial result over a range of blocks of keys. `finish` adds the sink and
divides, once, at the end. Partial results by form:

- ``ONLINE`` (φ = exp, normalized): (m, Z, o). The running maximum m is used as τ.
- ``SUM`` (another φ, normalized): (Z, o). τ is 0 or given.
- Without normalization: o.

``PEAKED`` (normalize = "sum", values in fp16): φ and o are divided by m, the running maximum of 1
and φ. An unbounded φ, such as a polynomial, may exceed 65504, the largest fp16 number.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    activate,
    dot,
    load_block,
    out_of_unit,
    scores,
    times,
)


@triton.jit
def walk(
    acc, m, z, low, high, q_side, i, tiles_kv, size, vectors, segment, where, blocks,
    ACT: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr, ONLINE: tl.constexpr,
    SUM: tl.constexpr, PEAKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PART: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the partial result (acc, m, z) after the blocks of keys [low, high).

    If ``blocks`` is given, the loop runs over the block indices in its entries [low, high). If k is
    None, an earlier pass has stored q kᵀ, and q_side [BM, 1] points to the products with key 0.
    """
    k, v, d, dv = tiles_kv
    local = tl.arange(0, BLOCK_N)
    HIDES: tl.constexpr = EDGE or where[0] is not None or where[4] is not None
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        first = block * BLOCK_N
        j = first + local  # [BN]
        if k is None:
            product = tl.load(q_side + j[None, :])  # [BM, BN]
        else:
            k_tile = load_block(k, first, local, d, D, EDGE)  # [BN, D]
            product = times(q_side, (k_tile, k, first, local), D, PART, PRECISION)  # [BM, BN]
        s, seen = scores(product, i, j[None, :], vectors, segment, where, size, UNIT, EDGE, HIDES)
        if ONLINE:
            m_new = tl.maximum(m, tl.max(s, 1))
            base = m_new
            if HIDES:
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
            decay = tl.exp2(m - base)
            z = z * decay + tl.sum(p, 1)
            acc *= decay[:, None]
            m = m_new
        else:
            s -= vectors[1]
            p = activate(ACT, s, vectors[2], seen, HIDES and not VANISHES)[0]
            if SUM:
                z += tl.sum(p, 1)
            if PEAKED:
                m_new = tl.maximum(m, tl.max(p, 1))
                acc *= (m / m_new)[:, None]
                p /= m_new[:, None]
                m = m_new
        v_tile = load_block(v, first, local, dv, DV, EDGE)  # [BN, DV]
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, m, z


@triton.jit
def finish(
    acc, m, z, at, index, queries, vectors, stat, weight_sum, lse, sink, tau,
    ACT: tl.constexpr, UNIT: tl.constexpr,
    ONLINE: tl.constexpr, SUM: tl.constexpr, PEAKED: tl.constexpr,
):  # fmt: skip
    """Return the output [BM, DV]. Store lse, stat and weight_sum (see `flash_forward`)."""
    inside = index < queries
    if ONLINE:
        if lse is not None:  # −∞ for a query without keys
            tl.store(lse + at + index, out_of_unit(m + tl.log2(z), UNIT), mask=inside)
        if sink is not None:
            last = tl.load(sink + at + index, mask=inside, other=0.0) * UNIT
            top = tl.maximum(m, last)
            top = tl.where(top == float("-inf"), 0.0, top)
            down = tl.exp2(m - top)
            acc *= down[:, None]
            z = z * down + tl.exp2(last - top)
            m = top
        divisor = tl.where(z == 0.0, 1.0, z)
        acc /= divisor[:, None]
        if weight_sum is not None:
            tl.store(stat + at + index, m, mask=inside)
            tl.store(weight_sum + at + index, divisor, mask=inside)
        elif stat is not None:
            tl.store(stat + at + index, m + tl.log2(z), mask=inside)
    elif SUM:
        if sink is not None:
            last = tl.load(sink + at + index, mask=inside, other=0.0)[:, None] * UNIT
            z += tl.sum(ACT(last, vectors[2])[0], 1)
        z = tl.where(z == 0.0, 1.0, z)
        if PEAKED:
            acc *= (m / z)[:, None]
        else:
            acc /= z[:, None]
        if stat is not None:
            tl.store(stat + at + index, z, mask=inside)
        if tau is not None:
            acc += vectors[1] - vectors[1]  # Set NaN if τ is NaN: tl.maximum in φ removes NaN.
    return acc
