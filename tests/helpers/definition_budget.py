"""Error bounds of weights that have a definition only. See `error_budget` for the assumed errors.

A class here has the interface of `Weights`, and ``scores``: a function of the parameters that gives
a form with the variant's scores. These scores with their errors are given; the weights and the
gradient of the scores are computed as the variant's definition and autograd compute them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.special import log_ndtr

from attnzoo.core.activations import EXP
from attnzoo.core.forms import Pairwise
from attnzoo.variants.perturb_max import LAST, POINTS, first_point
from helpers.approx import Approx
from helpers.weights_budget import EVALUATION, cumulated, largest, shifted

if TYPE_CHECKING:
    from helpers.error_budget import Problem


def logits(params: dict[str, Any]) -> Pairwise:
    """A form whose scores are the logits plus the bias."""
    return Pairwise(EXP, "sum")


def flipped(x: Approx) -> Approx:
    return Approx(x.value.flip(-1), x.error.flip(-1), x.eps)


class StickBreakingWeights:
    """σ(s_ij) · Π (1 − σ(s_il)) over the keys l between j and i, as e to a sum of logarithms."""

    scores = staticmethod(logits)

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        self.fused = problem.backend not in ("eager", "tiled")
        earlier = visible & (problem.call.distance > 0)
        log_share = s.map(logsigmoid, EVALUATION, 1 + s.value.abs())
        left = (-s).map(logsigmoid, EVALUATION, 1 + s.value.abs()).where(earlier)
        after = flipped(shifted(cumulated(flipped(left)), (1, -1)))
        log = (log_share + after).where(earlier)
        size = log.value.exp() * (1 + log.value.abs())
        self.w = log.map(torch.exp, EVALUATION, size).where(earlier)
        self.share = s.map(torch.sigmoid, EVALUATION, torch.sigmoid(s.value)).where(earlier)
        self.complement = (
            (-s).map(torch.sigmoid, EVALUATION, torch.sigmoid(-s.value)).where(earlier)
        )
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """(1 − σ_j) w_j dP_j − σ_j Σ_{l before j} w_l dP_l.

        Kernels compute w_j dP_j − σ_j Σ with j in the sum, so errors of w_j dP_j stay where σ_j is
        near 1.
        """
        dlog = self.w * dp
        if self.fused:
            return dlog - self.share * cumulated(dlog)
        return dlog * self.complement - self.share * shifted(cumulated(dlog), (1, -1))

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        return {}


RULE_ERROR = {torch.float32: 1e-12, torch.float64: 1e-14}


class PerturbMaxWeights:
    """h · Σ_t φ(t − x_j) Π_{l ≠ j} Φ(t − x_l), with x the scores relative to the row maximum.

    The result does not depend on the points t, up to the error of the rule. For up to 500 keys,
    this error is below `RULE_ERROR`; fp32 has fewer points.
    """

    @staticmethod
    def scores(params: dict[str, Any]) -> Pairwise:
        """A form whose scores are z / std plus the bias."""
        return Pairwise(EXP, "sum", gain=1 / params["std"])

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        self.visible = visible
        peak = s.value.masked_fill(~visible, float("-inf"))
        peak = peak.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        size = s.value.abs() + largest(s.value)
        self.x = replace(s, value=s.value - peak).rounded(1, size).where(visible)
        self.first = first_point(self.x.value, problem.call)
        self.points, self.rule = POINTS[torch.float64], RULE_ERROR[problem.accumulator]
        self.step = problem.exact((LAST - self.first) / (self.points - 1))
        w = self.step * summed([term for term, _, _ in self.terms()])
        self.w = Approx(w.value, w.error + self.rule, w.eps).where(visible)
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def terms(self) -> Iterator[tuple[Approx, Approx, Approx]]:
        """For each point t: the term of the sum, t − x, and the derivative of log Φ there."""
        root = 0.5 * math.log(2 * math.pi)
        for i in range(self.points):
            ahead = replace(self.x, value=self.first + i * self.step.value - self.x.value)
            # t itself is rounded alike for all keys, which only moves the point.
            ahead = ahead.rounded(1, ahead.value)
            below = ahead.map(log_ndtr, EVALUATION, log_ndtr(ahead.value)).where(self.visible)
            density = ahead.map(lambda a: -a * a / 2 - root, 3, ahead.value.square() + root)
            log = density + below.sum(-1, keepdim=True) - below
            size = log.value.exp() * (1 + log.value.abs())
            steep = slope(ahead.value) * (1 + ahead.value.abs())
            yield (
                log.map(torch.exp, EVALUATION, size).where(self.visible),
                ahead,
                ahead.map(slope, EVALUATION, steep).where(self.visible),
            )

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """h · Σ_t [dP_j T_j (t − x_j) − (log Φ)'_j Σ_{l ≠ j} dP_l T_l]."""
        parts = []
        for term, ahead, steep in self.terms():
            weighted = dp * term
            parts.append(weighted * ahead - steep * (weighted.sum(-1, keepdim=True) - weighted))
        ds = self.step * summed(parts)
        return replace(ds, error=ds.error + self.rule * dp.value.abs().sum(-1, keepdim=True))

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        return {}


def summed(parts: list[Approx]) -> Approx:
    value, error, size = (
        torch.stack(list(x)).sum(0)
        for x in zip(*((part.value, part.error, part.value.abs()) for part in parts), strict=True)
    )
    return Approx(value, error, parts[0].eps).rounded(len(parts) / 2, size)


def slope(x: Tensor) -> Tensor:
    """(log Φ)'(x) = φ(x) / Φ(x)."""
    return (-x * x / 2 - log_ndtr(x)).exp() / math.sqrt(2 * math.pi)
