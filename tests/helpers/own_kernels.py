"""Triton functions of user-defined activations and distances.

See `test_own_activations` and `test_flash_terms`.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x, shape):
    """φ = φ' = 2^x. x is the score times log2 e."""
    phi = tl.exp2(x)
    return phi, phi


@triton.jit
def entmax175(x, shape):
    """φ = u^(4/3) and φ' = u^(1/3) with u = max(1 + 3x/4, 0)."""
    u = tl.maximum(1.0 + 0.75 * x, 0.0)
    root = tl.where(u > 0.0, tl.exp2(tl.log2(tl.maximum(u, 1e-30)) / 3.0), 0.0)
    return u * root, root


@triton.jit
def tame(x, shape):
    """φ = 1 / (1 + x²) for x < 0, and 1 for x >= 0."""
    y = tl.minimum(x, 0.0)
    phi = 1.0 / (1.0 + y * y)
    return phi, -2.0 * tl.maximum(y, -1e18) * phi * phi


@triton.jit
def near(t, decay):
    """a = 1 / (1 + decay · t) and m = 0."""
    return 1.0 / (1.0 + decay * t), tl.zeros(t.shape, tl.float32)


@triton.jit
def near_slope(t, decay):
    a = 1.0 / (1.0 + decay * t)
    return -t * a * a, tl.zeros(t.shape, tl.float32)


@triton.jit
def root(t, decay):
    """a = 1 and m = −decay · √t."""
    return tl.full(t.shape, 1.0, tl.float32), -decay * tl.sqrt(t)


@triton.jit
def root_slope(t, decay):
    return tl.zeros(t.shape, tl.float32), -tl.sqrt(t)
