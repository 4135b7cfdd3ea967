"""Error bounds of weights: activation, threshold, normalizer and gains from statistics.

See `error_budget` for the assumed errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.forms import FromStatistics, Pairwise, Statistics
from helpers.approx import Approx

if TYPE_CHECKING:
    from helpers.error_budget import Problem

EVALUATION = 8
# The exp in torch's fused CPU kernel has errors up to 20 units in the last place.
EVALUATION_OF = {"sdpa": 20}
SHIFTS = 4
SOLVED = {torch.float32: 2e-6, torch.float64: 1e-12}
FP32 = torch.finfo(torch.float32).eps


def largest(s: Tensor) -> Tensor:
    """The largest absolute value over the last dimension, (..., 1)."""
    return s.abs().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)


def cumulated(x: Approx) -> Approx:
    """Sums of the entries up to each one, along the last dimension."""
    total = Approx(x.value.cumsum(-1), x.error.cumsum(-1), x.eps)
    return total.rounded(x.shape[-1] / 2, x.value.abs().cumsum(-1))


def shifted(x: Approx, padding: tuple[int, int]) -> Approx:
    """Zeros at one end, and entries dropped at the other (a negative number)."""
    return Approx(pad(x.value, padding), pad(x.error, padding), x.eps)


class Weights:
    """The weights w = φ(x)/Z of a pairwise form at x = s − τ, with φ(x), φ'(x) and Z."""

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        self.problem, self.form, self.visible, self.act = problem, form, visible, form.activation
        self.times = EVALUATION_OF.get(problem.backend, EVALUATION)
        self.alpha = None if form.shape is None else problem.vector(form.shape, "shape").value
        peak = torch.zeros_like(s.value[..., :0].sum(-1, keepdim=True))
        if s.shape[-1]:
            peak = s.value.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
            peak = peak.masked_fill(peak == float("-inf"), 0.0)
        self.shift = problem.exact(torch.zeros_like(peak))
        if self.act.shifted:
            self.alpha = peak.clamp(min=0)
        if form.normalize == "threshold" or self.act.exponential:
            self.shift = problem.exact(peak)
        elif form.offset is not None and form.normalize == "none" and form.key_bias is None:
            self.shift = problem.vector(form.offset, "offset")
        x = (s - self.shift).where(visible)
        if form.normalize == "threshold" and s.shape[-1]:
            x = (x - self.threshold(x, peak)).where(visible)
        self.x = x
        self.phi, self.slope = self.activate(x).where(visible), self.derivative(x).where(visible)
        if form.normalize == "select":
            self.select(s)
        self.mu = self.phi
        self.mu_slope = self.slope
        if self.act.normalizer is not None:
            self.mu, self.mu_slope = self.other(x)
        self.factor = problem.exact(torch.ones_like(peak))
        if form.factor is not None:
            self.factor = problem.vector(form.factor, "factor")
        self.z = self.normalizer()
        self.w = self.phi * self.factor / self.z
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def activate(self, x: Approx) -> Approx:
        def f(s: Tensor) -> Tensor:
            return self.act.value(s.clone(), self.alpha)

        if self.act.shifted:
            size = self.shifted_size(x.value)
        elif self.act.vanishes:  # φ may be computed as e^(log φ)
            size = f(x.value) * (1 + f(x.value).clamp(min=1e-300).log().abs())
        elif self.act.unit != 1:  # φ contains e^x, whose relative error is proportional to |x|
            size = f(x.value).abs() * (1 + x.value.abs())
        else:  # the terms of a power series may cancel
            size = f(x.value.abs())
        return x.map(f, self.times, size)

    def shifted_size(self, x: Tensor) -> Tensor:
        """Size of the errors of a difference of exponentials relative to M.

        For |x| >= 1, the difference is at least 0.63 of its larger term, whose relative error is
        proportional to |x| + M. For smaller |x|, implementations use expm1.
        """
        normalizer = self.act.normalizer or self.act.value
        return 2 * normalizer(x.clone(), self.alpha).abs() * (1 + x.abs() + 2 * self.alpha)

    def other(self, x: Approx) -> tuple[Approx, Approx]:
        """μ(x) and μ'(x)."""
        value, slope = self.act.normalizer, self.act.normalizer_slope
        assert value is not None
        assert slope is not None
        size = self.shifted_size(x.value) if self.act.shifted else value(x.value, self.alpha).abs()
        mu = x.map(lambda s: value(s, self.alpha), self.times, size)
        steep = slope(x.value, value(x.value, self.alpha), self.alpha).abs()
        steep = steep * (1 + x.value.abs() + (self.alpha if self.act.shifted else 0))
        slopes = x.map(lambda s: slope(s, value(s, self.alpha), self.alpha), self.times, steep)
        return mu.where(self.visible), slopes.where(self.visible)

    def derivative(self, x: Approx) -> Approx:
        """φ'(x)."""

        def f(s: Tensor) -> Tensor:
            return self.act.slope(s, self.act.value(s.clone(), self.alpha), self.alpha)

        if self.act.shifted:
            steep = f(x.value).abs() * (1 + x.value.abs() + self.alpha)
            return x.map(f, self.times, steep)
        if self.act.unit != 1 and not self.act.vanishes:
            size = f(x.value).abs() + self.act.value(x.value.clone(), self.alpha).abs()
            return x.map(f, self.times, size * (1 + x.value.abs()))
        at = x.value if self.act.vanishes else x.value.abs()
        # The sigmoid computes φ' = φ − φ², so the rounding error is also proportional to φ.
        size = f(at).abs() + self.act.value(at.clone(), self.alpha).abs()
        return x.map(f, self.times, size)

    def threshold(self, x: Approx, peak: Tensor) -> Approx:
        """τ minus the row maximum ``peak``, with the errors of the scores and of the solver."""
        alpha = None if self.alpha is None else self.alpha[..., 0]
        hidden = x.value.masked_fill(~self.visible, float("-inf"))
        tau = solve_threshold(hidden, alpha, self.act)[..., None]
        at = replace(x, value=x.value - tau, error=torch.zeros_like(x.error))
        phi, slope = self.activate(at).where(self.visible), self.derivative(at).where(self.visible)
        left = SOLVED[self.problem.accumulator] + phi.sum(-1, keepdim=True).error
        moved = (slope.value * x.error).sum(-1, keepdim=True) + left
        error = moved / slope.value.sum(-1, keepdim=True).clamp(min=1e-30)
        error = error.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)
        return Approx(tau, error, x.eps).rounded(SHIFTS, tau.abs() + peak.abs())

    def select(self, s: Approx) -> None:
        """Sets φ and φ' to 0 for unselected keys. Near a tie, either key may be selected."""
        if not s.shape[-1]:
            return
        ranked = s.value.masked_fill(~self.visible, float("-inf"))
        order = ranked.sort(stable=True, dim=-1, descending=True).indices
        either = torch.zeros_like(self.visible)
        if self.form.mass is None:
            assert self.form.keep is not None
            keep = torch.full_like(order[..., :1], min(self.form.keep, s.shape[-1]))
        else:
            before = self.shares_before(order)
            keep = (before.value < self.form.mass).sum(-1, keepdim=True)
            near = (before.value - self.form.mass).abs() <= before.error
            either = either.scatter(-1, order, near)
        place = torch.arange(s.shape[-1], device=order.device).expand_as(order)
        selected = torch.zeros_like(self.visible).scatter(-1, order, place < keep) & self.visible
        low, high = ranked - s.error, ranked + s.error
        last, first = order.gather(-1, keep - 1), order.gather(-1, keep.clamp(max=s.shape[-1] - 1))
        tied = torch.where(selected, low <= high.gather(-1, first), high >= low.gather(-1, last))
        either = (either | (tied & (keep < s.shape[-1]))) & self.visible
        for name in ("phi", "slope"):
            x = getattr(self, name)
            error = torch.where(either, x.value.abs() + x.error, x.error.where(selected, 0.0))
            setattr(self, name, replace(x, value=x.value.where(selected, 0.0), error=error))

    def shares_before(self, order: Tensor) -> Approx:
        """The softmax weight of the keys before each one, in this order. That of the first is 0."""
        total = self.phi.sum(-1, keepdim=True)
        w = self.phi / replace(total, value=total.value.masked_fill(total.value == 0, 1.0))
        ordered = Approx(w.value.gather(-1, order), w.error.gather(-1, order), w.eps)
        return shifted(cumulated(ordered), (1, -1))

    def normalizer(self) -> Approx:
        total = self.mu.sum(-1, keepdim=True)
        one = torch.ones_like(total.value)
        if self.form.normalize == "none":
            return self.problem.exact(one)
        if self.form.normalize == "threshold":
            # Σφ = 1 at the exact τ. Implementations may divide by Σφ at their rounded τ, or omit
            # the division.
            return replace(total, value=one)
        if self.form.sink is not None:
            total = total + self.activate(self.sink())
        if self.form.eps:
            down = (-self.alpha).exp() if self.act.shifted else one
            added = self.problem.exact(self.form.eps * down)
            total = total + added.rounded(EVALUATION, added.value * (1 - down.log()))
        return replace(total, value=total.value.masked_fill(total.value == 0, 1.0))

    def sink(self) -> Approx:
        assert self.form.sink is not None
        sink = self.problem.vector(self.form.sink, "sink")
        return (sink - self.shift).rounded(SHIFTS, sink.value.abs() + self.shift.value.abs())

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """dS = (φ' dP − μ' r) / Z, or factor φ' dP if the form does not normalize."""
        self.dfactor = (self.phi * dp).sum(-1, keepdim=True)
        self.dp = dp = dp * self.factor
        if self.form.normalize == "none":
            self.r = self.problem.exact(torch.zeros_like(self.dfactor.value))
            return self.slope * dp
        if self.form.normalize == "threshold":
            self.r = self.mean(dp)
        else:
            # Backends compute r as Σ w dP, or as dO·o from the stored output.
            r, stored = (self.w * dp).sum(-1, keepdim=True), (do * out).sum(-1, keepdim=True)
            self.r = replace(r, error=torch.maximum(r.error, stored.error))
        self.dp = dp - self.r
        if self.act.normalizer is not None:
            return (self.slope * dp - self.mu_slope * self.r) / self.z
        return self.slope * self.dp / self.z

    def mean(self, dp: Approx) -> Approx:
        """Σ φ' dP / Σ φ', a weighted mean of dP. It lies in the range of dP where φ' > 0."""
        total = self.slope.sum(-1, keepdim=True)
        mean = (self.slope.value * dp.value).sum(-1, keepdim=True)
        mean = mean / total.value.masked_fill(total.value == 0, 1.0)
        distance = (dp.value - mean).abs()
        error = (self.slope.error * distance + self.slope.value * dp.error).sum(-1, keepdim=True)
        error = error / (total.value - total.error).clamp(min=1e-60)
        positive = self.slope.value + self.slope.error > 0
        widest = torch.where(positive, distance + dp.error, 0.0)
        error = torch.minimum(error, largest(widest))
        bounded = Approx(mean, error, dp.eps)
        return bounded.rounded(dp.shape[-1] / 2 + EVALUATION, largest(dp.value * positive))

    def lse(self) -> Approx:
        total = self.phi.sum(-1, keepdim=True)
        log = total.value.clamp(min=1e-300).log()
        error = total.error / total.value.clamp(min=1e-300)
        lse = self.shift + Approx(log, error, total.eps).rounded(EVALUATION, log)
        return lse.rounded(SHIFTS, self.shift.value)[..., 0]

    def lse_gradient(self, lse: Approx) -> Approx:
        """e^(s − lse); unlike Z, lse does not include the sink."""
        total = self.phi.sum(-1, keepdim=True)
        p = self.phi / replace(total, value=total.value.masked_fill(total.value == 0, 1.0))
        return p.rounded(SHIFTS, p.value * lse.value[..., None])

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        """The gradients of the form's vectors, (B, H, Nq, 1), by name."""
        gradients = {"dgain": (ds * z).sum(-1, keepdim=True)}
        if self.form.factor is not None:
            gradients["dfactor"] = self.dfactor
        if self.form.offset is not None:
            gradients["doffset"] = -ds.sum(-1, keepdim=True)
        if self.form.sink is not None:
            gradients["dsink"] = -(self.derivative(self.sink()) * self.r / self.z)
        if self.form.shape is not None:
            dphi = self.shape_derivative().where(self.visible)
            of_shape = (dphi * self.dp / self.z).sum(-1, keepdim=True)
            # In the term with r, backends may evaluate ∂φ/∂shape at the τ of another solver step.
            extra = (dphi.error * self.r.value.abs()).sum(-1, keepdim=True)
            gradients["dshape"] = replace(of_shape, error=of_shape.error + extra)
        return gradients

    def shape_derivative(self) -> Approx:
        """∂φ/∂shape."""
        slope, alpha = self.act.shape_slope, self.alpha
        assert slope is not None
        assert alpha is not None

        def f(s: Tensor) -> Tensor:
            return slope(s, self.act.value(s.clone(), alpha), alpha)

        # ∂φ/∂shape is the difference of two terms of size x φ / (α − 1).
        size = f(self.x.value).abs() + self.phi.value * self.x.value.abs() / (alpha - 1)
        return self.x.map(f, self.times, size)


class EntropyGain:
    """A gain computed from lse and entropy H of the logits, with d gain / dH and ∂H/∂s."""

    def __init__(self, problem: Problem, form: FromStatistics, s: Approx, visible: Tensor) -> None:
        self.differentiable, eps = form.differentiable, s.eps
        lse = problem.call.logsumexp(s.value)[..., None]
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        log_p = (s.value - lse).where(visible, 0.0)
        p = log_p.exp().where(visible, 0.0)
        entropy = -(p * log_p).sum(-1, keepdim=True)
        s = s.rounded(SHIFTS, s.value.abs() + largest(s.value)).where(visible)
        sums = (s.shape[-1] / 2 + EVALUATION) * eps
        lse_error = (p * s.error).sum(-1, keepdim=True) + sums * (1 + lse.abs())
        entropy_error = (p * (log_p + entropy).abs() * s.error).sum(-1, keepdim=True)
        entropy_error = entropy_error + sums * (p * (1 + log_p.abs())).sum(-1, keepdim=True)

        def gain(h: Tensor, dtype: torch.dtype = torch.float64, move: float = 0.0) -> Tensor:
            at = (lse + move * lse_error).to(dtype)
            return form.gain(Statistics(at[..., 0], h.to(dtype)[..., 0]))[..., None].double()

        def slope(h: Tensor, step: float = 1e-6) -> Tensor:
            return (gain(h + step) - gain(h - step)) / (2 * step)

        here, there = gain(entropy), slope(entropy)
        ends = [(entropy + sign * entropy_error, sign) for sign in (-1, 1)]
        error = torch.stack([(gain(h, move=sign) - here).abs() for h, sign in ends]).amax(0)
        # `noise` is the rounding error of the gain function, measured in fp32 near the entropy.
        near = [(entropy * (1 + step * FP32)).float() for step in range(-8, 9)]
        noise = torch.stack([(gain(h, torch.float32) - gain(h)).abs() for h in near]).amax(0)
        self.gain = Approx(here, error + 2 * noise * (eps / FP32), eps).rounded(4, here)
        bend = torch.stack([(slope(h) - there).abs() for h, _ in ends]).amax(0)
        self.slope = Approx(there, bend + 1e-6 * there.abs(), eps)
        dentropy = -p * (log_p + entropy)
        error = p * ((1 + (log_p + entropy).abs()) * (s.error + lse_error) + entropy_error)
        self.dentropy = Approx(dentropy, error, eps).rounded(EVALUATION, p * (1 + log_p.abs()))
