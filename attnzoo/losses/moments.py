"""Losses from two moments of the classes, without the scores.

The sum over the classes of a quadratic φ(s) = a + b·s + c·s² needs Σ_j s_j and Σ_j s_j². Let
s_j = gain · h·e_j, where e_j is a row of the matrix with the bias as one more column. The mean
μ = Σ_j e_j/V and the Gram matrix G = Σ_j (e_j − μ)(e_j − μ)ᵀ give

    Σ_j s_j = V·t,  Σ_j s_j² = gain²·hᵀGh + V·t²,  t = gain · h·μ.

If the rows e_j share a large offset, centring keeps G accurate. The cost is V·d² + N·d², not N·V·d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.core.call import in_full_precision
from attnzoo.core.checks import is_known
from attnzoo.losses.arguments import TokenBatch, bind_batch, check_number
from attnzoo.losses.operators import FIRST_ONLY, hidden_and_target

ROWS = 4096  # number of classes per step; a step copies their rows to subtract the mean


class Moments(NamedTuple):
    mean: Tensor  # μ, (d,), or (d + 1,) with a bias
    gram: Tensor  # G


@operator
def class_moments(*, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Moments:
    size = weight.shape[1] + (bias is not None)
    mean = weight.new_zeros(size, dtype=dtype)
    gram = weight.new_zeros(size, size, dtype=dtype)
    with in_full_precision(weight.device):
        for e in _rows(weight, bias, dtype):
            mean += e.sum(0)
        mean /= len(weight)
        for e in _rows(weight, bias, dtype):
            e = e - mean
            gram.addmm_(e.T, e)
    return Moments(mean, gram)


@class_moments.fake
def _(*, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Moments:
    size = weight.shape[1] + int(bias is not None)  # sympy adds no bool
    return Moments(weight.new_empty(size, dtype=dtype), weight.new_empty(size, size, dtype=dtype))


@class_moments.flops
def _(*, weight: Tensor, bias: Tensor | None) -> int:
    return 2 * len(weight) * (weight.shape[1] + (bias is not None)) ** 2


@class_moments.backward("weight", "bias", no_double=FIRST_ONLY)
def class_moments_backward(
    *, weight: Tensor, bias: Tensor | None, mean: Tensor, gram: Tensor, dmean: Tensor,
    dgram: Tensor, wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    gradients = {"weight": weight.new_empty(weight.shape)}
    if bias is not None:
        gradients["bias"] = bias.new_empty(bias.shape)
    start, both = 0, dgram + dgram.T
    with in_full_precision(weight.device):
        for e in _rows(weight, bias, mean.dtype):
            de = torch.addmm(dmean / len(weight), e - mean, both)
            stop = start + len(e)
            gradients["weight"][start:stop] = de[:, : weight.shape[1]]
            if bias is not None:
                gradients["bias"][start:stop] = de[:, -1]
            start = stop
    return gradients


@class_moments_backward.flops
def _(*, weight: Tensor, mean: Tensor) -> int:
    return 2 * len(weight) * len(mean) ** 2


def _rows(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Iterator[Tensor]:
    for start in range(0, len(weight), ROWS):
        part = weight[start : start + ROWS].to(dtype)
        if bias is not None:
            part = torch.cat([part, bias[start : start + ROWS, None].to(dtype)], dim=1)
        yield part


class Logits(NamedTuple):
    """Logits of the targets, and moments of the logits of all classes. All are (N,)."""

    target: Tensor  # z_y
    centred: Tensor  # z_y − mean
    mean: Tensor
    variance: Tensor
    rounding: Tensor  # a variance up to this may be that of equal logits


def logits_of(batch: TokenBatch, scaled: bool = False) -> Logits:
    """Target logits and moments; differentiable. Rows of ignored tokens count as 0.

    If the logits themselves cost less than the moments, they are computed, and take less memory
    than the operands. ``scaled``: the logits of each token are divided by a number, so that the
    variance neither overflows nor underflows.
    """
    h, rows = hidden_and_target(batch)
    assert batch.weight is not None
    classes = batch.weight.shape[0]
    if scaled:
        largest = h.detach().abs().amax(-1, keepdim=True)
        h = h / largest.where(largest > 0, 1.0)
    if cheaper(h.shape[0], classes, h.shape[1]):
        mean_row, gram = class_moments(weight=batch.weight, bias=batch.bias, dtype=h.dtype)
        # Rounding makes it negative if h is orthogonal to all rows.
        variance = (torch.linalg.vecdot(h @ gram, h) / classes).clamp(min=0)
        # The difference is taken between classes, so that a common offset of all classes cancels.
        target, centred = torch.linalg.vecdot(h, rows), torch.linalg.vecdot(h, rows - mean_row)
        mean = h @ mean_row
    else:
        matrix = batch.weight.to(h.dtype)
        if batch.bias is not None:
            matrix = torch.cat([matrix, batch.bias.to(h.dtype)[:, None]], 1)
        mean_row = matrix.mean(0)
        z = h @ matrix.T
        mean, target = z.mean(-1), torch.linalg.vecdot(h, rows)
        variance, centred = (z - mean[:, None]).square().mean(-1), target - mean
    # Rounding of sums over d numbers, over the rows of a step, and over steps.
    terms = h.shape[1] + math.log2(ROWS) + classes / ROWS
    error = terms * torch.finfo(h.dtype).eps * (h.abs() @ mean_row.abs()).detach()
    return Logits(target, centred, mean, variance, error.square())


def cheaper(tokens: int, classes: int, dim: int) -> bool:
    """Whether the moments cost fewer multiplications than tokens × classes scores.

    In a graph for any number of tokens they do, because they take less memory for many tokens.
    """
    return not is_known(tokens * classes <= dim * (tokens + classes))


def log_sum(
    logits: Logits, gain: Tensor | None, coefficients: tuple[float, float, float], classes: int
) -> Tensor:
    """log Σ_j φ(s_j)"""
    a, b, c = coefficients
    t, spread = logits.mean, logits.variance
    if gain is not None:
        t, spread = t * gain, spread * gain.square()
    return torch.log(a + b * t + c * (t * t + spread)) + math.log(classes)


def z_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    a: float,
    b: float,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Z-loss: logistic loss of the target's standard score among all classes.

    With logits z = input · linear_weightᵀ + linear_bias, their mean μ and standard deviation σ over
    the V classes, the loss of a token with target y is::

        L = log(1 + exp(a (b − (z_y − μ)/σ))) / a

    It does not change when all logits of a token are shifted, or scaled by a positive factor.

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        a: a > 0, the sharpness. The paper tunes a and b for each task.
        b: The standard score at which the loss turns from linear to exponential.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import z_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> z_loss(h, E, torch.arange(8), a=0.1, b=10.0).backward()

    References:
        De Brébisson & Vincent 2016, arXiv:1604.08859.

    Notes:
        With many tokens and classes (d (N + V) < N V), no logit but that of the target is computed.
        The mean and the Gram matrix of the classes give μ and σ. σ divides by V, not V − 1. If all
        logits of a token are equal up to rounding, its standard score is 0, with gradient 0. The
        loss ranks classes; it does not define probabilities.
    """
    sharpness, centre = check_number("a", a, above=True), check_number("b", b, least=None)
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        logits = logits_of(batch, scaled=True)
        equal = logits.variance <= logits.rounding
        deviation = logits.variance.masked_fill(equal, 1.0).sqrt()
        score = (logits.centred / deviation).masked_fill(equal, 0.0)
        excess = sharpness * (centre - score)
        return batch.reduced(torch.logaddexp(excess, torch.zeros_like(excess)) / sharpness)


def spherical_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    eps: float = 1e-3,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-probability of spherical softmax, whose probabilities are squares.

    With logits z = input · linear_weightᵀ + linear_bias, the loss of a token with target y is::

        L = −log p_y,  p_j = (z_j² + eps) / Σ_k (z_k² + eps)

    Args:
        input, linear_weight, target, linear_bias, ignore_index, reduction: As for `linear_loss`.
        eps: eps > 0 keeps the logarithm finite at z_y = 0. The paper only asks for a small number.

    Returns:
        As `linear_loss`.

    Raises:
        ValueError, TypeError: As `linear_loss`.

    Example:
        >>> import torch
        >>> from attnzoo.losses import spherical_loss
        >>> h, E = torch.randn(8, 32, requires_grad=True), torch.randn(100, 32, requires_grad=True)
        >>> spherical_loss(h, E, torch.arange(8)).backward()

    References:
        De Brébisson & Vincent 2015, arXiv:1511.05042.

    Notes:
        With many tokens and classes, no logit but that of the target is computed, as for `z_loss`.
        Σ z² then has an error of about 1e-6 ‖h‖² Σ_k ‖E_k‖² in fp32, which is large if a hidden
        state is almost orthogonal to all rows. The sign of a logit does not matter, and a logit of
        0 has gradient 0.
    """
    constant = check_number("eps", eps, above=True)
    batch = bind_batch(input, linear_weight, linear_bias, target, ignore_index, reduction)
    with in_full_precision(batch.input.device):
        logits = logits_of(batch)
        total = log_sum(logits, None, (constant, 0.0, 1.0), batch.classes)
        return batch.reduced(total - torch.log(logits.target.square() + constant))
