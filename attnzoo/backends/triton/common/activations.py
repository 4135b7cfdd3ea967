"""Triton implementations of `attnzoo.core.activations`: (φ(x), φ'(x)) of a tile x.

``shape`` holds the shape parameters of the tile's queries, or is None.

x is already multiplied by the activation's ``unit``, so that exp is a single exp2. φ' is the
derivative with respect to the scores, without the unit. Masked scores are −∞. If the field
``vanishes`` of the activation is True, φ and φ' must be 0 at x = −∞. φ(NaN) must be NaN, except in
activations that are used only for thresholds (``tl.maximum(NaN, 0)`` is 0). The compiler removes φ
or φ' if it is not used.
"""

import triton
import triton.language as tl

from attnzoo.backends.triton.common.tile import reciprocal

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x, shape):
    phi = tl.exp2(x)
    return phi, phi


@triton.jit
def sigmoid(x, shape):
    phi = reciprocal(1.0 + tl.exp2(-x))
    return phi, phi * (1.0 - phi)


@triton.jit
def sparsemax(x, shape):
    phi = tl.maximum(1.0 + x, 0.0)
    return phi, tl.where(phi > 0.0, 1.0, 0.0)


@triton.jit
def entmax15(x, shape):
    u = tl.maximum(1.0 + 0.5 * x, 0.0)
    return u * u, u


@triton.jit
def q_exp(x, shape):
    """φ = u^{1/a} and φ' = φ/u with u = [1 + ax]_+, a = α − 1."""
    phi, u, _, _ = _q_exp(x, shape - 1.0)
    return phi, phi * reciprocal(u)


@triton.jit
def q_exp_shape_slope(x, shape):
    """∂φ/∂α = φ · (y/u − log u) / a² with y = ax."""
    a = shape - 1.0
    phi, u, y, log_u = _q_exp(x, a)
    # Near y = 0 the two terms cancel. They are x² Σ_k (−1)^{k−1} (k−1)/k y^{k−2} with k from 2 on.
    series = -1.0 / 2.0 + y * (2.0 / 3.0 + y * (-3.0 / 4.0 + y * (4.0 / 5.0 + y * (-5.0 / 6.0))))
    closed = (y * reciprocal(u) - log_u) / (a * a)
    slope = tl.where(tl.abs(y) < 0.03, x * x * series, closed)
    return tl.where(phi > 0.0, phi * slope, 0.0)


@triton.jit
def _q_exp(x, a):
    """Return φ, u, y = ax (at least −1), and log u."""
    y = tl.maximum(a * x, -1.0)
    # Near u = 1, log u is computed by a series. The hardware logarithm has an absolute error there,
    # and the division by a would amplify this error.
    t = y * reciprocal(2.0 + y)
    t2 = t * t
    series = 2.0 * t * (1.0 + t2 * (1.0 / 3.0 + t2 * (1.0 / 5.0 + t2 * (1.0 / 7.0))))
    u = tl.maximum(1.0 + y, 1e-30)  # the result for u = 0 is replaced below
    log_u = tl.where(tl.abs(y) < 0.125, series, LN2 * tl.log2(u))
    phi = tl.where(y > -1.0, tl.exp2(log_u * (1.0 / (a * LN2))), 0.0)
    return phi, u, y, log_u


@triton.jit
def relu(x, shape):
    # tl.maximum would remove NaN.
    return tl.where(x <= 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def relu2(x, shape):
    u = tl.where(x <= 0.0, 0.0, x)
    return u * u, u + u


@triton.jit
def relu_power(x, shape):
    """φ = x^p and φ' = p x^{p−1} for x > 0, with p = shape."""
    u, log_u = _positive_log2(x)
    power = tl.exp2((shape - 1.0) * log_u)
    return tl.where(x <= 0.0, 0.0, u * power), tl.where(x <= 0.0, 0.0, shape * power)


@triton.jit
def relu_power_shape_slope(x, shape):
    """∂φ/∂p = φ log x."""
    _, log_u = _positive_log2(x)
    return tl.where(x <= 0.0, 0.0, tl.exp2(shape * log_u) * (log_u * LN2))


@triton.jit
def _positive_log2(x):
    """Return u = max(x, smallest normal number), but NaN if x is NaN, and log2 u."""
    u = tl.where(x <= 1.1754943508222875e-38, 1.1754943508222875e-38, x)
    return u, tl.log2(u)


@triton.jit
def silu(x, shape):
    share = reciprocal(1.0 + tl.exp2(-x))
    phi = (LN2 * x) * share
    return phi, share + phi * (1.0 - share)


@triton.jit
def softplus(x, shape):
    """φ = max(s, 0) + log(1 + u) and φ' = σ(s) with u = e^{−|s|}.

    log(1 + u) = u P(u), where P has degree 7 and the smallest relative error for u ≤ 1, 2e-7. A
    logarithm of 1 + u would lose the digits of small u.
    """
    u = tl.exp2(-tl.abs(x))
    p = -0.107681708 + u * (0.0440896192 - 0.00853920291 * u)
    p = -0.244954636 + u * (0.177452421 + u * p)
    p = 0.999999806 + u * (-0.499974054 + u * (0.3327548 + u * p))
    # tl.maximum(NaN, 0) is 0, but u is then NaN. A second exp2 takes fewer registers than a choice.
    return tl.maximum(LN2 * x, 0.0) + u * p, reciprocal(1.0 + tl.exp2(-x))


@triton.jit
def softpick(x, most):
    """φ = [y]_+ and μ = |y| with y = (e^s − 1) e^{−M}.

    x and ``most`` are s and M times log2 e.

    Returns φ, φ', μ and μ'.
    """
    up, down = tl.exp2(x - most), tl.exp2(-most)
    s = LN2 * x
    # e^s − 1 loses digits near s = 0. There it is s Σ_k s^k / (k + 1)! with k up to 7.
    series = 1.0 + s * (1.0 / 6.0) * (1.0 + s * (1.0 / 7.0) * (1.0 + s * (1.0 / 8.0)))
    series = 1.0 + s * (1.0 / 3.0) * (1.0 + s * 0.25 * (1.0 + s * 0.2 * series))
    series = s * (1.0 + 0.5 * s * series)
    y = tl.where(tl.abs(s) < 0.5, series * down, up - down)
    mu_slope = tl.where(x > 0.0, up, tl.where(x < 0.0, -up, 0.0))
    return tl.where(y <= 0.0, 0.0, y), tl.where(x > 0.0, up, 0.0), tl.abs(y), mu_slope


@triton.jit
def taylor2(x, shape):
    slope = 1.0 + x
    return 0.5 * x * x + slope, slope


@triton.jit
def taylor4(x, shape):
    slope = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0)))
    x2 = x * x
    return x2 * x2 * (1.0 / 24.0) + slope, slope
