"""Softmax of rows of any length in Triton, by three algorithms, for ``python -m benchmarks rows``.

`torch.softmax` computes the same. Attention and losses never store a row of weights, so they use
none of these kernels.

Grid: one program per row. A program walks over its row in blocks of BLOCK columns. Memory accesses
per entry, for rows that do not fit in the cache:

- `three_pass`: 3 reads, 1 write. Maximum; sum of e^(x−max); output.
- `online`: 2 reads, 1 write. Maximum and sum together, then the output. When the maximum m rises to
  m', the sum is multiplied by e^(m−m') (algorithm 3 of Milakov and Gimelshein, arXiv:1805.02867).
- `two_pass`: 2 reads, 1 write, no maximum. e^x = m · 2^n with an integer n, and the sum is such a
  pair, too: when the exponent n rises to n', the mantissa m is multiplied by 2^(n−n'), an exact
  power of two (Dukhan and Ablavatski, arXiv:2001.04438). Two differences from the paper: the
  mantissa is a hardware exp2 instead of a polynomial, and it covers large x as well, see
  `split_exp`.

All of them compute e^x twice per entry. Maximum, sum and pair are kept for each column of a block
and merged at the end, so the loops hold no reduction across threads.

Entries are converted to fp32. −∞ has weight 0, a row of −∞ has weights 0, a row with NaN or +∞ is
NaN. In `two_pass` finite entries beyond ±2e38 count as ±2e38.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.launch import Launch, unit_of
from attnzoo.backends.triton.common.tile import INTERPRETED
from attnzoo.backends.triton.common.tiles import Config

LOG2E = tl.constexpr(1.4426950216293335)  # log2 e in fp32
LOG2E_LOW = tl.constexpr(1.92596298909109e-08)
# A maximum starts here, because −∞ − (−∞) is NaN, and −∞ minus this number is −∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)
MOST = tl.constexpr(2e38)  # times log2 e, this is finite
COLUMNS = 2048  # per block


@triton.jit
def rows_of(x, out, columns, ALIGN: tl.constexpr):
    """Return pointers to this program's rows. ALIGN divides ``columns``, for wide loads."""
    start = tl.program_id(0).to(tl.int64) * (columns // ALIGN * ALIGN)
    return x + start, out + start


@triton.jit
def load_columns(xs, start, columns, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    """Load the columns from ``start`` on, in fp32. With EDGE: −∞ beyond the row."""
    j = start + tl.arange(0, BLOCK)
    if EDGE:
        return tl.load(xs + j, mask=j < columns, other=float("-inf")).to(tl.float32)
    return tl.load(xs + j).to(tl.float32)


@triton.jit
def store_columns(ys, start, columns, values, BLOCK: tl.constexpr, EDGE: tl.constexpr):
    j = start + tl.arange(0, BLOCK)
    if EDGE:
        tl.store(ys + j, values.to(ys.dtype.element_ty), mask=j < columns)
    else:
        tl.store(ys + j, values.to(ys.dtype.element_ty))


@triton.jit
def exp(x):
    return tl.exp2(x * (1.0 / LN2))


@triton.jit
def inverse(total):
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def write_weights(xs, ys, columns, top, total, BLOCK: tl.constexpr):
    """y = e^(x − top) / total."""
    full, factor = columns // BLOCK * BLOCK, inverse(total)
    for start in range(0, full, BLOCK):
        x = load_columns(xs, start, columns, BLOCK, False)
        store_columns(ys, start, columns, exp(x - top) * factor, BLOCK, False)
    x = load_columns(xs, full, columns, BLOCK, True)
    store_columns(ys, full, columns, exp(x - top) * factor, BLOCK, True)


@triton.jit(do_not_specialize=["columns"])
def three_pass(x, out, columns, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    xs, ys = rows_of(x, out, columns, ALIGN)
    full = columns // BLOCK * BLOCK
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    for start in range(0, full, BLOCK):
        # NaN is ignored here. It reaches the sum below.
        tops = tl.maximum(tops, load_columns(xs, start, columns, BLOCK, False))
    top = tl.max(tl.maximum(tops, load_columns(xs, full, columns, BLOCK, True)), 0)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, full, BLOCK):
        totals += exp(load_columns(xs, start, columns, BLOCK, False) - top)
    totals += exp(load_columns(xs, full, columns, BLOCK, True) - top)
    write_weights(xs, ys, columns, top, tl.sum(totals, 0), BLOCK)


@triton.jit
def add_online(x, tops, totals):
    """Return maxima and sums updated with one entry each, which takes one exponential.

    The new maximum is the entry or the old maximum, so one of the two factors is e^0.
    """
    rises = x > tops
    decay = exp(-tl.abs(x - tops))
    totals = totals * tl.where(rises, decay, 1.0) + tl.where(rises, 1.0, decay)
    return tl.where(rises, x, tops), totals


@triton.jit(do_not_specialize=["columns"])
def online(x, out, columns, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    xs, ys = rows_of(x, out, columns, ALIGN)
    full = columns // BLOCK * BLOCK
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, full, BLOCK):
        tops, totals = add_online(load_columns(xs, start, columns, BLOCK, False), tops, totals)
    tops, totals = add_online(load_columns(xs, full, columns, BLOCK, True), tops, totals)
    top = tl.max(tops, 0)
    write_weights(xs, ys, columns, top, tl.sum(totals * exp(tops - top), 0), BLOCK)


@triton.jit
def fma(a, b, c):
    """a · b + c, rounded once. The interpreter's own fma rounds twice."""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, tl.full(a.shape, b, tl.float32), c)


@triton.jit
def split_exp(x):
    """Return (m, n) with e^x = m · 2^n and an integer n.

    m is from 2^-½ to 2^½ for |x| < 1e7. Above, the spacing of fp32 numbers makes n a multiple of
    2, 4, … and m covers the rest. m is limited to 2^±60. The limit is reached for |x| > 7e8, where
    two numbers differ by 64 or more, and changes weights below 2^-50 only.
    """
    # Not tl.maximum and tl.minimum, which drop NaN.
    bounded = tl.where(x < -MOST, -MOST, tl.where(x > MOST, MOST, x))
    n = tl.floor(bounded * LOG2E + 0.5)
    fraction = fma(bounded, LOG2E_LOW, fma(bounded, LOG2E, -n))
    fraction = tl.where(fraction > 60.0, 60.0, tl.where(fraction < -60.0, -60.0, fraction))
    m = tl.where(x == float("inf"), float("nan"), tl.exp2(fraction))
    return tl.where(x == float("-inf"), 0.0, m), n


@triton.jit
def power_of_two(n):
    """Return 2^n for integers n ≤ 0, exactly; 0 for n ≤ −127 and for NaN."""
    n = tl.where(n > -127.0, n, -127.0)
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_pair(x, mantissas, exponents):
    """Return the pairs (mantissa, exponent) updated with e^x of one entry each."""
    m, n = split_exp(x)
    common = tl.maximum(exponents, n)
    scaled = mantissas * power_of_two(exponents - common)
    return scaled + m * power_of_two(n - common), common


@triton.jit
def pair_weights(x, factor, exponent):
    m, n = split_exp(x)
    return m * factor * power_of_two(n - exponent)


@triton.jit(do_not_specialize=["columns"])
def two_pass(x, out, columns, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    xs, ys = rows_of(x, out, columns, ALIGN)
    full = columns // BLOCK * BLOCK
    m, n = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], LOWEST, tl.float32)
    for start in range(0, full, BLOCK):
        m, n = add_pair(load_columns(xs, start, columns, BLOCK, False), m, n)
    m, n = add_pair(load_columns(xs, full, columns, BLOCK, True), m, n)
    exponent = tl.max(n, 0)
    factor = inverse(tl.sum(m * power_of_two(n - exponent), 0))
    for start in range(0, full, BLOCK):
        weights = pair_weights(load_columns(xs, start, columns, BLOCK, False), factor, exponent)
        store_columns(ys, start, columns, weights, BLOCK, False)
    weights = pair_weights(load_columns(xs, full, columns, BLOCK, True), factor, exponent)
    store_columns(ys, full, columns, weights, BLOCK, True)


KERNELS = {"three-pass": three_pass, "online": online, "two-pass": two_pass}


def describe(algorithm: str, x: Tensor, out: Tensor, block: int = COLUMNS) -> Launch:
    """Return the launch that writes softmax(x) to ``out``.

    Args:
        algorithm: a key of `KERNELS`.
        x: (rows, columns), fp16, bf16 or fp32, contiguous. Offsets in a row have 32 bits.
        out: the same shape, contiguous.
        block: columns per block.
    """
    args = {"x": x, "out": out, "columns": x.shape[1], "BLOCK": block}
    unaligned = x.shape[1] % unit_of(x) or x.data_ptr() % 16 or out.data_ptr() % 16
    args["ALIGN"] = 1 if unaligned else unit_of(x)
    return Launch(KERNELS[algorithm], x.shape[0], args, Config(1, block, 8, 2))
