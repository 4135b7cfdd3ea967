"""Helpers of the kernels: loading tiles, ranges of keys and queries, and scores.

The distance of query i and key j is ``i + keys − queries − j``. The index tensors i and j broadcast
against each other, so the same code serves a tile [BLOCK_M, BLOCK_N] and its transpose.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# The smallest normal number. Its reciprocal is finite.
SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        # The interpreter multiplies bf16 as raw bits, and accumulates fp16 in fp16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def relative(x, acc, peak, AXIS: tl.constexpr):
    """Return x / p, acc · peak / p and p, the running maximum of |x| along AXIS.

    ``acc`` is a sum of products of x / ``peak``, summed along AXIS. fp16 numbers have 11 bits from
    6e-5 to 65504 only, and x may be of any size, for example a polynomial of the scores.
    """
    p = tl.maximum(peak, tl.max(tl.abs(x), AXIS))
    acc *= tl.expand_dims(peak / p, AXIS)
    return x * tl.expand_dims(1.0 / p, AXIS), acc, p


@triton.jit
def load_tile(base, rows, row_stride, count, columns, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Load the entries [rows, columns] of a matrix (count, DIM), 0 outside the matrix."""
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    if columns.shape[0] == DIM:
        if EDGE:
            return tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
        return tl.load(pointers)
    inside = (columns < DIM)[None, :]
    if EDGE:
        inside = inside & (rows < count)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_block(matrix, first, local, columns, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Load the rows first + local of a matrix with DIM columns, 0 outside the matrix.

    ``matrix``: (base, row stride, number of rows, TMA descriptor or None, batch, head). The base
    points to the batch and head, the descriptor covers the whole tensor. In a loop only the scalar
    ``first`` changes, so the offsets inside a block are computed once, before the loop.
    """
    base, stride, count, descriptor, b, h = matrix
    if descriptor is not None:
        # TMA: a hardware unit computes the addresses, and writes 0 outside the tensor.
        tile = descriptor.load([b.to(tl.int32), h.to(tl.int32), first, 0])
        return tile.reshape([local.shape[0], columns.shape[0]])
    pointers = base + first.to(tl.int64) * stride
    pointers = pointers + (local.to(tl.int64)[:, None] * stride + columns[None, :])
    if columns.shape[0] == DIM:
        if EDGE:
            return tl.load(pointers, mask=(local < count - first)[:, None], other=0.0)
        return tl.load(pointers)
    inside = (columns < DIM)[None, :]
    if EDGE:
        inside = inside & (local < count - first)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def query_tile(
    q, q_b, q_h, q_n, heads, queries,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ALIGN: tl.constexpr,
    splits=None,
):  # fmt: skip
    """Load the queries of this program, or of ``splits`` adjacent programs.

    Returns batch, head, the offset of the head in per-query vectors, the first query, the indices
    of the queries [BM], a pointer to the head, and the queries [BM, D]. Strides are in units of
    ALIGN, so that the compiler knows their divisibility and uses wide loads. A matrix is not
    returned, because Triton 3.6 cannot return the None in it.
    """
    tiles = tl.cdiv(queries, BLOCK_M)
    # The last queries are launched first, because under causality they see the most keys.
    program = tl.program_id(0)
    if splits is not None:
        program //= splits
    tile = tiles - 1 - program % tiles
    bh = (program // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    q += (b * q_b + h * q_h) * ALIGN
    start, local = tile * BLOCK_M, tl.arange(0, BLOCK_M)
    matrix = (q, q_n * ALIGN, queries, None, b, h)
    q_tile = load_block(matrix, start, local, tl.arange(0, BLOCK_D), D, True)  # [BM, D]
    return b, h, bh * queries, start, start + local, q, q_tile


@triton.jit
def times(a, b, DIM: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """Return the product a · bᵀ. Each operand is (tile, matrix, first, local), see `load_block`.

    With PART the given tiles are not used: PART columns at a time are loaded from memory. PART is
    for tiles that do not fit in registers, because tf32x3 keeps the left operand twice.
    """
    if PART is None:
        product = dot(a[0], tl.trans(b[0]), None, PRECISION)
    else:
        product = tl.zeros([a[3].shape[0], b[3].shape[0]], tl.float32)
        for start in range(0, DIM, PART):
            columns = start + tl.arange(0, PART)
            a_part = load_block(a[1], a[2], a[3], columns, DIM, True)
            b_part = load_block(b[1], b[2], b[3], columns, DIM, True)
            product = dot(a_part, tl.trans(b_part), product, PRECISION)
    return product


@triton.jit
def store_tile(base, rows, row_stride, count, columns, DIM: tl.constexpr, value):
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    inside = (rows < count)[:, None] & (columns < DIM)[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def key_blocks(start, queries, keys, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (low, full, high): blocks [low, high) hold the keys that the queries may see.

    The queries are ``start`` to ``start`` + BLOCK_M − 1. Without a window, mask or segments they
    see all keys of the blocks below ``full``.
    """
    first = start + keys - queries
    last = tl.minimum(start + BLOCK_M, queries) - 1 + keys - queries
    low, high, full = 0, tl.cdiv(keys, BLOCK_N), keys // BLOCK_N
    if left is not None:
        low = tl.maximum(first - left, 0) // BLOCK_N
    if right is not None:
        high = tl.cdiv(tl.maximum(tl.minimum(last + right + 1, keys), 0), BLOCK_N)
        full = tl.maximum(tl.minimum(first + right + 1, keys), 0) // BLOCK_N
    return tl.minimum(low, high), tl.minimum(full, high), high


@triton.jit
def query_blocks(start, queries, keys, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (low, high): queries of blocks [low, high) may see keys of the block at ``start``."""
    first = start + queries - keys
    last = tl.minimum(start + BLOCK_N, keys) - 1 + queries - keys
    low, high = 0, tl.cdiv(queries, BLOCK_M)
    if right is not None:
        low = tl.maximum(first - right, 0) // BLOCK_M
    if left is not None:
        high = tl.cdiv(tl.maximum(tl.minimum(last + left + 1, queries), 0), BLOCK_M)
    return tl.minimum(low, high), high


@triton.jit
def load_vectors(
    i, at, scale, gain, tau, shape, alibi, base, peak, queries,
    UNIT: tl.constexpr, TAU_UNIT: tl.constexpr,
):  # fmt: skip
    """Return gain · scale, τ, shape, ALiBi slope, base, peak and threshold of the queries i.

    All are shaped as i. ``at`` is the offset of the head. gain · scale and slope are multiplied by
    UNIT, τ by TAU_UNIT. With a peak, τ is returned as the threshold, which `scores` subtracts.
    TAU_UNIT is None for a τ that the forward has saved: it is finite and already in the unit.
    If τ, shape, alibi, base or peak is None, 0 is returned, and the compiler removes the operations
    with 0.
    """
    factor = tl.full(i.shape, 1.0, tl.float32) * (scale * UNIT)
    tau_i = tl.zeros(i.shape, tl.float32)
    shape_i, slope, base_i, peak_i = tau_i, tau_i, tau_i, tau_i
    if gain is not None:
        factor *= tl.load(gain + at + i, mask=i < queries, other=0.0)
    if tau is not None:
        tau_i = tl.load(tau + at + i, mask=i < queries, other=0.0)
        if TAU_UNIT is not None:
            # A given τ may be log 0 = −∞. Hidden scores (−∞) minus this τ would be NaN.
            tau_i = tl.where(tau_i == float("-inf"), 0.0, tau_i) * TAU_UNIT
    if shape is not None:
        shape_i = tl.load(shape + at + i, mask=i < queries, other=1.5)
    if alibi is not None:
        slope = tl.load(alibi + at + i, mask=i < queries, other=0.0) * UNIT
    if base is not None:
        base_i = tl.load(base + at + i, mask=i < queries, other=0.0)
    threshold = tl.zeros(i.shape, tl.float32)
    if peak is not None:
        peak_i = tl.load(peak + at + i, mask=i < queries, other=0.0)
        threshold, tau_i = tau_i, threshold
    return factor, tau_i, shape_i, slope, base_i, peak_i, threshold


@triton.jit
def place_mask(mask, b, h, mask_b, mask_h, MASK_ALIGN: tl.constexpr):
    """Return the offset of the mask of a head.

    The strides are in units of MASK_ALIGN, so that the compiler uses wide loads. ``mask_h`` None:
    all heads share the mask, and the offset has no head dimension.
    """
    at = b * 0 if mask_h is None else h * 0
    if mask is not None:
        at += b * mask_b * MASK_ALIGN
        if mask_h is not None:
            at += h * mask_h * MASK_ALIGN
    return at


@triton.jit
def load_segments(segments, at, i, count):
    """Load the segments of the queries i. Without ``segments``, return an unused placeholder."""
    found = i
    if segments is not None:
        found = tl.load(segments + at + i, mask=i < count, other=0)
    return found


@triton.jit
def reciprocal(x):
    """Return 1/x for x ≥ 1e-30, to 1 ulp, in one instruction. Above 2^126 the result is 0."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def short_log2(x):
    """Return log2 x in one instruction. ``tl.log2`` takes about 15.

    The error is 2.4e-7: absolute for 0.5 < x < 2, otherwise relative.
    """
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


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
def load_decay(decay, at):
    """Load the decay at ``at``. Without ``decay``, return an unused placeholder."""
    found = at
    if decay is not None:
        found = tl.load(decay + at)
    return found


@triton.jit
def by_distance(DISTANCE: tl.constexpr, i, j, size, decay):
    """Return the two results of a function of (distance, decay), for a tile of scores."""
    # In fp32, rows and columns are converted once, not each entry. Exact up to 2^24 positions.
    t = tl.abs((i + (size[1] - size[0])).to(tl.float32) - j.to(tl.float32))
    return DISTANCE(t, decay)


@triton.jit
def scores(
    product, i, j, vectors, segment, where, size, UNIT: tl.constexpr, DISTANCE: tl.constexpr,
    EDGE: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Return the scores (−∞ for hidden keys) and a mask of the visible keys.

    ``vectors``: from `load_vectors`. ``where``: (mask, mask_at, mask_m, mask_n, k_segments, alibi,
    terms) with terms = (key_bias, offset of the head in key_bias, base, inner, decay, peak); base
    and peak are not None if the vectors contain them. The product is from `capped`. DISTANCE: the
    function for the gain and bias by distance, or None. ``size``: (queries, keys, left, right).
    With EDGE the tile may extend beyond the matrix or beyond the range of keys that causality and
    window allow. With ``peak`` the scores are relative to it and to the threshold. Where nothing is
    added to the products, the peak is a product: fewer instructions then give exactly 0 for the
    largest score.
    """
    alibi = where[5]
    key_bias, bias_at, base, _, decay, peak = where[6]
    queries, keys = size[0], size[1]
    s, seen = product * vectors[0], j < keys
    MULTIPLE: tl.constexpr = where[0] is None and alibi is None and DISTANCE is None
    PLAIN: tl.constexpr = MULTIPLE and key_bias is None and base is None
    if peak is not None and PLAIN:
        s = (product - vectors[5]) * vectors[0] - vectors[6]
    elif peak is not None:
        # Rounded here, as the peak was. Fused with the subtraction of the peak, it would not give 0
        # for the largest score.
        s = tl.fma(product, vectors[0], 0.0)
    if DISTANCE is not None:
        a, m = by_distance(DISTANCE, i, j, size, decay)
        s = s * a + m * UNIT
    if alibi is not None:
        s -= vectors[3] * tl.abs(i + (keys - queries) - j)
    if key_bias is not None:
        # Both may be much larger than their difference, which is therefore formed first.
        added = tl.load(key_bias + bias_at + j, mask=seen, other=0.0)
        if base is not None:
            added = added - vectors[4]
        s += added * UNIT
    elif base is not None:
        s -= vectors[4] * UNIT
    if HIDES:
        s, seen = hide(s, i, j, segment, where, size, UNIT, EDGE)
    if peak is not None and not PLAIN:
        s = (s - vectors[5]) - vectors[6]
    return s, seen


@triton.jit
def in_unit(x, UNIT: tl.constexpr):
    """x times the unit, clamped: the lowest fp32 number, a common mask value, would overflow."""
    return tl.minimum(tl.maximum(x * UNIT, -3e38), 3e38)


@triton.jit
def out_of_unit(x, UNIT: tl.constexpr):
    """x divided by the unit. Values clamped by `in_unit` become the limits of fp32."""
    found = tl.where((x <= -3e38) & (x > float("-inf")), -3.4028234663852886e38, x / UNIT)
    return tl.where((x >= 3e38) & (x < float("inf")), 3.4028234663852886e38, found)


@triton.jit
def hide(s, i, j, segment, where, size, UNIT: tl.constexpr, EDGE: tl.constexpr):
    mask, mask_at, mask_m, mask_n, k_segments, _, _ = where
    queries, keys, left, right = size
    exists = j < keys if EDGE else tl.full(j.shape, True, tl.int1)
    seen = exists
    if EDGE:
        # One comparison per entry. Rows beyond the last query need none: they are loaded as 0, and
        # their results are not stored.
        if right is not None:
            seen = j <= tl.minimum(i + (keys - queries) + right, keys - 1)
        if left is not None:
            seen = seen & (j >= i + (keys - queries) - left)
    if mask is not None:
        entries = mask + mask_at + j  # None: contiguous
        if mask_n is not None:
            entries = mask + mask_at + j.to(tl.int64) * mask_n
        inside = exists
        if mask_m is not None:  # None: a key mask, one entry for all queries
            entries = entries + i.to(tl.int64) * mask_m
            # One comparison per row, also in full blocks: the last block may have too many rows.
            inside = inside & (i < queries)
        if mask.dtype.element_ty == tl.uint8:
            seen = seen & (tl.load(entries, mask=inside, other=0) != 0)
        else:
            added = tl.load(entries, mask=inside, other=float("-inf")).to(tl.float32)
            seen = seen & (added != float("-inf"))
            s = s + in_unit(added, UNIT)
    if k_segments is not None:
        seen = seen & (segment == tl.load(k_segments + j, mask=exists, other=0))
    return tl.where(seen, s, float("-inf")), seen


@triton.jit
def activate(ACT: tl.constexpr, x, shape, seen, MASKED: tl.constexpr):
    """Return φ and φ'. MASKED sets both to 0 for hidden keys, as needed if φ(−∞) is not 0."""
    phi, slope = ACT(x, shape)
    if MASKED:
        phi, slope = tl.where(seen, phi, 0.0), tl.where(seen, slope, 0.0)
    return phi, slope


@triton.jit
def activate_both(ACT: tl.constexpr, x, shape, seen, MASKED: tl.constexpr):
    """As `activate`, for an activation with a normalizer: return φ, φ', μ and μ'."""
    phi, slope, mu, mu_slope = ACT(x, shape)
    if MASKED:
        phi, slope = tl.where(seen, phi, 0.0), tl.where(seen, slope, 0.0)
        mu, mu_slope = tl.where(seen, mu, 0.0), tl.where(seen, mu_slope, 0.0)
    return phi, slope, mu, mu_slope
