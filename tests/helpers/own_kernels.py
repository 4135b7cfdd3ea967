"""Triton functions of user-defined activations; see `test_own_activations`."""

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
