"""The loss of a form for some tokens, and its gradient, from their logits.

    L = m·A(s) − Σ_j a_j ℓ(s_j) + λ·lse²,  s = gain · softcap(z)

With class weights u and smoothing ε over the K visible classes, the target distribution is
a_j = u_j·((1 − ε)[j = y] + ε/K), and m = Σ_j a_j. A threshold's loss has the additional constant
m·Ω(a/m), Ω(p) = (Σ p^α − 1)/(α(α − 1)), which makes the smallest loss 0. See `potentials`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.core.activation import Activation
from attnzoo.losses.potentials import Potential, peaks, potential
from attnzoo.losses.rules import NEG_INF, Options, Tokens, rule


class _Target(NamedTuple):
    """The target distribution of a token: ``spread`` · ``u``, plus ``share`` at the target."""

    share: Tensor  # [n, 1]
    spread: Tensor | None  # [n, 1]; None without smoothing
    u: Tensor | None  # [1|n, K], 0 where hidden; None without smoothing
    total: Tensor  # [n, 1], m


class _Linear(NamedTuple):
    """Σ_j a_j ℓ(s_j) of each row, and its derivatives."""

    value: Tensor  # [n]
    target_slope: Tensor  # [n, 1], by the target's score
    spread_slope: Tensor | None  # [n, K], by all scores, for the part a_j = spread · u
    by_vector: dict[str, Tensor]


@rule
def form_loss(z: Tensor, tokens: Tokens, wanted: list[str], options: Options) -> dict[str, Tensor]:
    """The rule of the losses above."""
    form_rule, softcap = options.form_rule, options.softcap
    if tokens.hidden is not None:  # the logits of hidden classes may be NaN
        z.masked_fill_(tokens.hidden, 0.0)
    cap_slope = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        cap_slope = z.square().neg_().add_(1) if wanted else None
        z.mul_(softcap)
    # A class with logit −∞ has weight 0, and so no part in the gradient of the gain.
    capped = z.masked_fill(z == NEG_INF, 0.0) if "gain" in wanted else None
    gain = None if tokens.vectors.gain is None else tokens.vectors.gain[:, None]
    if gain is not None:
        z.mul_(gain)
    if tokens.hidden is not None:
        z.masked_fill_(tokens.hidden, NEG_INF)
    scores = tokens.shard.at(z, tokens.column)  # of the targets, [n, 1]
    a = _target(tokens, options.label_smoothing, z)
    peak = peaks(z, form_rule, tokens)
    relative = scores if peak is None else scores - peak[:, None]
    if peak is not None:
        z.sub_(peak[:, None])
    linear = _of_log_values if form_rule.normalize == "sum" and peak is None else _of_scores
    ell = linear(z, relative, a, form_rule.activation, tokens)
    result = potential(z, form_rule, tokens, peak, "shape" in wanted)
    loss = a.total[:, 0] * result.value - ell.value
    by_vector = {name: a.total[:, 0] * x for name, x in result.by_vector.items()}
    for name, x in ell.by_vector.items():
        by_vector[name] = by_vector.get(name, 0) - x
    if form_rule.normalize == "threshold" and a.spread is not None:
        constant, by_shape = _omega(a, tokens, form_rule.activation)
        loss = loss + constant
        if by_shape is not None and "shape" in by_vector:
            by_vector["shape"] = by_vector["shape"] + by_shape
    scale = a.total if result.scale is None else a.total * result.scale[:, None]
    if options.lse_penalty:
        lse, lse_scale = result.statistic, result.lse_scale
        assert lse is not None
        assert lse_scale is not None
        loss = loss + options.lse_penalty * lse**2
        scale = scale + (2 * options.lse_penalty * lse * lse_scale)[:, None]
    outputs = {"loss": loss}
    if options.want_stats:
        outputs |= _statistics(result, scores, tokens)
    if not wanted:
        return outputs
    factor = tokens.factor
    slope = result.slope.mul_(scale * factor[:, None])
    tokens.shard.add_at(slope, tokens.column, -factor[:, None] * ell.target_slope)
    if ell.spread_slope is not None:
        slope.addcmul_(ell.spread_slope, factor[:, None], value=-1)
    if "gain" in wanted:
        outputs["gain"] = tokens.shard.sum(torch.linalg.vecdot(slope, capped))
    for name in ("offset", "shape", "sink"):
        if name in wanted:
            outputs[name] = factor * by_vector[name]
    if gain is not None:
        slope.mul_(gain)
    if cap_slope is not None:
        slope.mul_(cap_slope)
    if slope is not z:
        z.copy_(slope)
    return outputs


def _target(tokens: Tokens, smoothing: float, z: Tensor) -> _Target:
    weight, shard = tokens.class_weight, tokens.shard
    share = z.new_ones(tokens.column.shape) if weight is None else weight[tokens.target][:, None]
    share = share * (1 - smoothing)
    if not smoothing:
        return _Target(share, None, None, share)
    ones = z.new_ones(1, z.shape[1])
    u = tokens.visible(ones if weight is None else shard.local(weight)[None])
    number = shard.sum(tokens.visible(ones).sum(-1, keepdim=True))
    spread = (smoothing / number).expand_as(share)
    return _Target(share, spread, u, share + spread * shard.sum(u.sum(-1, keepdim=True)))


def _of_scores(s: Tensor, scores: Tensor, a: _Target, phi: Activation, tokens: Tokens) -> _Linear:
    """Σ_j a_j s_j − m · offset. Its derivative by the scores is a."""
    value, spread_slope = a.share * scores, None
    if a.spread is not None:
        assert a.u is not None
        weighted = tokens.visible(s) * a.u
        value = value + a.spread * tokens.shard.sum(weighted.sum(-1, keepdim=True))
        spread_slope = a.spread * a.u
    by_vector = {}
    if tokens.vectors.offset is not None:
        value = value - a.total * tokens.vectors.offset[:, None]
        by_vector["offset"] = -a.total[:, 0]
    return _Linear(value[:, 0], a.share, spread_slope, by_vector)


def _of_log_values(
    s: Tensor, scores: Tensor, a: _Target, phi: Activation, tokens: Tokens
) -> _Linear:
    """Σ_j a_j log φ(s_j)."""
    shape, shard = tokens.shape, tokens.shard
    value, slope, by_shape = _log(phi, scores, shape)
    # Targets are not checked on a GPU or under torch.compile. A masked target has weight 0.
    if tokens.hidden is not None:
        hidden = shard.at(tokens.hidden.expand(s.shape), tokens.column)
        value, slope = value.masked_fill(hidden, NEG_INF), slope.masked_fill(hidden, 0.0)
    total, target_slope, spread_slope = a.share * value, a.share * slope, None
    total_by_shape = None if by_shape is None else a.share * by_shape
    if a.spread is not None:
        assert a.u is not None
        value, slope, by_shape = _log(phi, tokens.visible(s), shape)
        share = a.spread * a.u
        total = total + shard.sum((share * value).sum(-1, keepdim=True))
        spread_slope = share * slope
        if by_shape is not None and total_by_shape is not None:
            spread_by_shape = shard.sum((share * by_shape).sum(-1, keepdim=True))
            total_by_shape = total_by_shape + spread_by_shape
    by_vector = {} if total_by_shape is None else {"shape": total_by_shape[:, 0]}
    return _Linear(total[:, 0], target_slope, spread_slope, by_vector)


def _log(phi: Activation, s: Tensor, shape: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """log φ(s) and its derivatives by s and by shape."""
    value = phi.value(s.clone(), shape)
    by_shape = None
    if phi.shape_slope is not None:
        by_shape = phi.shape_slope(s, value, shape) / value
    return value.log(), phi.slope(s.clone(), value, shape) / value, by_shape


def _omega(a: _Target, tokens: Tokens, phi: Activation) -> tuple[Tensor, Tensor | None]:
    """m·Ω(a/m) and its derivative by α. Without smoothing both are 0."""
    assert a.u is not None
    assert a.spread is not None
    shape, shard = tokens.shape, tokens.shard
    alpha: Any = phi.alpha if shape is None else shape
    p = a.spread * a.u
    p = p + shard.add_at(torch.zeros_like(p), tokens.column, a.share)
    p = p / a.total.masked_fill(a.total == 0, 1.0)  # m·Ω(a/m) is 0 at m = 0
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    # Σ p^α − 1 = Σ p (p^{α−1} − 1), because Σ p = 1. This is accurate as α → 1.
    excess = shard.sum((p * torch.expm1((alpha - 1) * log_p)).sum(-1, keepdim=True))
    value = excess / (alpha * (alpha - 1))
    if shape is None:
        return (a.total * value)[:, 0], None
    by_power = shard.sum((p.pow(alpha) * log_p).sum(-1, keepdim=True))
    slope = (by_power - value * (2 * alpha - 1)) / (alpha * (alpha - 1))
    return (a.total * value)[:, 0], (a.total * slope)[:, 0]


def _statistics(result: Potential, scores: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    support = result.support
    if support is None:
        support = tokens.shard.sum((result.slope != 0).sum(-1))
    stats = {"target_score": scores[:, 0], "support": support}
    for name in ("statistic", "power_sum"):
        if (x := getattr(result, name)) is not None:
            stats[name] = x
    return stats
