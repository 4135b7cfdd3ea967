"""Error bounds, element by element, for the results and gradients of a backend.

The form and its backward are evaluated once in fp64, and `approx` propagates the error bounds.
Besides the rules of `approx`, these errors are assumed:

- Evaluating a per-query vector (gain, offset, sink, shape) or an activation takes `EVALUATION`
  roundings.
- Subtracting the maximum or threshold of a row from its scores, and converting them to the
  activation's unit, takes `SHIFTS` roundings of numbers as large as the largest score.
- A threshold solver stops at |Σφ − 1| <= `SOLVED`.
- Fused kernels multiply weights and dS in the inputs' dtype, and compute δ = dO·o from the stored
  output. Other backends compute in the accumulator's dtype throughout.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.activations import IDENTITY
from attnzoo.core.call import Call
from attnzoo.core.forms import Definition, FromStatistics, Linear, Pairwise, Statistics
from helpers.approx import Approx

EVALUATION = 8
# The exp in torch's fused CPU kernel has errors up to 20 units in the last place.
EVALUATION_OF = {"sdpa": 20}
SHIFTS = 4
SOLVED = {torch.float32: 2e-6, torch.float64: 1e-12}
SCANS = ("linear", "flash_linear")  # backends that update states and compute no scores
FUSED = ("sdpa", "flash", "decode", "flash_linear")
VECTORS = ("gain", "offset", "sink", "shape")
FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Problem:
    """One call in fp64, and the backend and dtype whose errors are to be bounded.

    params: the arguments of `Variant.forms`. q, k, v, do, dlse: fp64. dtype: the dtype of the
    backend's inputs. keep: the dropout factors of the weights.
    """

    variant: attnzoo.Variant
    definition: Definition
    backend: str
    call: Call
    params: dict[str, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    dtype: torch.dtype
    keep: Tensor | float = 1.0

    @property
    def inner(self) -> torch.dtype:
        """The dtype in which weights and dS enter matrix products."""
        return self.dtype if self.backend in FUSED else self.accumulator

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def exact(self, value: Tensor | float) -> Approx:
        x = torch.as_tensor(value, dtype=torch.float64, device=self.q.device)
        return Approx(x, torch.zeros_like(x), torch.finfo(self.accumulator).eps)

    def vector(self, value: Tensor | float) -> Approx:
        """A per-query vector of a form as (B, H, Nq, 1)."""
        call = self.call
        full = call.per_query(value).detach().expand(call.batch, call.heads, call.queries)
        return self.exact(full[..., None]).rounded(EVALUATION, full[..., None])

    def of_queries(self, x: Tensor) -> Tensor:
        """Keys or values repeated to the number of query heads."""
        return x.repeat_interleave(self.call.group, dim=1)

    def form(self, params: dict[str, Any] | None = None) -> Pairwise | Linear:
        forms = self.variant.forms(self.call, **(self.params if params is None else params))
        kinds = (Linear,) if self.backend in SCANS else (Pairwise, Linear)
        return next(form for kind in kinds for form in forms if isinstance(form, kind))


@torch.no_grad()
def budget(problem: Problem) -> dict[str, Approx]:
    """The result of `analyse`. A linear form is treated as a pairwise form on its features."""
    form, call = problem.form(), problem.call
    if isinstance(form, Pairwise):
        return analyse(problem, form)
    sides = {
        "q": (call.scale * problem.q, call.query_positions, call.scale),
        "k": (problem.k, call.key_positions, 1.0),
    }
    features = {name: form.features(x, at) for name, (x, at, _) in sides.items()}
    on_features = replace(problem, call=replace(call, scale=1.0), **features)
    found = analyse(on_features, Pairwise(IDENTITY, "sum"))
    for name, (x, at, factor) in sides.items():
        given = found["d" + name].stored(problem.inner)
        given = given.rounded(EVALUATION, given.value)
        found["d" + name] = through_features(form, x, at, given, factor)
    return found


@torch.enable_grad()
def through_features(form: Linear, x: Tensor, at: Tensor, given: Approx, factor: float) -> Approx:
    """``factor`` · Jᵀ · ``given`` and its error bound, with the Jacobian J of the features."""
    x = x.detach().requires_grad_()
    features = form.features(x, at)
    value, error = torch.zeros_like(x), torch.zeros_like(x)
    for f in range(features.shape[-1]):
        (slope,) = torch.autograd.grad(features[..., f].sum(), x, retain_graph=True)
        slope = factor * slope
        value = value + slope * given.value[..., f, None]
        error = error + slope.abs() * given.error[..., f, None]
    return Approx(value.detach(), error.detach(), given.eps)


def analyse(problem: Problem, form: Pairwise) -> dict[str, Approx]:
    """The results and gradients of the call with their error bounds, by name.

    out, lse, dq, dk and dv have the shapes of the call. dscore is the gradient of the score bias,
    (B, H, Nq, Nk). dgain, doffset, dsink and dshape are (B, H, Nq, 1).
    """
    call, exact = problem.call, problem.exact
    visible = call.visible.expand(call.batch, call.heads, call.queries, call.keys)
    q, k, v = exact(problem.q), *(exact(problem.of_queries(x)) for x in (problem.k, problem.v))
    if problem.backend == "flash_linear" and problem.dtype == torch.bfloat16:
        q, k = q.stored(problem.dtype), k.stored(problem.dtype)  # features are stored in bf16
    pairs = abs(call.scale) * (q.value.abs() @ k.value.abs().mT)
    z = (exact(call.scale) * (q @ k.mT)).where(visible)
    if problem.backend in SCANS:  # the sum over keys comes before the sum over features
        z = z.rounded(call.keys, pairs).where(visible)
    bias = exact(call.bias).rounded(2, torch.as_tensor(call.bias, dtype=torch.float64))
    statistics = None
    if isinstance(form.gain, FromStatistics):
        statistics = EntropyGain(problem, form.gain, (z + bias).where(visible), visible)
        gain = statistics.gain
    else:
        gain = problem.vector(form.gain)
    s = (gain * z + bias).where(visible)
    if problem.backend == "sdpa" and not (isinstance(form.gain, float) and form.gain == 1.0):
        # The backend sdpa rounds gain · q to the dtype of q.
        s = s.rounded(torch.finfo(problem.dtype).eps / s.eps, gain.value * pairs)
    s = s.rounded(SHIFTS, s.value.abs() + largest(s.value)).where(visible)

    weights = Weights(problem, form, s, visible)
    out = weights.dropped @ v
    found = {"out": out.stored(problem.dtype)}
    do = exact(problem.do)
    dp = (do @ v.mT) * exact(problem.keep)
    ds = weights.score_gradient(dp, do, out.stored(problem.inner))
    if call.return_lse:
        found["lse"] = weights.lse()
        ds = ds + weights.lse_gradient(found["lse"]) * exact(problem.dlse)[..., None]
    ds = ds.where(visible)
    found.update(weights.vector_gradients(ds, z))
    of_logits, found["dscore"] = [gain * ds], ds
    if statistics is not None and statistics.differentiable:
        through = found["dgain"] * statistics.slope * statistics.dentropy
        of_logits, found["dscore"] = [*of_logits, through], ds + through
    if problem.backend in FUSED:
        # Fused backends compute dgain from the gradient of q. sdpa rounds gain · q to q's dtype.
        found["dgain"] = (ds.stored(problem.inner) * z).sum(-1, keepdim=True)
    if problem.backend == "sdpa":
        size = (abs(call.scale) * (ds.value @ k.value) * q.value).abs().sum(-1, keepdim=True)
        found["dgain"] = found["dgain"].rounded(torch.finfo(problem.dtype).eps / s.eps, size)
    dq, dk = [], []
    for x in of_logits:
        dz = exact(call.scale) * x.where(visible).stored(problem.inner)
        dq.append((dz @ k).stored(problem.dtype))
        dk.append(shared(dz.mT @ q, call).stored(problem.dtype))
    found["dq"], found["dk"] = (functools.reduce(operator.add, parts) for parts in (dq, dk))
    if problem.backend == "sdpa":
        found["dq"] = found["dq"].stored(problem.dtype)
    found["dv"] = shared(weights.dropped.mT @ do, call).stored(problem.dtype)
    return found


def shared(x: Approx, call: Call) -> Approx:
    """``x`` summed over the query heads that share a key/value head."""
    return x.unflatten(1, (call.kv_heads, call.group)).sum(2)


def largest(s: Tensor) -> Tensor:
    """The largest absolute value over the last dimension, (..., 1)."""
    return s.abs().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)


class Weights:
    """The weights w = φ(x)/Z of a pairwise form at x = s − τ, with φ(x), φ'(x) and Z."""

    def __init__(self, problem: Problem, form: Pairwise, s: Approx, visible: Tensor) -> None:
        self.problem, self.form, self.visible, self.act = problem, form, visible, form.activation
        self.times = EVALUATION_OF.get(problem.backend, EVALUATION)
        self.alpha = None if form.shape is None else problem.vector(form.shape).value
        peak = torch.zeros_like(s.value[..., :0].sum(-1, keepdim=True))
        if s.shape[-1]:
            peak = s.value.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
            peak = peak.masked_fill(peak == float("-inf"), 0.0)
        self.shift = problem.exact(torch.zeros_like(peak))
        if form.normalize == "threshold" or self.act.exponential:
            self.shift = problem.exact(peak)
        elif form.offset is not None:
            self.shift = problem.vector(form.offset)
        x = (s - self.shift).where(visible)
        if form.normalize == "threshold" and s.shape[-1]:
            x = (x - self.threshold(x, peak)).where(visible)
        self.x = x
        self.phi, self.slope = self.activate(x).where(visible), self.derivative(x).where(visible)
        if form.normalize == "select":
            self.select(s)
        self.z = self.normalizer()
        self.w = self.phi / self.z
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def activate(self, x: Approx) -> Approx:
        def f(s: Tensor) -> Tensor:
            return self.act.value(s.clone(), self.alpha)

        if self.act.vanishes:  # φ may be computed as e^(log φ)
            size = f(x.value) * (1 + f(x.value).clamp(min=1e-300).log().abs())
        else:  # the terms of a power series may cancel
            size = f(x.value.abs())
        return x.map(f, self.times, size)

    def derivative(self, x: Approx) -> Approx:
        """φ'(x)."""

        def f(s: Tensor) -> Tensor:
            return self.act.slope(s, self.act.value(s.clone(), self.alpha), self.alpha)

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
        ranked = s.value.masked_fill(~self.visible, float("-inf"))
        order = ranked.sort(stable=True, dim=-1, descending=True).indices
        keep = min(self.form.keep or 0, s.shape[-1])
        kept = torch.zeros_like(self.visible).scatter(-1, order[..., :keep], True) & self.visible
        either = torch.zeros_like(kept)
        if 0 < keep < s.shape[-1]:
            low, high = ranked - s.error, ranked + s.error
            last, first = order[..., keep - 1 : keep], order[..., keep : keep + 1]
            either = torch.where(kept, low <= high.gather(-1, first), high >= low.gather(-1, last))
            either = either & self.visible
        for name in ("phi", "slope"):
            x = getattr(self, name)
            error = torch.where(either, x.value.abs() + x.error, x.error.where(kept, 0.0))
            setattr(self, name, replace(x, value=x.value.where(kept, 0.0), error=error))

    def normalizer(self) -> Approx:
        total = self.phi.sum(-1, keepdim=True)
        one = torch.ones_like(total.value)
        if self.form.normalize == "none":
            return self.problem.exact(one)
        if self.form.normalize == "threshold":
            # Σφ = 1 at the exact τ. Implementations may divide by Σφ at their rounded τ, or omit
            # the division.
            return replace(total, value=one)
        if self.form.sink is not None:
            total = total + self.activate(self.sink())
        return replace(total, value=total.value.masked_fill(total.value == 0, 1.0))

    def sink(self) -> Approx:
        assert self.form.sink is not None
        sink = self.problem.vector(self.form.sink)
        return (sink - self.shift).rounded(SHIFTS, sink.value.abs() + self.shift.value.abs())

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """dS = φ' (dP − r) / Z, or φ' dP if the form does not normalize."""
        self.dp = dp
        if self.form.normalize == "none":
            return self.slope * dp
        if self.form.normalize == "threshold":
            self.r = self.mean(dp)
        else:
            # Backends compute r as Σ w dP, or as dO·o from the stored output.
            r, stored = (self.w * dp).sum(-1, keepdim=True), (do * out).sum(-1, keepdim=True)
            self.r = replace(r, error=torch.maximum(r.error, stored.error))
        self.dp = dp - self.r
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
        found = Approx(mean, error, dp.eps)
        return found.rounded(dp.shape[-1] / 2 + EVALUATION, largest(dp.value * positive))

    def lse(self) -> Approx:
        total = self.phi.sum(-1, keepdim=True)
        log = total.value.clamp(min=1e-300).log()
        error = total.error / total.value.clamp(min=1e-300)
        found = self.shift + Approx(log, error, total.eps).rounded(EVALUATION, log)
        return found.rounded(SHIFTS, self.shift.value)[..., 0]

    def lse_gradient(self, lse: Approx) -> Approx:
        """e^(s − lse); unlike Z, lse does not include the sink."""
        total = self.phi.sum(-1, keepdim=True)
        p = self.phi / replace(total, value=total.value.masked_fill(total.value == 0, 1.0))
        return p.rounded(SHIFTS, p.value * lse.value[..., None])

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        """The gradients of the form's vectors, (B, H, Nq, 1), by name."""
        found = {"dgain": (ds * z).sum(-1, keepdim=True)}
        if self.form.offset is not None:
            found["doffset"] = -ds.sum(-1, keepdim=True)
        if self.form.sink is not None:
            found["dsink"] = -(self.derivative(self.sink()) * self.r / self.z)
        if self.form.shape is not None:
            dphi = self.shape_derivative().where(self.visible)
            of_shape = (dphi * self.dp / self.z).sum(-1, keepdim=True)
            # In the term with r, backends may evaluate ∂φ/∂shape at the τ of another solver step.
            extra = (dphi.error * self.r.value.abs()).sum(-1, keepdim=True)
            found["dshape"] = replace(of_shape, error=of_shape.error + extra)
        return found

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
