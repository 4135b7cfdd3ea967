"""Softmax over rows in fp32, compiled with numba for one CPU core: three algorithms, and top-k.

Memory accesses per entry of a row that does not fit in the cache, as the algorithms define them.
Without non-temporal stores, a CPU also reads each line of the output before its first write.

=====================  =====  ======  ===================================================
function               reads  writes  passes over the row
=====================  =====  ======  ===================================================
three_pass                 3       1  maximum; sum of e^(x−max); output, e^(x−max) again
three_pass_stored          3       2  maximum; sum, e^(x−max) is stored; output in place
online                     2       1  maximum and sum together; output
two_pass                   2       1  sum as (mantissa, exponent); output, e^x again
top                        1       0  the k largest entries
online_top                 1       0  maximum, sum and the k largest entries together
=====================  =====  ======  ===================================================

`three_pass_stored` computes one exponential per entry, the other functions for softmax two.

References: `online` and `online_top` are algorithms 3 and 4 of Milakov and Gimelshein
(arXiv:1805.02867). `three_pass` and `three_pass_stored` are the two baselines of Dukhan and
Ablavatski (arXiv:2001.04438), "recomputing" and "reloading", and `two_pass` is their algorithm.

**One exponential for all.** numba vectorizes exp only with Intel's SVML, another package, on x86.
So e^x = m · 2^n with n = round(x · log2 e) and a polynomial m of degree 5 is written out, and LLVM
vectorizes it. 2^n is exact: its bits are built from n. VSCALEFPS, an instruction of AVX-512 that
multiplies by a power of two, is not used.

**Lanes.** A sum or maximum in one variable is a chain of dependent operations, which a compiler may
not reorder. Each of `LANES` columns of a block therefore has its own maximum, sum or pair. They are
merged at the end of the row. No fastmath is needed, so NaN and −∞ keep their meaning.

Rows: x and out (rows, columns) in fp32, contiguous. −∞ has weight 0, a row of −∞ has weights 0, a
row with NaN or +∞ is NaN. `two_pass` requires entries up to 1e5, and smaller finite entries than
−1e5 count as −1e5: for larger |x| the rounding of x · log2 e takes r out of the polynomial's range.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 128
LN2 = float(np.log(2))
LOG2E = np.float32(1 / LN2)
LN2_HIGH = np.float32(LN2)
LN2_LOW = np.float32(LN2 - float(LN2_HIGH))
# Interpolation at Chebyshev nodes is within 1.1e-7 of e^r on |r| ≤ ln(2) / 2.
C0, C1, C2, C3, C4, C5 = (
    np.polynomial.Chebyshev.interpolate(np.exp, 5, domain=[-LN2 / 2, LN2 / 2])
    .convert(kind=np.polynomial.Polynomial)
    .coef.astype(np.float32)
)
ZERO, ONE = np.float32(0), np.float32(1)
LOWEST = np.finfo(np.float32).min  # start of a maximum: −∞ − LOWEST is −∞, −∞ − (−∞) is NaN
LEAST = np.float32(-1e5)
LEAST_EXPONENT = np.float32(-2e5)  # below the exponent of every entry
UNDERFLOW = np.float32(-127)
HIDDEN = np.float32(-np.inf)


# ---- operations that numba has no function for --------------------------------------------------


@intrinsic
def fma(context, a, b, c):
    """a · b + c, rounded once."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def nearest(context, x):
    """The integer nearest to x, as a float."""

    def generate(context, builder, signature, args):
        function = builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()])
        return builder.call(function, args)

    return types.float32(types.float32), generate


@intrinsic
def from_bits(context, bits):
    """The fp32 number with these bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


# ---- exponentials -------------------------------------------------------------------------------


@njit(inline="always")
def split_exp(x):
    """(m, n) with e^x = m · 2^n, n an integer and m from 2^-½ to 2^½."""
    n = nearest(x * LOG2E)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    m = fma(fma(fma(fma(fma(C5, r, C4), r, C3), r, C2), r, C1), r, C0)
    return m, n


@njit(inline="always")
def power_of_two(n):
    """2^n for integers n ≤ 0; 0 for n ≤ −127 and for NaN."""
    n = n if n > UNDERFLOW else UNDERFLOW
    return from_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(inline="always")
def exp(x):
    """e^x for x ≤ 0; 0 where the result is below the normal numbers."""
    m, n = split_exp(UNDERFLOW if x < UNDERFLOW else x)
    return m * power_of_two(n)


@njit(inline="always")
def split_entry(x):
    """`split_exp` of an entry of a row, which may be −∞."""
    m, n = split_exp(LEAST if x < LEAST else x)
    return (ZERO if x == HIDDEN else m), n


# ---- lanes --------------------------------------------------------------------------------------


@njit
def largest(lanes):
    """The maximum of the lanes, which are overwritten."""
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] = lanes[i + half] if lanes[i + half] > lanes[i] else lanes[i]
        half //= 2
    return lanes[0]


@njit
def added(lanes):
    """The sum of the lanes, which are overwritten."""
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@njit
def inverse(total):
    return ONE / total if total != ZERO else ZERO


@njit
def maximum(xs, lanes):
    lanes[:] = LOWEST
    for start in range(0, xs.shape[0], LANES):
        block = xs[start : start + LANES]
        for i in range(block.shape[0]):
            lanes[i] = block[i] if block[i] > lanes[i] else lanes[i]
    return largest(lanes)


@njit
def write_weights(xs, ys, top, factor):
    """y = e^(x − top) · factor."""
    for j in range(xs.shape[0]):
        ys[j] = exp(xs[j] - top) * factor


# ---- softmax ------------------------------------------------------------------------------------


@njit
def three_pass(x, out):
    lanes = np.empty(LANES, np.float32)
    for row in range(x.shape[0]):
        xs = x[row]
        top = maximum(xs, lanes)
        lanes[:] = ZERO
        for start in range(0, xs.shape[0], LANES):
            block = xs[start : start + LANES]
            for i in range(block.shape[0]):
                lanes[i] += exp(block[i] - top)
        write_weights(xs, out[row], top, inverse(added(lanes)))


@njit
def three_pass_stored(x, out):
    lanes = np.empty(LANES, np.float32)
    for row in range(x.shape[0]):
        xs, ys = x[row], out[row]
        top = maximum(xs, lanes)
        lanes[:] = ZERO
        for start in range(0, xs.shape[0], LANES):
            block, stored = xs[start : start + LANES], ys[start : start + LANES]
            for i in range(block.shape[0]):
                weight = exp(block[i] - top)
                stored[i] = weight
                lanes[i] += weight
        factor = inverse(added(lanes))
        for j in range(ys.shape[0]):
            ys[j] *= factor


@njit(inline="always")
def add_online(block, tops, totals):
    """Updates the maximum and the sum of each lane with one exponential per entry."""
    for i in range(block.shape[0]):
        x, top = block[i], tops[i]
        rises = x > top
        decay = exp(-abs(x - top))
        totals[i] = totals[i] * (decay if rises else ONE) + (ONE if rises else decay)
        tops[i] = x if rises else top


# Inlined, because LLVM then knows that the arrays do not overlap.
@njit(inline="always")
def merge_online(tops, totals, spare):
    """The maximum of all lanes, and the sum relative to it."""
    for i in range(LANES):
        spare[i] = tops[i]
    top = largest(spare)
    for i in range(LANES):
        totals[i] *= exp(tops[i] - top)
    return top, added(totals)


@njit
def online(x, out):
    tops, totals, spare = np.empty((3, LANES), np.float32)
    for row in range(x.shape[0]):
        xs = x[row]
        tops[:] = LOWEST
        totals[:] = ZERO
        for start in range(0, xs.shape[0], LANES):
            add_online(xs[start : start + LANES], tops, totals)
        top, total = merge_online(tops, totals, spare)
        write_weights(xs, out[row], top, inverse(total))


@njit
def two_pass(x, out):
    mantissas, exponents, spare = np.empty((3, LANES), np.float32)
    for row in range(x.shape[0]):
        xs, ys = x[row], out[row]
        mantissas[:] = ZERO
        exponents[:] = LEAST_EXPONENT
        for start in range(0, xs.shape[0], LANES):
            block = xs[start : start + LANES]
            for i in range(block.shape[0]):
                m, n = split_entry(block[i])
                rises = n > exponents[i]
                decay = power_of_two(-abs(n - exponents[i]))
                rescaled = mantissas[i] * (decay if rises else ONE)
                mantissas[i] = rescaled + m * (ONE if rises else decay)
                exponents[i] = n if rises else exponents[i]
        for i in range(LANES):
            spare[i] = exponents[i]
        common = largest(spare)
        for i in range(LANES):
            mantissas[i] *= power_of_two(exponents[i] - common)
        factor = inverse(added(mantissas))
        for j in range(xs.shape[0]):
            m, n = split_entry(xs[j])
            ys[j] = m * factor * power_of_two(n - common)


# ---- top-k --------------------------------------------------------------------------------------


@njit
def insert(value, column, values, columns):
    """Inserts an entry into the list, ordered by (value descending, column ascending)."""
    slot = min(column, values.shape[0] - 1)
    while slot > 0 and value > values[slot - 1]:
        values[slot] = values[slot - 1]
        columns[slot] = columns[slot - 1]
        slot -= 1
    values[slot] = value
    columns[slot] = column


@njit
def add_largest(block, start, values, columns):
    """Updates the list of the k largest entries. Columns are visited in ascending order."""
    k = values.shape[0]
    least = values[k - 1]
    larger = 0
    for i in range(block.shape[0]):
        larger += block[i] > least
    if larger == 0 and start >= k:
        return
    for i in range(block.shape[0]):
        if start + i < k or block[i] > values[k - 1]:
            insert(block[i], start + i, values, columns)


@njit
def top(x, values, columns):
    """The k largest entries of each row, and their columns: (rows, k), k at most the columns."""
    for row in range(x.shape[0]):
        xs = x[row]
        for start in range(0, xs.shape[0], LANES):
            add_largest(xs[start : start + LANES], start, values[row], columns[row])


@njit
def online_top(x, values, columns):
    """The k largest weights of each row of softmax(x), without writing the other weights."""
    tops, totals, spare = np.empty((3, LANES), np.float32)
    for row in range(x.shape[0]):
        xs = x[row]
        tops[:] = LOWEST
        totals[:] = ZERO
        for start in range(0, xs.shape[0], LANES):
            block = xs[start : start + LANES]
            add_online(block, tops, totals)
            add_largest(block, start, values[row], columns[row])
        largest_entry, total = merge_online(tops, totals, spare)
        factor = inverse(total)
        for i in range(values.shape[1]):
            values[row, i] = exp(values[row, i] - largest_entry) * factor
