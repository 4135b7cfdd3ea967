"""The potential A(s) of a form and its gradient, for rows of scores over all classes.

The loss of a token is m·A(s) − Σ_j a_j ℓ(s_j) for a target distribution a with sum m. The gradient
of A is the variant's weights w, except for "sum" with φ ≠ exp and for "select" if the target is not
kept.

============  ==============================  ============
normalize     A(s)                            ℓ(s)
============  ==============================  ============
"sum", exp    log(Σ exp(s) + exp(sink))       s
"sum"         log(Σ φ(s) + φ(sink))           log φ(s)
"threshold"   τ + Σ ∫φ(s − τ) − C             s
"none"        Σ ∫φ(s − offset)                s − offset
"select"      log Σ exp(s), kept and target   s
============  ==============================  ============

Except for "none" and for "sum" with φ ≠ exp, a number p added to all s is added to A(s), and m·p to
Σ_j a_j ℓ(s_j). Both are computed from s − p, where p is the largest score, because the difference
of two large numbers would lose digits.

∫φ(x) is the integral from −∞ to x. The constant C makes the loss 0 if there is only one class. For
a q-exponential ∫φ is φ^α/α, and A of "threshold" is τ − (1 − Σ w^α)/α (Blondel et al. 2020,
arXiv:1901.02324, who use other units).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Rule
from attnzoo.core.activation import Activation
from attnzoo.core.device import is_cpu
from attnzoo.losses.rules import ALL_CLASSES, NEG_INF, ClassShard, Tokens

GROUP = 16  # classes per group in the search for classes with a nonzero weight
FIRST = 64  # number of group maxima from which a lower bound of the threshold is computed
POWERS = 2**24  # scores per step of a derivative by α, which holds ten tensors of this size


class Potential(NamedTuple):
    """A of each row, its gradient and statistics. All are (rows,) except ``slope``."""

    value: Tensor  # A(s − peak)
    slope: Tensor  # [rows, V], 0 where hidden; slope · scale = ∂A/∂s
    scale: Tensor | None  # None stands for 1
    by_vector: dict[str, Tensor]  # ∂A/∂x for each per-token vector x
    statistic: Tensor | None = None  # lse without the sink, or τ, of s itself
    lse_scale: Tensor | None = None  # slope · lse_scale = ∂lse/∂s
    power_sum: Tensor | None = None  # Σ w^α
    support: Tensor | None = None  # number of nonzero weights, if slope has other zeros than w


def peaks(s: Tensor, form_rule: Rule, tokens: Tokens) -> Tensor | None:
    """The largest score of each row, (rows,); None if A(s) is computed from s itself.

    The sink if all scores are −∞.
    """
    if form_rule.normalize == "none" or (
        form_rule.normalize == "sum" and not form_rule.activation.exponential
    ):
        return None
    peak, sink = tokens.shard.max(s.amax(-1)), tokens.vectors.sink
    return peak if sink is None else torch.where(peak == NEG_INF, sink, peak)


def potential(
    s: Tensor, form_rule: Rule, tokens: Tokens, peak: Tensor | None, by_shape: bool
) -> Potential:
    """A of rows of scores s − peak, which are −∞ where hidden. Overwrites s.

    A is over all classes, its gradient over those of this process.

    peak: from `peaks`. The rows must be relative to it.
    by_shape: whether a threshold's derivative by ``shape`` is wanted. It takes many passes.
    """
    if peak is None:
        evaluate = _elementwise if form_rule.normalize == "none" else _sum
        return evaluate(s, form_rule.activation, tokens)
    if form_rule.normalize == "threshold":
        result = _threshold(s, form_rule.activation, tokens, by_shape)
    elif form_rule.normalize == "select":
        result = _selected(s, form_rule.keep, tokens)
    else:
        sink = tokens.vectors.sink
        result = _exponential(s, None if sink is None else sink - peak, tokens.shard)
    assert result.statistic is not None
    return result._replace(statistic=result.statistic + peak)


def _exponential(s: Tensor, sink: Tensor | None, shard: ClassShard) -> Potential:
    """For rows whose largest score is 0. ``sink`` is relative to it and may be above."""
    z = shard.sum(s.exp_().sum(-1))
    lse = z.log()
    if sink is None:
        return Potential(lse, s, 1 / z, {}, lse, 1 / z)
    # Σ exp(s) relative to a far larger sink would underflow, and exp(sink) would overflow.
    top = sink.clamp(min=0)
    down, extra = (-top).exp(), (sink - top).exp()
    total = z * down + extra
    value = top + total.log()
    return Potential(value, s, down / total, {"sink": extra / total}, lse, 1 / z)


def _selected(s: Tensor, keep: int | None, tokens: Tokens) -> Potential:
    """For rows whose largest score is 0."""
    assert keep is not None
    shard, target = tokens.shard, tokens.column
    values, top = shard.largest(s, keep)
    # The target comes last, with score −∞ if it is in ``top`` already.
    twice = (top == target).any(-1, keepdim=True)
    classes = torch.cat([top, target], 1)
    x = torch.cat([values, shard.at(s, target).masked_fill_(twice, NEG_INF)], 1)
    result = _exponential(x, None, ALL_CLASSES)
    return result._replace(slope=shard.add_at(s.zero_(), classes, result.slope))


def _sum(s: Tensor, phi: Activation, tokens: Tokens) -> Potential:
    shape, sink, shard = tokens.shape, tokens.vectors.sink, tokens.shard
    value = tokens.visible(phi.value(s.clone(), shape))
    slope = tokens.visible(phi.slope(s, value, shape))
    z = shard.sum(value.sum(-1))
    by_shape = None
    if phi.shape_slope is not None:
        by_shape = shard.sum(tokens.visible(phi.shape_slope(s, value, shape)).sum(-1))
    by_vector = {}
    if sink is not None:
        at = sink[:, None]
        extra = phi.value(at.clone(), shape)
        z = z + extra[:, 0]
        by_vector["sink"] = phi.slope(at, extra, shape)[:, 0] / z
        if by_shape is not None and phi.shape_slope is not None:
            by_shape = by_shape + phi.shape_slope(at, extra, shape)[:, 0]
    if by_shape is not None:
        by_vector["shape"] = by_shape / z
    support = shard.sum((value != 0).sum(-1))
    return Potential(z.log(), slope, 1 / z, by_vector, support=support)


def _elementwise(s: Tensor, phi: Activation, tokens: Tokens) -> Potential:
    assert phi.integral is not None
    assert tokens.vectors.offset is not None
    s.sub_(tokens.vectors.offset[:, None])
    area = tokens.shard.sum(tokens.visible(phi.integral(s, tokens.shape)).sum(-1))
    w = tokens.visible(phi.value(s, tokens.shape))
    return Potential(area, w, None, {"offset": -tokens.shard.sum(w.sum(-1))})


def _threshold(s: Tensor, phi: Activation, tokens: Tokens, by_shape: bool) -> Potential:
    """For rows whose largest score is 0."""
    shape, shard = tokens.shape, tokens.shard
    columns = _candidates(s, phi, shape)
    if columns is None:
        return _solve(s, phi, shape, by_shape, shard)
    result = _solve(s.gather(1, columns), phi, shape, by_shape, shard)
    return result._replace(slope=s.zero_().scatter_(1, columns, result.slope))


def _candidates(s: Tensor, phi: Activation, shape: Tensor | None) -> Tensor | None:
    """Columns of each row outside of which all weights are 0. None means all columns.

    The threshold of some scores is at most the threshold of all scores. So the largest maxima of
    groups of classes give a lower bound of τ. A group can be left out if its maximum has weight 0
    with this bound as τ. On a GPU none is left out, because the host would wait for their number.
    """
    size = s.shape[1] // GROUP  # the number of groups; class j is in group j modulo size
    if size <= FIRST or not is_cpu(s.device):
        return None
    maxima = s[:, : size * GROUP].unflatten(1, (GROUP, size)).amax(1)
    first = maxima.topk(FIRST, dim=-1, sorted=False).values
    peak = first.amax(-1, keepdim=True)
    bound = peak + ALL_CLASSES.threshold(first - peak, shape, phi)[:, None]
    # Written as "not == 0" so that NaN counts as a weight.
    count = int((~(phi.value(maxima - bound, shape) == 0)).sum(-1).max())
    if 2 * count > size:
        return None
    groups = maxima.topk(max(count, 1), dim=-1, sorted=False).indices
    members = torch.arange(GROUP, device=s.device)[:, None] * size
    columns = (groups[:, None] + members).flatten(1)
    ungrouped = torch.arange(size * GROUP, s.shape[1], device=s.device)
    return torch.cat([columns, ungrouped.expand(len(s), -1)], 1)


def _solve(
    x: Tensor, phi: Activation, shape: Tensor | None, by_shape: bool, shard: ClassShard
) -> Potential:
    """The `Potential` of "threshold", for rows whose largest score is 0."""
    tau = shard.threshold(x, shape, phi)
    at = x - tau[:, None]
    if phi.alpha is None:
        assert phi.integral is not None
        value = tau + shard.sum(phi.integral(at, shape).sum(-1)) - _single(x, phi, shape)
        return Potential(value, phi.value(at, shape), None, {}, tau)
    if not by_shape:
        w = phi.value(at, shape)
        if isinstance(phi.alpha, float):
            alpha, power_sum = phi.alpha, shard.sum(w.pow(phi.alpha).sum(-1))
        else:
            assert shape is not None
            alpha, power_sum = shape[:, 0], shard.sum(w.pow(shape).sum(-1))
        return Potential(tau - (1 - power_sum) / alpha, w, None, {}, tau, power_sum=power_sum)
    assert shape is not None
    alpha, w = shape[:, 0], phi.value(at.clone(), shape)
    # ∂A/∂α at fixed τ, because ∂A/∂τ = 0.
    step = max(1, POWERS // max(x.shape[1], 1))
    parts = zip(at.split(step), w.split(step), shape.split(step))
    power_sum, by_alpha = (shard.sum(torch.cat(x)) for x in zip(*(_powers(phi, *p) for p in parts)))
    slope = (1 - power_sum) / alpha**2 + by_alpha / alpha
    value = tau - (1 - power_sum) / alpha
    return Potential(value, w, None, {"shape": slope}, tau, power_sum=power_sum)


def _powers(phi: Activation, x: Tensor, w: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Σ φ^α and its derivative by α, for φ = ``w`` at x."""
    assert phi.shape_slope is not None
    power = w.pow(alpha - 1)
    # ∂(φ^α)/∂α = φ^α log φ + α φ^{α−1} ∂φ/∂α
    by_alpha = power * (torch.xlogy(w, w) + alpha * phi.shape_slope(x, w, alpha))
    return (w * power).sum(-1), by_alpha.sum(-1)


def _single(x: Tensor, phi: Activation, shape: Tensor | None) -> Tensor:
    """τ + ∫φ for a single class with score 0, whose weight is 1."""
    assert phi.integral is not None
    alone = torch.zeros_like(x[:, :1])
    tau = ALL_CLASSES.threshold(alone, shape, phi)
    return tau + phi.integral(-tau[:, None], shape)[:, 0]
