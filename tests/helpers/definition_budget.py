"""Error bounds of weights that have a definition only. See `error_budget` for the assumed errors.

A class here has the interface of `Weights`. The scores with their errors are given; the weights and
the gradient of the scores are computed as the variant's definition and autograd compute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from attnzoo.core.forms import Pairwise
from helpers.approx import Approx
from helpers.weights_budget import EVALUATION, Weights

if TYPE_CHECKING:
    from helpers.error_budget import Problem


def cumulated(x: Approx) -> Approx:
    """Sums of the entries up to each one, along the last dimension."""
    total = Approx(x.value.cumsum(-1), x.error.cumsum(-1), x.eps)
    return total.rounded(x.shape[-1] / 2, x.value.abs().cumsum(-1))


def flipped(x: Approx) -> Approx:
    return Approx(x.value.flip(-1), x.error.flip(-1), x.eps)


def shifted(x: Approx, places: tuple[int, int]) -> Approx:
    """Zeros at one end, and entries dropped at the other (a negative number)."""
    return Approx(pad(x.value, places), pad(x.error, places), x.eps)


class NucleusWeights(Weights):
    """A softmax over the keys that the definition keeps.

    In a row where a rounding may move a key in or out of the set, every weight may be wrong.
    """

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        share = problem.params["p"]
        whole = Weights(problem, form, s, visible)
        order = s.value.masked_fill(~visible, float("-inf"))
        order = order.sort(stable=True, dim=-1, descending=True).indices
        own = Approx(*(x.gather(-1, order) for x in (whole.w.value, whole.w.error)), s.eps)
        before = shifted(cumulated(own), (1, -1))
        outside = (before.value >= share) & (share < 1)
        dropped = torch.zeros_like(visible).scatter(-1, order, outside)
        super().__init__(problem, form, s.where(~dropped), visible & ~dropped)
        near = (before.value - share).abs() <= before.error
        # Behind the last key the sum is 1 up to rounding, and there is nothing to drop.
        near = (near & (own.value > 0)).any(-1, keepdim=True) & (share < 1)
        for x in (self.phi, self.slope, self.mu, self.mu_slope, self.w, self.dropped):
            x.error.add_(near.to(x.error))


class StickWeights:
    """σ(s_ij) · Π (1 − σ(s_il)) over the keys l between j and i, as e to a sum of logarithms."""

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        earlier = visible & (problem.call.distance > 0)
        own = s.map(logsigmoid, EVALUATION, 1 + s.value.abs())
        left = (-s).map(logsigmoid, EVALUATION, 1 + s.value.abs()).where(earlier)
        after = flipped(shifted(cumulated(flipped(left)), (1, -1)))
        log = (own + after).where(earlier)
        size = log.value.exp() * (1 + log.value.abs())
        self.w = log.map(torch.exp, EVALUATION, size).where(earlier)
        self.share = s.map(torch.sigmoid, EVALUATION, torch.sigmoid(s.value)).where(earlier)
        self.rest = (-s).map(torch.sigmoid, EVALUATION, torch.sigmoid(-s.value)).where(earlier)
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """(1 − σ_j) w_j dP_j − σ_j Σ_{l before j} w_l dP_l."""
        dlog = self.w * dp
        return dlog * self.rest - self.share * shifted(cumulated(dlog), (1, -1))

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        return {}
