"""Helpers of the kernels: loads, products and stores of tiles, and ranges of keys and queries."""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.groups import Matrix, QueryBlock

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
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]  # [BM, DIM]
    if columns.shape[0] == DIM:
        if EDGE:
            return tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
        return tl.load(pointers)
    inside = (columns < DIM)[None, :]
    if EDGE:
        inside = inside & (rows < count)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_paged(matrix, first, local, columns, DIM: tl.constexpr):
    """`load_block` of a matrix with `MatrixPages`: 0 for the rows that are in no page."""
    pages, row = matrix.pages, first + local - matrix.pages.missing  # [BN]
    exists = (row >= 0) & (local < matrix.count - first)
    page = tl.load(pages.table + row // pages.size, mask=exists, other=0).to(tl.int64)
    offset = page * pages.stride + (row % pages.size).to(tl.int64) * matrix.stride
    inside = exists[:, None]
    if columns.shape[0] != DIM:
        inside = inside & (columns < DIM)[None, :]
    pointers = matrix.base + offset[:, None] + columns[None, :]  # [BN, DIM]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_block(matrix, first, local, columns, DIM: tl.constexpr, EDGE: tl.constexpr):
    """Load the rows first + local of a `Matrix` with DIM columns, 0 outside the matrix.

    In a loop only the scalar ``first`` changes, so the offsets inside a block are computed once,
    before the loop.
    """
    if matrix.pages is not None:
        return load_paged(matrix, first, local, columns, DIM)
    if matrix.descriptor is not None:
        # TMA: a hardware unit computes the addresses, and writes 0 outside the tensor.
        # Its coordinates have 32 bits.
        at = [matrix.batch.to(tl.int32), matrix.head.to(tl.int32), first, 0]
        return matrix.descriptor.load(at).reshape([local.shape[0], columns.shape[0]])
    # In 64 bits, because a tensor may have more than 2^31 entries.
    pointers = matrix.base + first.to(tl.int64) * matrix.stride
    pointers = pointers + (local.to(tl.int64)[:, None] * matrix.stride + columns[None, :])
    if columns.shape[0] == DIM:
        if EDGE:
            return tl.load(pointers, mask=(local < matrix.count - first)[:, None], other=0.0)
        return tl.load(pointers)
    inside = (columns < DIM)[None, :]
    if EDGE:
        inside = inside & (local < matrix.count - first)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_queries(q, q_b, q_h, q_n, heads, queries, tile, splits=None):
    """Load the queries of this program, or of ``splits`` adjacent programs.

    Returns a `QueryBlock`, a pointer to the head, and the queries [BM, D]. Strides are in units of
    ALIGN, so that the compiler knows their divisibility and uses wide loads. A matrix is not
    returned, because Triton 3.6 cannot return the None in it.
    """
    blocks = tl.cdiv(queries, tile.BLOCK_M)
    # The last queries are launched first, because under causality they see the most keys.
    program = tl.program_id(0)
    if splits is not None:
        program //= splits
    block = blocks - 1 - program % blocks
    bh = (program // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    q += (b * q_b + h * q_h) * tile.ALIGN
    first, local = block * tile.BLOCK_M, tl.arange(0, tile.BLOCK_M)
    matrix = Matrix(q, q_n * tile.ALIGN, queries, None, b, h)
    q_tile = load_block(matrix, first, local, tl.arange(0, tile.BLOCK_D), tile.D, True)  # [BM, D]
    return QueryBlock(b, h, bh * queries, first, local), q, q_tile


@triton.jit
def times(a, b, DIM: tl.constexpr, tile):
    """Return the product a · bᵀ of two sides; see `Side`.

    With PART the tiles of the sides are not used: PART columns at a time are loaded from memory.
    PART is for tiles that do not fit in registers, because tf32x3 keeps the left operand twice.
    """
    if tile.PART is None:
        product = dot(a.tile, tl.trans(b.tile), None, tile.PRECISION)
    else:
        product = tl.zeros([a.local.shape[0], b.local.shape[0]], tl.float32)
        for start in range(0, DIM, tile.PART):
            columns = start + tl.arange(0, tile.PART)
            a_part = load_block(a.matrix, a.first, a.local, columns, DIM, True)
            b_part = load_block(b.matrix, b.first, b.local, columns, DIM, True)
            product = dot(a_part, tl.trans(b_part), product, tile.PRECISION)
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
    # Positions among the keys: query i stands at key i + keys − queries. Under causality the last
    # query sees most keys and sets ``high``, the first sees fewest and sets ``full``.
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
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_peaks(r):
    """Return the maximum of each row, NaN if an entry is NaN."""
    if INTERPRETED:  # it runs functions given to tl.reduce entry by entry
        has_nan = tl.max((r != r).to(tl.int32), 1) > 0
        return tl.where(has_nan, float("nan"), tl.max(r, 1))
    return tl.reduce(r, 1, larger)
