"""The loop over keys of a pairwise form: o_i = Σ_j φ(s_ij − τ_i) v_j / Z_i, block by block.

`walk` accumulates a partial result over a range of blocks of keys. `finish` adds the sink and
divides, once, at the end. Partial results by form:

- ``ONLINE`` (φ = exp, normalized): (m, Z, o). The running maximum m is used as τ.
- ``SUM`` (another φ, normalized): (Z, o). τ is 0 or given. With ``NORMALIZER``, Z is a sum of μ.
- ``SUM`` and ``SHIFTED``: (m, Z, o). m, the running maximum of 0 and the scores, is the shape of φ.
- Without normalization: o.

``PEAKED`` (not ``ONLINE``, values in fp16): φ and o are relative to the running maximum of φ, see
`relative`. After the loop, o is multiplied by this maximum.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import (
    SMALLEST,
    activate,
    activate_both,
    capped,
    dot,
    hide,
    load_block,
    out_of_unit,
    relative,
    scores,
    times,
)


@triton.jit
def factor_out(q_tile, vectors, LATE: tl.constexpr):
    """Return (q_tile, factor [BM]): score = product · factor with factor ≥ 0.

    max(factor · s) is factor · max(s) then, so the maximum is taken of the products, and the factor
    is applied in the same instruction (FMA) as the subtraction of the maximum.

    LATE: "flip" or "keep". "flip" changes the sign of q where the factor is negative. On sm_90 a
    changed q is an operand in registers instead of shared memory, so there is "keep": no factor is
    negative.
    """
    factor = vectors[0]
    if LATE == "flip":
        sign = tl.where(factor < 0.0, -1.0, 1.0)
        # The product with ±1 is exact. It is in fp32, because the interpreter lacks bf16.
        q_tile = (q_tile.to(tl.float32) * sign).to(q_tile.dtype)
        factor *= sign
    return q_tile, tl.reshape(factor, [factor.shape[0]])


@triton.jit
def factored(
    product, factor, i, j, segment, where, size, UNIT: tl.constexpr,
    EDGE: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Return (s, factor): the products, −∞ for hidden keys, and the factor from `factor_out`."""
    if HIDES:
        product = hide(product, i, j, segment, where, size, UNIT, EDGE)[0]
        # Not 0, where keys are hidden: 0 · (−∞) would be NaN. |s| · SMALLEST < 1e-8 if |s| < 1e30.
        factor = tl.where(factor == 0.0, SMALLEST, factor)
    return product, factor


@triton.jit
def walk(
    acc, m, z, peak, low, high, q_side, factor, i, tiles_kv, size, vectors, segment, where, blocks,
    ACT: tl.constexpr, DISTANCE: tl.constexpr, UNIT: tl.constexpr, VANISHES: tl.constexpr,
    ONLINE: tl.constexpr,
    SUM: tl.constexpr, PEAKED: tl.constexpr, NORMALIZER: tl.constexpr, SHIFTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the partial result (acc, m, z, peak) after the blocks of keys [low, high).

    With PEAKED, acc is o / peak, and ``peak`` is SMALLEST before the first block.

    If ``blocks`` is given, the loop runs over the block indices in its entries [low, high). If k
    and d are None, an earlier pass has stored q kᵀ, and q_side [BM, 1] points to the products with
    key 0.
    ``factor``: from `factor_out`, or None.
    """
    k, v, d, dv = tiles_kv
    local = tl.arange(0, BLOCK_N)
    HIDES: tl.constexpr = (
        EDGE or where[0] is not None or where[4] is not None or where[6][0] is not None
    )
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        first = block * BLOCK_N
        j = first + local  # [BN]
        if d is None:  # Triton 3.6 does not compile "k is None" for a tuple k that contains None
            product = tl.load(q_side + j[None, :])  # [BM, BN]
        else:
            k_tile = load_block(k, first, local, d, D, EDGE)  # [BN, D]
            product = times(q_side, (k_tile, k, first, local), D, PART, PRECISION)  # [BM, BN]
        product = capped(product, where[6][3], PRECISION)
        if factor is None:
            s, seen = scores(
                product, i, j[None, :], vectors, segment, where, size, UNIT, DISTANCE, EDGE, HIDES
            )
            scaled = tl.full(m.shape, 1.0, tl.float32)
        else:
            s, scaled = factored(
                product, factor, i, j[None, :], segment, where, size, UNIT, EDGE, HIDES
            )
        if ONLINE:
            m_new = tl.maximum(m, tl.max(s, 1) * scaled)
            base = m_new
            if HIDES:
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * scaled[:, None] - base[:, None])
            decay = tl.exp2(m - base)
            z = z * decay + tl.sum(p, 1)
            acc *= decay[:, None]
            m = m_new
        else:
            s -= vectors[1]
            MASKED: tl.constexpr = HIDES and not VANISHES
            if SHIFTED:
                m_new = tl.maximum(m, tl.max(s, 1))
                p, _, mu, _ = activate_both(ACT, s, m_new[:, None], seen, MASKED)
                decay = tl.exp2(m - m_new)
                z = z * decay + tl.sum(mu, 1)
                acc *= decay[:, None]
                m = m_new
            elif NORMALIZER:
                p, _, mu, _ = activate_both(ACT, s, vectors[2], seen, MASKED)
                z += tl.sum(mu, 1)
            else:
                p = activate(ACT, s, vectors[2], seen, MASKED)[0]
                if SUM:
                    z += tl.sum(p, 1)
            if PEAKED:
                p, acc, peak = relative(p, acc, peak, 1)
        v_tile = load_block(v, first, local, dv, DV, EDGE)  # [BN, DV]
        acc = dot(p.to(v_tile.dtype), v_tile, acc, PRECISION)
    return acc, m, z, peak


@triton.jit
def finish(
    acc, m, z, at, index, queries, vectors, stat, weight_sum, lse, sink, tau, factor,
    eps, ACT: tl.constexpr, UNIT: tl.constexpr, ONLINE: tl.constexpr, SUM: tl.constexpr,
    NORMALIZER: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Return the output [BM, DV]. Store lse, stat and weight_sum (see `flash_forward`)."""
    inside = index < queries
    if ONLINE:
        if lse is not None:  # −∞ for a query without keys
            tl.store(lse + at + index, out_of_unit(m + tl.log2(z), UNIT), mask=inside)
        empty = z == 0.0
        # A query without keys has z = 0 and m = −∞. Its saved statistic is finite, so that the
        # backward needs no guard against −∞ − (−∞) in its loops: hidden scores give 2^−∞ = 0.
        if weight_sum is not None:
            tl.store(stat + at + index, tl.where(empty, 0.0, m), mask=inside)
            tl.store(weight_sum + at + index, tl.where(empty, 1.0, z), mask=inside)
        if sink is not None:
            last = tl.load(sink + at + index, mask=inside, other=0.0) * UNIT
            top = tl.maximum(m, last)
            top = tl.where(top == float("-inf"), 0.0, top)
            down = tl.exp2(m - top)
            acc *= down[:, None]
            z = z * down + tl.exp2(last - top)
            m = top
            empty = z == 0.0
        acc /= tl.where(empty, 1.0, z)[:, None]
        if stat is not None and weight_sum is None:
            tl.store(stat + at + index, tl.where(empty, 0.0, m + tl.log2(z)), mask=inside)
    elif SUM:
        if sink is not None:
            last = tl.load(sink + at + index, mask=inside, other=0.0)[:, None] * UNIT
            z += tl.sum(ACT(last, vectors[2])[2 if NORMALIZER else 0], 1)
        if eps is not None:
            z += eps * tl.exp2(-m) if SHIFTED else eps
        z = tl.where(z == 0.0, 1.0, z)
        acc /= z[:, None]
        if weight_sum is not None:
            tl.store(stat + at + index, m, mask=inside)
            tl.store(weight_sum + at + index, z, mask=inside)
        elif stat is not None:
            tl.store(stat + at + index, z, mask=inside)
        if tau is not None:
            threshold = vectors[1] + vectors[6]  # one of them is 0
            acc += threshold - threshold  # Set NaN if τ is NaN: tl.maximum in φ removes NaN.
    elif factor is not None:
        acc *= tl.load(factor + at + index, mask=inside, other=0.0)[:, None]
    return acc
