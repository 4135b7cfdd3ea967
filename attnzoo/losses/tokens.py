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

from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.tiled.walk import Normalizer
from attnzoo.core.activations import Activation
from attnzoo.losses.classes import WHOLE, ClassShard
from attnzoo.losses.potentials import NEG_INF, Potential, peaks, potential

VECTORS = ("gain", "offset", "shape", "sink")


class Options(NamedTuple):
    """Settings of a loss that are the same for all tokens."""

    softcap: float | None
    label_smoothing: float
    lse_penalty: float
    want_stats: bool


class Tokens(NamedTuple):
    """Operands with one entry per token, for the tokens of one chunk or block.

    K is the number of classes in this process, usually all V.
    """

    target: Tensor  # [n]
    factor: Tensor  # [n], multiplies the gradient, not the loss
    hidden: Tensor | None  # bool [1|n, K]
    vectors: Vectors  # each [n]
    shard: ClassShard = WHOLE

    def rows(self, part: slice) -> Tokens:
        hidden = self.hidden
        if hidden is not None and len(hidden) > 1:
            hidden = hidden[part]
        vectors = Vectors(*(None if x is None else x[part] for x in self.vectors))
        target, factor = self.target[part], self.factor[part]
        return Tokens(target, factor, hidden, vectors, self.shard)


class _Target(NamedTuple):
    """The target distribution of a token: ``spread`` · ``u``, plus ``own`` at the target."""

    own: Tensor  # [n, 1]
    spread: Tensor | None  # [n, 1]; None without smoothing
    u: Tensor | None  # [1|n, K], 0 where hidden; None without smoothing
    total: Tensor  # [n, 1], m


def form_losses(
    z: Tensor, tokens: Tokens, wanted: list[str], how: Normalizer, class_weight: Tensor | None,
    options: Options,
) -> dict[str, Tensor]:  # fmt: skip
    """`chunks.Rule` of the losses above."""
    if tokens.hidden is not None:  # the logits of hidden classes may be NaN
        z.masked_fill_(tokens.hidden, 0.0)
    cap_slope = None
    if options.softcap is not None:
        z.div_(options.softcap).tanh_()
        cap_slope = z.square().neg_().add_(1) if wanted else None
        z.mul_(options.softcap)
    # A class with logit −∞ has weight 0, and so no part in the gradient of the gain.
    capped = z.masked_fill(z == NEG_INF, 0.0) if "gain" in wanted else None
    gain = None if tokens.vectors.gain is None else tokens.vectors.gain[:, None]
    if gain is not None:
        z.mul_(gain)
    if tokens.hidden is not None:
        z.masked_fill_(tokens.hidden, NEG_INF)
    column, shard = tokens.target[:, None], tokens.shard
    scores = shard.at(z, column)  # of the targets, [n, 1]
    a = _target(tokens, class_weight, options.label_smoothing, z)
    peak = peaks(z, how, tokens.vectors.sink, shard)
    if peak is None:
        relative = scores
    else:
        relative = scores - peak[:, None]
        z.sub_(peak[:, None])
    linear = _LogValues if _has_log_values(how) else _Scores
    ell = linear(z, relative, a, how, tokens)
    found = potential(
        z, how, tokens.vectors, tokens.hidden, tokens.target, "shape" in wanted, peak, shard
    )
    loss = a.total[:, 0] * found.value - ell.value
    by_vector = {name: a.total[:, 0] * x for name, x in found.by_vector.items()}
    for name, x in ell.by_vector.items():
        by_vector[name] = by_vector.get(name, 0) - x
    if how.normalize == "threshold" and a.spread is not None:
        constant, slope = _omega(a, tokens, how.activation)
        loss = loss + constant
        if slope is not None and "shape" in by_vector:
            by_vector["shape"] = by_vector["shape"] + slope
    scale = a.total if found.scale is None else a.total * found.scale[:, None]
    if options.lse_penalty:
        assert found.statistic is not None
        assert found.lse_scale is not None
        loss = loss + options.lse_penalty * found.statistic**2
        scale = scale + (2 * options.lse_penalty * found.statistic * found.lse_scale)[:, None]
    result = {"loss": loss}
    if options.want_stats:
        result |= _statistics(found, scores, shard)
    if not wanted:
        return result
    factor = tokens.factor
    slope = found.slope.mul_(scale * factor[:, None])
    shard.add_at(slope, column, -factor[:, None] * ell.target_slope)
    if ell.spread_slope is not None:
        slope.addcmul_(ell.spread_slope, factor[:, None], value=-1)
    if "gain" in wanted:
        result["gain"] = shard.sum(torch.linalg.vecdot(slope, capped))
    for name in ("offset", "shape", "sink"):
        if name in wanted:
            result[name] = factor * by_vector[name]
    if gain is not None:
        slope.mul_(gain)
    if cap_slope is not None:
        slope.mul_(cap_slope)
    if slope is not z:
        z.copy_(slope)
    return result


def _target(tokens: Tokens, weight: Tensor | None, smoothing: float, z: Tensor) -> _Target:
    column, shard = tokens.target[:, None], tokens.shard
    own = z.new_ones(column.shape) if weight is None else weight[tokens.target][:, None]
    own = own * (1 - smoothing)
    if not smoothing:
        return _Target(own, None, None, own)
    u = z.new_ones(1, z.shape[1]) if weight is None else shard.own(weight)[None]
    visible = z.new_ones(1, z.shape[1])
    if tokens.hidden is not None:
        u, visible = u * ~tokens.hidden, visible * ~tokens.hidden
    spread = (smoothing / shard.sum(visible.sum(-1, keepdim=True))).expand_as(own)
    return _Target(own, spread, u, own + spread * shard.sum(u.sum(-1, keepdim=True)))


def _has_log_values(how: Normalizer) -> bool:
    return how.normalize == "sum" and not how.activation.exponential


class _Scores:
    """Σ_j a_j s_j − m · offset. Its derivative by the scores is a."""

    def __init__(
        self, s: Tensor, scores: Tensor, a: _Target, how: Normalizer, tokens: Tokens
    ) -> None:
        value = a.own * scores
        self.target_slope, self.spread_slope = a.own, None
        if a.spread is not None:
            assert a.u is not None
            finite = s if tokens.hidden is None else s.masked_fill(tokens.hidden, 0.0)
            value = value + a.spread * tokens.shard.sum((finite * a.u).sum(-1, keepdim=True))
            self.spread_slope = a.spread * a.u
        self.by_vector: dict[str, Tensor] = {}
        if tokens.vectors.offset is not None:
            value = value - a.total * tokens.vectors.offset[:, None]
            self.by_vector["offset"] = -a.total[:, 0]
        self.value = value[:, 0]


class _LogValues:
    """Σ_j a_j log φ(s_j)."""

    def __init__(
        self, s: Tensor, scores: Tensor, a: _Target, how: Normalizer, tokens: Tokens
    ) -> None:
        phi = how.activation
        shape = None if tokens.vectors.shape is None else tokens.vectors.shape[:, None]
        value, slope, by_shape = _log(phi, scores, shape)
        # Targets are not checked on a GPU or under torch.compile. A masked target has weight 0.
        if tokens.hidden is not None:
            hidden = tokens.shard.at(tokens.hidden.expand(s.shape), tokens.target[:, None])
            value, slope = value.masked_fill(hidden, NEG_INF), slope.masked_fill(hidden, 0.0)
        total, by_vector = a.own * value, None if by_shape is None else a.own * by_shape
        self.target_slope, self.spread_slope = a.own * slope, None
        if a.spread is not None:
            assert a.u is not None
            finite = s if tokens.hidden is None else s.masked_fill(tokens.hidden, 0.0)
            value, slope, by_shape = _log(phi, finite, shape)
            share = a.spread * a.u
            total = total + tokens.shard.sum((share * value).sum(-1, keepdim=True))
            self.spread_slope = share * slope
            if by_shape is not None and by_vector is not None:
                spread = tokens.shard.sum((share * by_shape).sum(-1, keepdim=True))
                by_vector = by_vector + spread
        self.value = total[:, 0]
        self.by_vector = {} if by_vector is None else {"shape": by_vector[:, 0]}


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
    shape, shard = tokens.vectors.shape, tokens.shard
    alpha: Any = phi.alpha if shape is None else shape[:, None]
    p = a.spread * a.u
    p = p + shard.add_at(torch.zeros_like(p), tokens.target[:, None], a.own)
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


def _statistics(found: Potential, scores: Tensor, shard: ClassShard) -> dict[str, Tensor]:
    support = found.support
    if support is None:
        support = shard.sum((found.slope != 0).sum(-1))
    stats = {"target_score": scores[:, 0], "support": support}
    for name in ("statistic", "power_sum"):
        if (x := getattr(found, name)) is not None:
            stats[name] = x
    return stats
