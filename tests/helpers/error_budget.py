"""How far may a result be from fp64? The bounds that `agreement` holds backends to.

A pairwise form and its backward are evaluated once in fp64, as DESIGN's one formula for all of
them, with the bounds that `approx` carries along. What enters beside the rules there:

- a vector per query (gain, offset, sink, shape) and an activation take `EVALUATION` roundings;
- moving a row of scores by its maximum or threshold, in another unit, takes `SHIFTS` of them,
  of numbers as large as the largest score;
- a solver leaves `SOLVED` of |Σφ − 1|;
- a fused kernel multiplies weights and dS in the inputs' dtype, and has the output as it is stored
  in δ = dO·o; the others compute in the accumulators' dtype throughout.
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
# torch's fused CPU kernel takes an exp that is good to 20 units in the last place.
EVALUATION_OF = {"sdpa": 20}
SHIFTS = 4
SOLVED = {torch.float32: 2e-6, torch.float64: 1e-12}
SCANS = ("linear", "flash_linear")  # backends that walk over states and never meet a score
FUSED = ("sdpa", "flash", "decode", "flash_linear")
VECTORS = ("gain", "offset", "sink", "shape")
FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Problem:
    """One call in fp64, and what is known of the implementation that is judged.

    params: as the variant's forms take them. q, k, v, do, dlse: fp64. keep: the factors that
    dropout drew for the weights. dtype: that of the inputs.
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
        """Of the operands of products in the middle."""
        return self.dtype if self.backend in FUSED else self.accumulator

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def exact(self, value: Tensor | float) -> Approx:
        x = torch.as_tensor(value, dtype=torch.float64, device=self.q.device)
        return Approx(x, torch.zeros_like(x), torch.finfo(self.accumulator).eps)

    def vector(self, value: Tensor | float) -> Approx:
        """A vector of a form: [B, H, Nq, 1]."""
        call = self.call
        full = call.per_query(value).detach().expand(call.batch, call.heads, call.queries)
        return self.exact(full[..., None]).rounded(EVALUATION, full[..., None])

    def of_queries(self, x: Tensor) -> Tensor:
        """Heads of keys or values, repeated for the query heads that share them."""
        return x.repeat_interleave(self.call.group, dim=1)

    def form(self, params: dict[str, Any] | None = None) -> Pairwise | Linear:
        forms = self.variant.forms(self.call, **(self.params if params is None else params))
        kinds = (Linear,) if self.backend in SCANS else (Pairwise, Linear)
        return next(form for kind in kinds for form in forms if isinstance(form, kind))


@torch.no_grad()
def budget(problem: Problem) -> dict[str, Approx]:
    """What `analyse` finds, of a linear form too: that is a pairwise one on its features."""
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
        found["d" + name] = pulled(form, x, at, given, factor)
    return found


@torch.enable_grad()
def pulled(form: Linear, x: Tensor, at: Tensor, given: Approx, factor: float) -> Approx:
    """factor · Jᵀ gradient, with |J| for the errors: feature by feature, each of its own token."""
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
    """out, lse, dq, dk, dv; dscore, the gradient of the bias, (B, H, Nq, Nk); and the gradients of
    the form's vectors, dgain, doffset, dsink and dshape, (B, H, Nq, 1)."""
    call, exact = problem.call, problem.exact
    visible = call.visible.expand(call.batch, call.heads, call.queries, call.keys)
    q, k, v = exact(problem.q), *(exact(problem.of_queries(x)) for x in (problem.k, problem.v))
    if problem.backend == "flash_linear" and problem.dtype == torch.bfloat16:
        q, k = q.stored(problem.dtype), k.stored(problem.dtype)  # features are kept in bf16
    pairs = abs(call.scale) * (q.value.abs() @ k.value.abs().mT)
    z = (exact(call.scale) * (q @ k.mT)).where(visible)
    if problem.backend in SCANS:  # sums over keys and over features change places
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
        # The gain rides on q, in q's dtype.
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
        through = found["dgain"] * statistics.slope * statistics.turn
        of_logits, found["dscore"] = [*of_logits, through], ds + through
    if problem.backend in FUSED:
        # Made of the gradient of q. In sdpa, gain · q is in q's dtype.
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
    """The sum over the query heads that share a head of keys."""
    return x.unflatten(1, (call.kv_heads, call.group)).sum(2)


def largest(s: Tensor) -> Tensor:
    """Of each row: [.., 1]."""
    return s.abs().amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)


class Weights:
    """x = s − τ, φ(x), φ'(x), Z and w = φ/Z of a pairwise form."""

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
        self.phi, self.slope = self.activate(x).where(visible), self.incline(x).where(visible)
        if form.normalize == "select":
            self.select(s)
        self.z = self.normalizer()
        self.w = self.phi / self.z
        self.dropped = self.w.stored(problem.inner) * problem.exact(problem.keep)

    def activate(self, x: Approx) -> Approx:
        def f(s: Tensor) -> Tensor:
            return self.act.value(s.clone(), self.alpha)

        if self.act.vanishes:  # φ is e^{log φ} at worst
            size = f(x.value) * (1 + f(x.value).clamp(min=1e-300).log().abs())
        else:  # a power series cancels
            size = f(x.value.abs())
        return x.map(f, self.times, size)

    def incline(self, x: Approx) -> Approx:
        def f(s: Tensor) -> Tensor:
            return self.act.slope(s, self.act.value(s.clone(), self.alpha), self.alpha)

        at = x.value if self.act.vanishes else x.value.abs()
        # With φ, for σ' is φ − φ².
        size = f(at).abs() + self.act.value(at.clone(), self.alpha).abs()
        return x.map(f, self.times, size)

    def threshold(self, x: Approx, peak: Tensor) -> Approx:
        """τ, counted from the peak: it moves by the errors of the scores, averaged with φ'."""
        alpha = None if self.alpha is None else self.alpha[..., 0]
        hidden = x.value.masked_fill(~self.visible, float("-inf"))
        tau = solve_threshold(hidden, alpha, self.act)[..., None]
        at = replace(x, value=x.value - tau, error=torch.zeros_like(x.error))
        phi, slope = self.activate(at).where(self.visible), self.incline(at).where(self.visible)
        left = SOLVED[self.problem.accumulator] + phi.sum(-1, keepdim=True).error
        moved = (slope.value * x.error).sum(-1, keepdim=True) + left
        error = moved / slope.value.sum(-1, keepdim=True).clamp(min=1e-30)
        error = error.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)
        return Approx(tau, error, x.eps).rounded(SHIFTS, tau.abs() + peak.abs())

    def select(self, s: Approx) -> None:
        """Only the largest are kept; where rounding decides, a key may be kept or not."""
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
            # Divided by what Σφ is with a rounded τ, or by 1.
            return replace(total, value=one)
        if self.form.sink is not None:
            total = total + self.activate(self.sink())
        return replace(total, value=total.value.masked_fill(total.value == 0, 1.0))

    def sink(self) -> Approx:
        assert self.form.sink is not None
        sink = self.problem.vector(self.form.sink)
        return (sink - self.shift).rounded(SHIFTS, sink.value.abs() + self.shift.value.abs())

    def score_gradient(self, dp: Approx, do: Approx, out: Approx) -> Approx:
        """dS = φ' (dP − r) / Z."""
        self.dp = dp
        if self.form.normalize == "none":
            return self.slope * dp
        if self.form.normalize == "threshold":
            self.r = self.mean(dp)
        else:
            # Σ w dP, or dO·o with the output as it is stored.
            r, stored = (self.w * dp).sum(-1, keepdim=True), (do * out).sum(-1, keepdim=True)
            self.r = replace(r, error=torch.maximum(r.error, stored.error))
        self.dp = dp - self.r
        return self.slope * self.dp / self.z

    def mean(self, dp: Approx) -> Approx:
        """Σ φ' dP / Σ φ', which lies between the dP of the keys with weight."""
        mass = self.slope.sum(-1, keepdim=True)
        mean = (self.slope.value * dp.value).sum(-1, keepdim=True)
        mean = mean / mass.value.masked_fill(mass.value == 0, 1.0)
        apart = (dp.value - mean).abs()
        error = (self.slope.error * apart + self.slope.value * dp.error).sum(-1, keepdim=True)
        error = error / (mass.value - mass.error).clamp(min=1e-60)
        weighty = self.slope.value + self.slope.error > 0
        widest = torch.where(weighty, apart + dp.error, 0.0)
        error = torch.minimum(error, largest(widest))
        found = Approx(mean, error, dp.eps)
        return found.rounded(dp.shape[-1] / 2 + EVALUATION, largest(dp.value * weighty))

    def lse(self) -> Approx:
        total = self.phi.sum(-1, keepdim=True)
        log = total.value.clamp(min=1e-300).log()
        error = total.error / total.value.clamp(min=1e-300)
        found = self.shift + Approx(log, error, total.eps).rounded(EVALUATION, log)
        return found.rounded(SHIFTS, self.shift.value)[..., 0]

    def lse_gradient(self, lse: Approx) -> Approx:
        """e^{s − lse}: of the scores alone, whatever else is in Z."""
        total = self.phi.sum(-1, keepdim=True)
        p = self.phi / replace(total, value=total.value.masked_fill(total.value == 0, 1.0))
        return p.rounded(SHIFTS, p.value * lse.value[..., None])

    def vector_gradients(self, ds: Approx, z: Approx) -> dict[str, Approx]:
        """By name, [B, H, Nq, 1]."""
        found = {"dgain": (ds * z).sum(-1, keepdim=True)}
        if self.form.offset is not None:
            found["doffset"] = -ds.sum(-1, keepdim=True)
        if self.form.sink is not None:
            found["dsink"] = -(self.incline(self.sink()) * self.r / self.z)
        if self.form.shape is not None:
            turn = self.turn().where(self.visible)
            of_shape = (turn * self.dp / self.z).sum(-1, keepdim=True)
            # r may be taken off with a turn of its own, from another step of a solver.
            apart = (turn.error * self.r.value.abs()).sum(-1, keepdim=True)
            found["dshape"] = replace(of_shape, error=of_shape.error + apart)
        return found

    def turn(self) -> Approx:
        """∂φ/∂shape."""
        slope, alpha = self.act.shape_slope, self.alpha
        assert slope is not None
        assert alpha is not None

        def f(s: Tensor) -> Tensor:
            return slope(s, self.act.value(s.clone(), alpha), alpha)

        # A difference of two terms as large as x φ / (α − 1).
        size = f(self.x.value).abs() + self.phi.value * self.x.value.abs() / (alpha - 1)
        return self.x.map(f, self.times, size)


class EntropyGain:
    """A gain made of lse and entropy of the scores before it, its slope, and ∂H/∂s."""

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
        # How rounding disturbs the function itself: seen in fp32, at neighbouring numbers.
        near = [(entropy * (1 + step * FP32)).float() for step in range(-8, 9)]
        noise = torch.stack([(gain(h, torch.float32) - gain(h)).abs() for h in near]).amax(0)
        self.gain = Approx(here, error + 2 * noise * (eps / FP32), eps).rounded(4, here)
        bend = torch.stack([(slope(h) - there).abs() for h, _ in ends]).amax(0)
        self.slope = Approx(there, bend + 1e-6 * there.abs(), eps)
        turn = -p * (log_p + entropy)
        error = p * ((1 + (log_p + entropy).abs()) * (s.error + lse_error) + entropy_error)
        self.turn = Approx(turn, error, eps).rounded(EVALUATION, p * (1 + log_p.abs()))
