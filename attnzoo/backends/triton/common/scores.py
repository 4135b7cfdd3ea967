"""Helpers of the kernels: the scores of a tile from its products q·k, and weights from scores.

The distance of query i and key j is ``i + keys − queries − j``. The index tensors i and j broadcast
against each other, so the same code serves a tile [BLOCK_M, BLOCK_N] and its transpose.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.dropout import hashed_rows
from attnzoo.backends.triton.common.groups import Head, QueryVectors
from attnzoo.backends.triton.common.tile import reciprocal


@triton.jit
def load_vector(vector, at, i, count, other, EDGE: tl.constexpr):
    """Load the entries at + i. With EDGE, only those with i < count exist."""
    if EDGE:
        return tl.load(vector + at + i, mask=i < count, other=other)
    return tl.load(vector + at + i)


@triton.jit
def load_vectors(i, at, count, vectors, terms, rule, EDGE: tl.constexpr = True):
    """Return the `QueryVectors` of the queries at + i, shaped as i.

    The compiler removes what the kernel does not use.
    """
    gain = tl.full(i.shape, 1.0, tl.float32)
    factor, tau = gain * (terms.scale * rule.SCORE_UNIT), tl.zeros(i.shape, tl.float32)
    shape, slope, offset, peak, threshold = tau, tau, tau, tau, tau
    of_dropout, cut, last = tau, tau, tau
    if vectors.gain is not None:
        gain = load_vector(vectors.gain, at, i, count, 0.0, EDGE)
        factor *= gain
    if vectors.offset is not None:
        offset = load_vector(vectors.offset, at, i, count, 0.0, EDGE)
        # An offset may be log 0 = −∞ for a query that sees no key.
        offset = tl.where(offset == float("-inf"), 0.0, offset)
    if vectors.shape is not None:
        # With 1.5, every φ is finite for the queries that do not exist.
        shape = load_vector(vectors.shape, at, i, count, 1.5, EDGE)
    if terms.slopes is not None:
        slope = load_vector(terms.slopes, at, i, count, 0.0, EDGE) * rule.SCORE_UNIT
    if terms.tau is not None:
        tau = load_vector(terms.tau, at, i, count, 0.0, EDGE)
    if terms.peak is not None:
        peak = load_vector(terms.peak, at, i, count, 0.0, EDGE)
        threshold, tau = tau, threshold
    if terms.seed is not None:
        of_dropout = hashed_rows(at + i, terms.seed)
    if terms.cut is not None:
        cut = load_vector(terms.cut, at, i, count, 0.0, EDGE)
        last = load_vector(terms.last, at, i, count, 0, EDGE)
    return QueryVectors(
        gain, factor, tau, shape, slope, offset, peak, threshold, of_dropout, cut, last
    )


@triton.jit
def load_head(b, h, i, heads, terms, visible, strides, size):
    """Return the `Head` of the queries i.

    Fields that the call lacks hold any value; no kernel reads them.
    """
    mask = b * 0 if strides.head is None else h * 0
    if visible.mask is not None:
        mask += b * strides.batch * strides.align
        if strides.head is not None:
            mask += h * strides.head * strides.align
    segment = load_segments(visible.q_segments, b * size.queries, i, size.queries)
    bh = b * heads + h
    table = h if terms.table is None else h * (2 * terms.radius + 1)
    return Head(mask, b * size.keys, bh * size.keys, table, load_decay(terms.decay, bh), segment)


@triton.jit
def load_segments(segments, at, i, count):
    segment = i
    if segments is not None:
        segment = tl.load(segments + at + i, mask=i < count, other=0)
    return segment


@triton.jit
def load_decay(decay, at):
    value = at
    if decay is not None:
        value = tl.load(decay + at)
    return value


@triton.jit
def capped(product, inner, PRECISION: tl.constexpr):
    """Return tanh(inner · product), or the product if ``inner`` is None.

    The absolute error is 1e-7. For fp32 inputs, PRECISION "tf32x3", the relative error is 1e-6.
    """
    if inner is not None:
        x = product * inner
        t = 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * 2.8853900817779268))  # e^{2x} = 2^{2x/ln 2}
        if PRECISION == "tf32x3":
            x2 = x * x
            series = 1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0)))
            t = tl.where(x2 < 0.03, x * series, t)
        return t
    return product


@triton.jit
def by_distance(DISTANCE: tl.constexpr, i, j, size, decay):
    """Return the two results of a function of (distance, decay), for a tile of scores."""
    # In fp32, rows and columns are converted once, not each entry. Exact up to 2^24 positions.
    t = tl.abs((i + (size.keys - size.queries)).to(tl.float32) - j.to(tl.float32))
    return DISTANCE(t, decay)


@triton.jit
def relative_entry(i, j, size, radius):
    """Return the entries of a table, radius + clamp(p_j − p_i), for a tile of scores."""
    position = j - (i + (size.keys - size.queries))
    return tl.minimum(tl.maximum(position, -radius), radius) + radius


@triton.jit
def scores(product, i, j, scoring, rule, EDGE: tl.constexpr, HIDES: tl.constexpr):
    """Return the scores (−∞ for hidden keys) and a mask of the visible keys; see `Scoring`.

    The product is from `capped`. With EDGE the tile may extend beyond the matrix or beyond the
    range of keys that causality and window allow. With a peak the scores are relative to it and to
    the threshold. Where nothing is added to the products, the peak is a product: fewer instructions
    then give exactly 0 for the largest score.
    """
    loaded, vectors, terms, size = scoring.loaded, scoring.vectors, scoring.terms, scoring.size
    # Whether a selection compares the scores, see `flash.selection`
    COMPARED: tl.constexpr = rule.SCORE_UNIT != rule.UNIT
    s, seen = product * loaded.factor, j < size.keys  # [BM, BN], [1, BN]
    if terms.peak is not None and rule.PLAIN:
        s = (product - loaded.peak) * loaded.factor - loaded.threshold
    elif terms.peak is not None or (COMPARED and not rule.PLAIN):
        # Rounded here, as the peak was. Fused with the subtraction of the peak, it would not give 0
        # for the largest score. Scores that are compared are rounded alike in all kernels.
        s = tl.fma(product, loaded.factor, 0.0)
    if rule.DISTANCE is not None:
        a, m = by_distance(rule.DISTANCE, i, j, size, scoring.head.decay)
        s = s * a + m * rule.SCORE_UNIT
    if terms.slopes is not None:
        distance = tl.abs(i + (size.keys - size.queries) - j)
        if COMPARED:  # fused in every kernel, whatever the compiler decides
            s = tl.fma(loaded.slope, -distance.to(tl.float32), s)
        else:
            s -= loaded.slope * distance
    if terms.table is not None:
        entry = relative_entry(i, j, size, terms.radius)
        s += in_unit(tl.load(terms.table + scoring.head.table + entry), rule)
    if terms.key_bias is not None:
        # Both may be much larger than their difference, which is therefore formed first.
        added = tl.load(terms.key_bias + scoring.head.key_bias + j, mask=seen, other=0.0)
        if vectors.offset is not None:
            added = added - loaded.offset
        s += added * rule.SCORE_UNIT
    elif vectors.offset is not None:
        s -= loaded.offset * rule.SCORE_UNIT
    if HIDES:
        s, seen = hide(s, i, j, scoring, rule, EDGE)
    if terms.peak is not None and not rule.PLAIN:
        s = (s - loaded.peak) - loaded.threshold
    return s, seen


@triton.jit
def select(s, j, loaded, terms, rule):
    """Return the scores in UNIT, −∞ for the keys j that `flash.selection` has not selected."""
    if terms.cut is not None:
        # Not "s > cut", so that NaN stays.
        dropped = (s < loaded.cut) | ((s == loaded.cut) & (j > loaded.last))
        s = tl.where(dropped, float("-inf"), s * rule.UNIT)
    return s


@triton.jit
def in_unit(x, rule):
    """x times the unit, clamped: the lowest fp32 number, a common mask value, would overflow.

    NaN stays NaN. `select` multiplies by the other unit later.
    """
    ALL: tl.constexpr = tl.PropagateNan.ALL
    MOST: tl.constexpr = 3e38 if rule.SCORE_UNIT == rule.UNIT else 2.08e38
    x *= rule.SCORE_UNIT
    return tl.minimum(tl.maximum(x, -MOST, propagate_nan=ALL), MOST, propagate_nan=ALL)


@triton.jit
def out_of_unit(x, UNIT: tl.constexpr):
    """x divided by the unit. Values clamped by `in_unit` become the limits of fp32."""
    low = tl.where((x <= -3e38) & (x > float("-inf")), -3.4028234663852886e38, x / UNIT)
    return tl.where((x >= 3e38) & (x < float("inf")), 3.4028234663852886e38, low)


@triton.jit
def hide(s, i, j, scoring, rule, EDGE: tl.constexpr):
    """Return s with −∞ for hidden keys, and a mask of the visible keys."""
    head, visible, strides, size = scoring.head, scoring.visible, scoring.strides, scoring.size
    exists = j < size.keys if EDGE else tl.full(j.shape, True, tl.int1)
    seen = exists
    if EDGE:
        # One comparison per entry. Rows beyond the last query need none: they are loaded as 0, and
        # their results are not stored.
        offset = size.keys - size.queries
        if size.right is not None:
            seen = j <= tl.minimum(i + offset + size.right, size.keys - 1)
        if size.left is not None:
            seen = seen & (j >= i + offset - size.left)
    if visible.mask is not None:
        entries = visible.mask + head.mask + j  # pointers [1, BN], of a dense mask [BM, BN]
        if strides.key is not None:
            entries = visible.mask + head.mask + j.to(tl.int64) * strides.key
        inside = exists
        if strides.query is not None:
            entries = entries + i.to(tl.int64) * (strides.query.to(tl.int64) * strides.align)
            # One comparison per row, also in full blocks: the last block may have too many rows.
            inside = inside & (i < size.queries)
        if visible.mask.dtype.element_ty == tl.uint8:
            seen = seen & (tl.load(entries, mask=inside, other=0) != 0)
        else:
            added = tl.load(entries, mask=inside, other=float("-inf")).to(tl.float32)
            seen = seen & (added != float("-inf"))
            s = s + in_unit(added, rule)
    if visible.k_segments is not None:
        ids = tl.load(visible.k_segments + head.k_segments + j, mask=exists, other=0)
        seen = seen & (head.segment == ids)
    return tl.where(seen, s, float("-inf")), seen


@triton.jit
def activate(x, shape, seen, rule, HIDES: tl.constexpr):
    """Return φ, φ', μ and μ'. Without a normalizer, μ is φ.

    Hidden keys get 0, where φ(−∞) is not 0.
    """
    if rule.NORMALIZER:
        phi, slope, mu, mu_slope = rule.ACT(x, shape)
    else:
        phi, slope = rule.ACT(x, shape)
        mu, mu_slope = phi, slope
    if HIDES and not rule.VANISHES:
        phi, slope = tl.where(seen, phi, 0.0), tl.where(seen, slope, 0.0)
        mu, mu_slope = tl.where(seen, mu, 0.0), tl.where(seen, mu_slope, 0.0)
    return phi, slope, mu, mu_slope


@triton.jit
def cap_slope(ds, product, inner):
    """Return dS times the derivative of tanh, whose value is ``product``; see `capped`."""
    if inner is not None:
        ds *= (1.0 - product) * (1.0 + product)
    return ds


@triton.jit
def score_gradients(dp, delta, slope, mu_slope, rule):
    """Return dS of a tile: φ' (dP − δ), or φ' dP − μ' δ with a normalizer.

    dP = dO·v and δ are divided by Z.
    """
    if rule.NORMALIZER:
        return slope * dp - mu_slope * delta
    return slope * (dp - delta)
