"""The loop over keys of a pairwise form: o_i = Σ_j φ(s_ij − τ_i) v_j / Z_i, block by block.

`walk` accumulates a partial result over a range of blocks of keys. `finish` adds the sink and
divides, once, at the end. Partial results by form:

- ``ONLINE`` (φ = exp, normalized): (m, Z, o). The running maximum m is used as τ.
- ``SUM`` (another φ, normalized): (Z, o). τ is 0 or given. With ``NORMALIZER``, Z is a sum of μ.
- ``SUM`` and ``SHIFTED``: (m, Z, o). φ gets m, the running maximum of 0 and the scores, as its
  argument ``shape``.
- Without normalization: o.

``PEAKED`` (not ``ONLINE``, values in fp16): φ and o are relative to the running maximum of φ, see
`relative`. After the loop, o is multiplied by this maximum.

With dropout, o lacks the dropped weights, and is multiplied by 1 / (1 − p) after the loop. Z has
all weights.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.dropout import drop
from attnzoo.backends.triton.common.groups import Side
from attnzoo.backends.triton.common.scores import (
    activate,
    capped,
    hide,
    out_of_unit,
    scores,
    select,
)
from attnzoo.backends.triton.common.tile import SMALLEST, dot, load_block, relative, times


@triton.jit
def factor_out(q_tile, factor, LATE: tl.constexpr):
    """Return (q_tile, factor [BM]): score = product · factor with factor ≥ 0.

    max(factor · s) is factor · max(s) then, so the maximum is taken of the products, and the factor
    is applied in the same instruction (FMA) as the subtraction of the maximum.

    LATE: "flip" or "keep". "flip" changes the sign of q where the factor is negative. On sm_90 a
    changed q is an operand in registers instead of shared memory, so there is "keep": no factor is
    negative.
    """
    if LATE == "flip":
        sign = tl.where(factor < 0.0, -1.0, 1.0)
        # The product with ±1 is exact. It is in fp32, because the interpreter lacks bf16.
        q_tile = (q_tile.to(tl.float32) * sign).to(q_tile.dtype)
        factor *= sign
    return q_tile, tl.reshape(factor, [factor.shape[0]])


@triton.jit
def factored(product, factor, i, j, scoring, rule, EDGE: tl.constexpr, HIDES: tl.constexpr):
    """Return (s, factor): scores are s · factor, with s −∞ for hidden keys.

    ``factor``: from `factor_out`, or None. Then the scores are s, and the factor is 1.
    """
    if factor is None:
        s, _ = scores(product, i, j, scoring, rule, EDGE, HIDES)
        s = select(s, j, scoring.loaded, scoring.terms, rule)
        factor = tl.full([product.shape[0]], 1.0, tl.float32)
    else:
        s = product
        if HIDES:
            s, _ = hide(product, i, j, scoring, rule, EDGE)
            # Where keys are hidden, not 0: 0 · (−∞) would be NaN. |s| · SMALLEST < 1e-8 if
            # |s| < 1e30.
            factor = tl.where(factor == 0.0, SMALLEST, factor)
    return s, factor


@triton.jit
def walk(
    acc, m, z, peak, low, high, q_side, factor, i, sides, scoring, blocks, rule, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Return the partial result (acc, m, z, peak) after the blocks of keys [low, high).

    With PEAKED, acc is o / peak, and ``peak`` is SMALLEST before the first block.

    If ``blocks`` is given, the loop runs over the block indices in its entries [low, high). If the
    ``sides`` have no keys, an earlier pass has stored q kᵀ, and q_side [BM, 1] points to the
    products with key 0.
    ``factor``: from `factor_out`, or None.
    """
    terms = scoring.terms
    local = tl.arange(0, tile.BLOCK_N)
    HIDES: tl.constexpr = EDGE or rule.HIDES
    for n in range(low, high):
        block = n
        if blocks is not None:
            block = tl.load(blocks + n)
        first = block * tile.BLOCK_N
        j = first + local  # [BN]
        if sides.d is None:  # Triton 3.6 does not compile "k is None" for a tuple with None in it
            product = tl.load(q_side + j[None, :])  # [BM, BN]
        else:
            k_tile = load_block(sides.k, first, local, sides.d, tile.D, EDGE)  # [BN, D]
            product = times(q_side, Side(k_tile, sides.k, first, local), tile.D, tile)  # [BM, BN]
        product = capped(product, terms.inner, tile.PRECISION)
        if rule.ONLINE:
            s, row_factor = factored(product, factor, i, j[None, :], scoring, rule, EDGE, HIDES)
            # [BM]. The factor multiplies a maximum instead of a tile; see `factor_out`.
            m_new = tl.maximum(m, tl.max(s, 1) * row_factor)
            base = m_new
            if HIDES:
                # −∞ − (−∞) would be NaN for a query that has not seen a key. Relative to 0, its p
                # and rescale are 2^−∞ = 0.
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * row_factor[:, None] - base[:, None])  # [BM, BN]
            rescale = tl.exp2(m - base)
            z = z * rescale + tl.sum(p, 1)
            acc *= rescale[:, None]
            m = m_new
            p = drop(p, scoring.loaded.hash, j[None, :], terms)
        else:
            # [BM, BN]
            s, seen = scores(product, i, j[None, :], scoring, rule, EDGE, HIDES)
            s -= scoring.loaded.tau
            if rule.SHIFTED:
                m_new = tl.maximum(m, tl.max(s, 1))
                p, _, mu, _ = activate(s, m_new[:, None], seen, rule, HIDES)
                rescale = tl.exp2(m - m_new)
                z = z * rescale + tl.sum(mu, 1)
                acc *= rescale[:, None]
                m = m_new
            else:
                p, _, mu, _ = activate(s, scoring.loaded.shape, seen, rule, HIDES)
                if rule.SUM:
                    z += tl.sum(mu, 1)
            p = drop(p, scoring.loaded.hash, j[None, :], terms)
            if rule.PEAKED:
                p, acc, peak = relative(p, acc, peak, 1)
        v_tile = load_block(sides.v, first, local, sides.dv, tile.DV, EDGE)  # [BN, DV]
        # Tensor cores take both operands in the dtype of the values, and add in fp32.
        acc = dot(p.to(v_tile.dtype), v_tile, acc, tile.PRECISION)  # [BM, DV]
    return acc, m, z, peak


@triton.jit
def finish(acc, m, z, at, index, queries, loaded, vectors, terms, saved, eps, rule):
    """Return the output [BM, DV]. Store `Saved`."""
    inside = index < queries
    if rule.ONLINE:
        if saved.lse is not None:  # −∞ for a query without keys
            tl.store(saved.lse + at + index, out_of_unit(m + tl.log2(z), rule.UNIT), mask=inside)
        empty = z == 0.0
        # A query without keys has z = 0 and m = −∞. Its saved statistic is finite, so that the
        # backward needs no guard against −∞ − (−∞) in its loops: hidden scores give 2^−∞ = 0.
        if saved.weight_sum is not None:
            tl.store(saved.stat + at + index, tl.where(empty, 0.0, m), mask=inside)
            tl.store(saved.weight_sum + at + index, tl.where(empty, 1.0, z), mask=inside)
        if vectors.sink is not None:
            sink = tl.load(vectors.sink + at + index, mask=inside, other=0.0) * rule.UNIT
            top = tl.maximum(m, sink)
            top = tl.where(top == float("-inf"), 0.0, top)
            rescale = tl.exp2(m - top)
            acc *= rescale[:, None]
            z = z * rescale + tl.exp2(sink - top)
            m = top
            empty = z == 0.0
        acc /= tl.where(empty, 1.0, z)[:, None]
        if saved.stat is not None and saved.weight_sum is None:
            tl.store(saved.stat + at + index, tl.where(empty, 0.0, m + tl.log2(z)), mask=inside)
    elif rule.SUM:
        if vectors.sink is not None:
            sink = tl.load(vectors.sink + at + index, mask=inside, other=0.0)[:, None] * rule.UNIT
            _, _, mu, _ = activate(sink, loaded.shape, None, rule, False)
            z += tl.sum(mu, 1)
        if eps is not None:
            z += eps * tl.exp2(-m) if rule.SHIFTED else eps
        z = tl.where(z == 0.0, 1.0, z)
        acc /= z[:, None]
        if saved.weight_sum is not None:
            tl.store(saved.stat + at + index, m, mask=inside)
            tl.store(saved.weight_sum + at + index, z, mask=inside)
        elif saved.stat is not None:
            tl.store(saved.stat + at + index, z, mask=inside)
        if terms.tau is not None:
            threshold = loaded.tau + loaded.threshold  # one of them is 0
            acc += threshold - threshold  # Set NaN if τ is NaN: tl.maximum in φ removes NaN.
    elif terms.factor is not None:
        acc *= tl.load(terms.factor + at + index, mask=inside, other=0.0)[:, None]
    return acc
