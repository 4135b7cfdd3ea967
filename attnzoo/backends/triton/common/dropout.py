"""Dropout in kernels: the mask of `attnzoo.backends.dropout`, in 32-bit integers."""

import triton
import triton.language as tl


@triton.jit
def hashed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x6D2B79F5
    return x ^ (x >> 16)


@triton.jit
def hashed_rows(rows, seed):
    """The hash of the rows (batch, head, query), int64, with the seed."""
    return hashed(rows.to(tl.uint32) ^ tl.load(seed).to(tl.uint32))


@triton.jit
def retained(of_rows, j, p):
    """The mask of the weights that are kept, for `hashed_rows` and the indices j of keys."""
    bits = hashed(of_rows ^ hashed(j.to(tl.uint32) + 0x9E3779B9))
    least = tl.full([], p * 4294967296.0, tl.float32)  # p has 24 bits: exact
    return bits >= least.to(tl.uint32)


@triton.jit
def drop(x, of_rows, j, terms):
    """Set entries of a tile to 0 by dropout, if there is any. They are not divided by 1 − p."""
    if terms.seed is not None:
        x = tl.where(retained(of_rows, j, terms.dropout_p), x, 0.0)
    return x
