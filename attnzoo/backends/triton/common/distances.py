"""Triton implementations of `attnzoo.core.distance`: (a, m) of a tile of distances, and slopes.

t is an fp32 tile. ``decay`` is a number, or one per row of the tile. The slopes are derivatives by
decay. The backward calls both functions with the same arguments, and the compiler computes what
they share once.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.tile import reciprocal, short_log2


@triton.jit
def logarithmic(t, decay):
    """a = sqrt(1 + 2 log(1 + t/τ)) and m = −2 log(1 + t/τ)."""
    growth = _growth(t * (1.0 / decay))
    square = 1.0 + growth
    return square * tl.rsqrt(square), -growth


@triton.jit
def logarithmic_slope(t, decay):
    """∂a/∂τ = −x / (τ (1 + x) a) and ∂m/∂τ = 2x / (τ (1 + x)) with x = t/τ."""
    per_decay = 1.0 / decay
    x = t * per_decay
    slope = x * per_decay * reciprocal(1.0 + x)
    growth = _growth(x)
    return -slope * tl.rsqrt(1.0 + growth), 2.0 * slope


@triton.jit
def _growth(x):
    """2 log(1 + x), with an absolute error of 5e-7 up to x = 1, and a relative one above."""
    return (2.0 * LN2) * short_log2(1.0 + x)
