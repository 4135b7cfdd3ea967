"""The potential A(s) of a form and its gradient, for rows of scores over all classes.

The loss of a token is m·A(s) − Σ_j a_j ℓ(s_j) for a target distribution a with sum m. The gradient
of A is the variant's weights w, except for "sum" with φ ≠ exp.

============  ==============================  ============
normalize     A(s)                            ℓ(s)
============  ==============================  ============
"sum", exp    log(Σ exp(s) + exp(sink))       s
"sum"         log(Σ φ(s) + φ(sink))           log φ(s)
"threshold"   τ + Σ ∫φ(s − τ) − C             s
"none"        Σ ∫φ(s − offset)                s − offset
"select"      log Σ exp(s), kept and target   s
============  ==============================  ============

∫φ(x) is the integral from −∞ to x. C makes the loss of a single class 0. For a q-exponential ∫φ is
φ^α/α, and A of a threshold is τ − (1 − Σ w^α)/α (Blondel et al. 2020, arXiv:1901.02324, who use
other units).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Vectors
from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.backends.tiled.walk import Normalizer, kept
from attnzoo.core.activations import Activation

NEG_INF = float("-inf")
# The threshold of a row is first sought among this many of its largest scores. Usually all others
# have weight 0, and then no further pass over the row is needed.
CANDIDATES = 1024


class Potential(NamedTuple):
    """A(s) of rows, its gradient and what else is known of them; each (rows,) but ``slope``."""

    value: Tensor
    slope: Tensor  # [rows, V], 0 where hidden; slope · scale = ∂A/∂s
    scale: Tensor | None  # None is 1
    by_vector: dict[str, Tensor]  # ∂A/∂ of each per-token vector
    statistic: Tensor | None = None  # lse without the sink, or τ
    lse_scale: Tensor | None = None  # slope · lse_scale = ∂lse/∂s
    power_sum: Tensor | None = None  # Σ w^α


def potential(
    s: Tensor, how: Normalizer, vectors: Vectors, hidden: Tensor | None, target: Tensor
) -> Potential:
    """A of rows of scores s, which are −∞ where ``hidden``. Overwrites s."""
    shape = None if vectors.shape is None else vectors.shape[:, None]
    if how.normalize == "threshold":
        return _threshold(s, how.activation, shape)
    if how.normalize == "none":
        assert vectors.offset is not None
        return _elementwise(s, how.activation, shape, vectors.offset[:, None], hidden)
    if how.normalize == "select":
        keep = kept(s, how.keep).scatter_(1, target[:, None], True)
        return _exponential(s.masked_fill_(~keep, NEG_INF), None)
    if how.activation.exponential:
        return _exponential(s, vectors.sink)
    return _sum(s, how.activation, shape, vectors.sink, hidden)


def _exponential(s: Tensor, sink: Tensor | None) -> Potential:
    peak = s.amax(-1)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    z = s.sub_(peak[:, None]).exp_().sum(-1)
    lse = peak + z.log()
    if sink is None:
        return Potential(lse, s, 1 / z, {}, lse, 1 / z)
    whole = z + (sink - peak).exp()
    value = peak + whole.log()
    return Potential(value, s, 1 / whole, {"sink": (sink - value).exp()}, lse, 1 / z)


def _sum(
    s: Tensor, phi: Activation, shape: Tensor | None, sink: Tensor | None, hidden: Tensor | None
) -> Potential:
    value = _zero(phi.value(s.clone(), shape), hidden)
    slope = _zero(phi.slope(s, value, shape), hidden)
    z = value.sum(-1)
    by_shape = None
    if phi.shape_slope is not None:
        by_shape = _zero(phi.shape_slope(s, value, shape), hidden).sum(-1)
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
    return Potential(z.log(), slope, 1 / z, by_vector)


def _elementwise(
    s: Tensor, phi: Activation, shape: Tensor | None, offset: Tensor, hidden: Tensor | None
) -> Potential:
    assert phi.integral is not None
    s.sub_(offset)
    area = _zero(phi.integral(s, shape), hidden).sum(-1)
    w = _zero(phi.value(s, shape), hidden)
    return Potential(area, w, None, {"offset": -w.sum(-1)})


def _threshold(s: Tensor, phi: Activation, shape: Tensor | None) -> Potential:
    peak = s.amax(-1, keepdim=True)
    s.sub_(peak)
    if s.shape[-1] <= 2 * CANDIDATES:
        found = _solve(s, phi, shape)
    else:
        found = _solve_by_candidates(s, phi, shape)
    value, tau = found.value + peak[:, 0], found.statistic + peak[:, 0]  # type: ignore[operator]
    return found._replace(value=value, statistic=tau)


def _solve_by_candidates(x: Tensor, phi: Activation, shape: Tensor | None) -> Potential:
    top, places = x.topk(CANDIDATES, dim=-1, sorted=False)
    found = _solve(top, phi, shape)
    assert found.statistic is not None
    # If the smallest candidate has weight 0 at this τ, so has every score outside. Written as
    # "not == 0" so that rows with NaN are solved again.
    least = phi.value(top.amin(-1, keepdim=True) - found.statistic[:, None], shape)[:, 0]
    wide = (~(least == 0)).nonzero()[:, 0]
    if len(wide) == len(x):
        return _solve(x, phi, shape)
    whole = None
    if len(wide):
        whole = _solve(x[wide], phi, None if shape is None else shape[wide])
    slope = x.zero_().scatter_(1, places, found.slope)
    if whole is None:
        return found._replace(slope=slope)
    slope[wide] = whole.slope

    def merged(name: str) -> Tensor | None:
        narrow = getattr(found, name)
        return None if narrow is None else narrow.index_copy(0, wide, getattr(whole, name))

    by_vector = {
        name: narrow.index_copy(0, wide, whole.by_vector[name])
        for name, narrow in found.by_vector.items()
    }
    value = found.value.index_copy(0, wide, whole.value)
    return Potential(
        value, slope, None, by_vector, merged("statistic"), power_sum=merged("power_sum")
    )


def _solve(x: Tensor, phi: Activation, shape: Tensor | None) -> Potential:
    """A of rows whose largest score is 0."""
    tau = solve_threshold(x, None if shape is None else shape[:, 0], phi)
    at = x - tau[:, None]
    if phi.alpha is None:
        assert phi.integral is not None
        value = tau + phi.integral(at, shape).sum(-1) - _single(x, phi, shape)
        return Potential(value, phi.value(at, shape), None, {}, tau)
    if phi.shape_slope is None:
        assert isinstance(phi.alpha, float)
        w = phi.value(at, shape)
        power_sum = w.pow(phi.alpha).sum(-1)
        return Potential(tau - (1 - power_sum) / phi.alpha, w, None, {}, tau, power_sum=power_sum)
    assert shape is not None
    alpha, w = shape[:, 0], phi.value(at.clone(), shape)
    power = w.pow(shape - 1)
    power_sum = (w * power).sum(-1)
    # ∂A/∂α at fixed τ, because ∂A/∂τ = 0. ∂(φ^α)/∂α = φ^α log φ + α φ^{α−1} ∂φ/∂α.
    by_power = power * (torch.xlogy(w, w) + shape * phi.shape_slope(at, w, shape))
    by_shape = (1 - power_sum) / alpha**2 + by_power.sum(-1) / alpha
    value = tau - (1 - power_sum) / alpha
    return Potential(value, w, None, {"shape": by_shape}, tau, power_sum=power_sum)


def _single(x: Tensor, phi: Activation, shape: Tensor | None) -> Tensor:
    """τ + ∫φ for a single class with score 0, whose weight is 1."""
    assert phi.integral is not None
    alone = torch.zeros_like(x[:, :1])
    tau = solve_threshold(alone, None if shape is None else shape[:, 0], phi)
    return tau + phi.integral(-tau[:, None], shape)[:, 0]


def _zero(x: Tensor, hidden: Tensor | None) -> Tensor:
    return x if hidden is None else x.masked_fill(hidden, 0.0)
