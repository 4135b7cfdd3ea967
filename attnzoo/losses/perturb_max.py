"""Losses of a classifier that takes the largest score after independent normal noise is added.

The target is that class with the probability

    P = P(z_y + σε_y >= z_k + σε_k for all k) = ∫ φ(t) Π_{k≠y} Φ(t + d_k) dt,  d_k = (z_y − z_k)/σ

φ and Φ are the density and the distribution function of a standard normal variable. The exponent
g(t) = −t²/2 + Σ log Φ(t + d_k) is concave with g'' <= −1, so it has one mode, which Newton's method
finds from the left without overshoot: g' is convex, falls, and is >= 0 at t = 0. With the width
s = (−g'')^{−1/2} at the mode t*, t = t* + s·sinh(u) gives nodes that are close to each other at the
mode and far apart in the right tail, where g may fall more slowly. To the left of the mode g falls
at least as fast as a parabola of width s. In u, the trapezoidal rule converges exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo.core.call import in_full_precision
from attnzoo.core.device import is_cpu
from attnzoo.core.normal_distribution import LOG_ROOT, SMALLEST, log_cdf_and_tail
from attnzoo.losses.arguments import bind_batch, check_number
from attnzoo.losses.operators import token_losses
from attnzoo.losses.rules import NEG_INF, LossRule, Options, Tokens, rule

# Newton steps for a mode. It needs about ten for 10⁵ equal scores, and few for others.
STEPS = 40
# Distance of the nodes in u. The error of the trapezoidal rule is about exp(−π²/(2·distance)): half
# the distance squares it.
DISTANCE = {torch.float32: 0.25, torch.float64: 0.125}
# g(t) − g(t*) <= −x²/2 for t = t* + s·x to the left, and for t = t* + x to the right. The nodes end
# where this is exp(−40), below the rounding error of fp64.
REACH = 9.0
# Logits per block on a GPU. In each block the host waits for the end of Newton's method and the
# number of nodes, which is short beside the passes over the block.
LARGE_BLOCK = 2**24


def perturb_max_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    std: float = 1.0,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """−log of the probability that the target has the largest score after normal noise is added.

    With logits z = input · linear_weightᵀ + linear_bias and independent noise ε_k ~ N(0, std²), the
    loss of a token with target y is::

        L = −log P(z_y + ε_y > z_k + ε_k for all k ≠ y)
          = −log ∫ φ(t) Π_{k≠y} Φ(t + (z_y − z_k)/std) dt

    φ and Φ are the density and the distribution function of N(0, 1). With Gumbel noise, this would
    be cross entropy of z/std.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        std: Standard deviation of the noise, > 0.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import perturb_max_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> perturb_max_loss(h, E, torch.arange(8), std=2.0).backward()

    References:
        Hazan & Jaakkola 2012, arXiv:1206.6410, for the model with Gumbel noise.

    Notes:
        No noise is drawn. The integral is computed by quadrature, and so is its gradient. In fp32
        the loss has an absolute error of about 1e-7 plus rounding, so a loss below 1e-6 has no
        correct digit. On a CPU a token costs 10 to 100 times as much as with cross entropy, and
        more if d is below 128. Memory is linear in tokens + classes.
    """
    return _loss(log_loss, input, linear_weight, target, linear_bias, std, ignore_index, reduction)


def exact_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    std: float = 1.0,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The expected error rate of a classifier with normal noise in its scores.

    With logits z = input · linear_weightᵀ + linear_bias and independent noise ε_k ~ N(0, std²), the
    loss of a token with target y is::

        L = 1 − P(z_y + ε_y > z_k + ε_k for all k ≠ y)

    It is at most 1. A token far from its decision boundary, on either side, has almost no gradient.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        std: Standard deviation of the noise, > 0.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import exact_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> exact_loss(h, E, torch.arange(8)).backward()

    References:
        EXACT: Karpukhin et al. 2022, arXiv:2205.09615. The paper decreases the noise during
        training and bounds the logits by normalization. Here ``std`` is an argument, and the logits
        are used as they are.

    Notes:
        Quadrature, cost and memory are those of `perturb_max_loss`.
    """
    return _loss(
        error_rate, input, linear_weight, target, linear_bias, std, ignore_index, reduction
    )


def _loss(
    of_probability: LossRule, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    std: float, ignore_index: int, reduction: str,
) -> Tensor:  # fmt: skip
    options = Options(std=check_number("std", std, above=True))
    batch = bind_batch(input, weight, bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        return token_losses(batch, of_probability, options)[0]


@rule
def log_loss(z: Tensor, tokens: Tokens, wanted: list[str], options: Options) -> dict[str, Tensor]:
    """The rule of −log P."""
    step = max(1, LARGE_BLOCK // z.shape[1])
    blocks = [slice(start, start + step) for start in range(0, len(z), step)]
    losses = [_integrate(z[b], tokens.rows(b), options.std, bool(wanted)) for b in blocks]
    return {"loss": torch.cat(losses)}


@rule
def error_rate(z: Tensor, tokens: Tokens, wanted: list[str], options: Options) -> dict[str, Tensor]:
    """The rule of 1 − P."""
    loss = log_loss(z, tokens, wanted, options)["loss"]
    if wanted:
        z.mul_((-loss).exp()[:, None])
    return {"loss": -(-loss).expm1()}


def _integrate(z: Tensor, tokens: Tokens, std: float, with_gradient: bool) -> Tensor:
    """−log P. With its gradient, z becomes ∂(factor · loss)/∂z."""
    column = tokens.column
    d = z.gather(1, column).sub(z).div_(std)
    # Φ(∞) = 1 leaves a class out.
    d.scatter_(1, column, float("inf"))
    if tokens.hidden is not None:
        d.masked_fill_(tokens.hidden, float("inf"))
    # A target with the logit −∞, or a class with ∞: P = 0, and no finite change of z changes that.
    lost = (d == NEG_INF).any(-1)
    d.masked_fill_(lost[:, None], 0.0)
    log_p = z.new_full((len(z),), NEG_INF)
    slope, shares = torch.zeros_like(z) if with_gradient else None, torch.zeros_like(log_p)
    for node, log_weight in _nodes(d):
        log_phi, ratio = _log_phi_and_ratio(d + node)
        log_term = log_weight - node[:, 0].square() / 2 + log_phi.sum(-1)
        total = torch.logaddexp(log_p, log_term)
        if slope is not None:
            # The mean of λ(t + d_k) over the nodes, weighted with their shares of the integral. For
            # log P = −10⁷ the shares have no correct digit in fp32, but λ differs little.
            before, share = (log_p - total).exp(), (log_term - total).exp()
            shares = shares * before + share
            slope.mul_(before[:, None]).addcmul_(ratio, share[:, None])
        log_p = total
    # Rounding makes the loss of a certain target negative.
    loss = (LOG_ROOT - log_p).clamp(min=0).masked_fill(lost, float("inf"))
    if slope is not None:
        factor = (tokens.factor / (std * shares)).masked_fill(lost, 0.0)
        slope.mul_(factor[:, None])
        z.copy_(slope.scatter_(1, column, -slope.sum(-1, keepdim=True)))
    return loss


def _nodes(d: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The nodes t (n, 1) and the logarithms of their weights (n,)."""
    mode, width = _mode(d)
    step = DISTANCE[d.dtype]
    left = math.asinh(REACH)
    # nan_to_num: a row with NaN must not change the nodes of others.
    right = torch.asinh(REACH / width).nan_to_num(left).amax()
    for n in range(-math.ceil(left / step), math.ceil(float(right) / step) + 1):
        u = n * step
        yield mode + width * math.sinh(u), (width * (step * math.cosh(u))).log()[:, 0]


def _mode(d: Tensor) -> tuple[Tensor, Tensor]:
    """The mode t* and its width s, both (n, 1)."""
    t = torch.zeros_like(d[:, :1])
    width = torch.ones_like(t)
    for _ in range(STEPS):
        x = d + t
        ratio = _log_phi_and_ratio(x)[1]
        slope = ratio.sum(-1, keepdim=True) - t
        # −λ' = λ(λ + x), 0 where x = ∞. λ + x cancels for x << 0, where −λ' = 1 − 1/x² + O(x⁻⁴).
        bend = torch.where(x < -10, 1 - x**-2, (ratio * (ratio + x)).nan_to_num(0.0))
        bend = 1 + bend.sum(-1, keepdim=True)
        move = slope / bend
        t, width = t + move, bend.rsqrt()
        # The nodes cover a tenth of a width more.
        if bool((move.abs() <= 0.1 * width).all()):
            break
    return t, width


def _log_phi_and_ratio(x: Tensor) -> tuple[Tensor, Tensor]:
    """log Φ(x), and λ(x) = φ(x)/Φ(x)."""
    # A GPU computes these functions fast, and the host need not wait for the smallest x.
    if not is_cpu(x.device) or bool((x < SMALLEST).any()):
        ratio = math.sqrt(2 / math.pi) / torch.special.erfcx(x * -math.sqrt(0.5))
        return torch.special.log_ndtr(x), ratio
    log_phi, tail = log_cdf_and_tail(x)
    density = x.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return log_phi, density / torch.where(x < 0, tail, 1 - tail)
