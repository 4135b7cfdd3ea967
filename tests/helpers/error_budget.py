"""Error bounds, element by element, for the results and gradients of a backend.

The form and its backward are evaluated once in fp64, and `approx` propagates the error bounds.
Besides the rules of `approx`, these errors are assumed:

- Evaluating a vector of the form or an activation takes `EVALUATION` roundings. A per-key vector
  may be a cumulative sum over the keys.
- Subtracting the maximum or threshold of a row from its scores, and converting them to the
  activation's unit, takes `SHIFTS` roundings of numbers as large as the largest score.
- A threshold solver stops at |Σφ − 1| <= `SOLVED`.
- Fused kernels multiply weights and dS in the inputs' dtype, and compute δ = dO·o from the stored
  output. Other backends compute in the accumulator's dtype throughout, and so does sdpa with a gain
  per query.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo.core.activations import IDENTITY
from attnzoo.core.call import Call
from attnzoo.core.forms import Definition, FromStatistics, Linear, Pairwise
from attnzoo.core.parameters import VECTORS
from helpers.approx import Approx
from helpers.cases import CASES
from helpers.weights_budget import EVALUATION, SHIFTS, EntropyGain, Weights, largest

SCANS = ("linear", "flash_linear")  # backends that update states and compute no scores
FUSED = ("sdpa", "flash", "decode", "flash_linear", "flash_shares")


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
        fused = self.backend in FUSED and not self.multiplies_queries
        return self.dtype if fused else self.accumulator

    @property
    def multiplies_queries(self) -> bool:
        """Whether the backend multiplies q by the gain, in the accumulator's dtype."""
        return self.backend == "sdpa" and isinstance(self.form().gain, (Tensor, FromStatistics))

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def exact(self, value: Tensor | float) -> Approx:
        x = torch.as_tensor(value, dtype=torch.float64, device=self.q.device)
        return Approx(x, torch.zeros_like(x), torch.finfo(self.accumulator).eps)

    def vector(self, value: Tensor | float, name: str = "gain", summed: bool = False) -> Approx:
        """A vector of a form as (B, H, Nq, 1), (B, H, Nk, 1) or (B, H, 1, 1).

        summed: whether it may be a cumulative sum over the keys.
        """
        call = self.call
        length = {"Nq": call.queries, "Nk": call.keys, "1": 1}[VECTORS[name]]
        full = call.per_query(value).detach().expand(call.batch, call.heads, length)[..., None]
        return self.exact(full).rounded(EVALUATION + (call.keys if summed else 0), full)

    def of_queries(self, x: Tensor) -> Tensor:
        """Keys or values repeated to the number of query heads."""
        return x.repeat_interleave(self.call.group, dim=1)

    @property
    def weights(self) -> type:
        """The error analysis of the weights: the case's own if no form here has one."""
        if self.variant is None:
            return Weights
        forms = self.variant.forms(self.call, **self.params)
        analysed = any(isinstance(form, Pairwise | Linear) for form in forms)
        return Weights if analysed else CASES[self.variant.name].weights

    def form(self, params: dict[str, Any] | None = None) -> Pairwise | Linear:
        forms = self.variant.forms(self.call, **(self.params if params is None else params))
        kinds = (Linear,) if self.backend in SCANS else (Pairwise, Linear)
        usable = (form for kind in kinds for form in forms if isinstance(form, kind))
        return next(usable, None) or CASES[self.variant.name].weights.scores(self.params)


@torch.no_grad()
def budget(problem: Problem) -> dict[str, Approx]:
    """The result of `analyse`. A linear form is treated as a pairwise form on its features."""
    form, call = problem.form(), problem.call
    if isinstance(form, Pairwise):
        return analyse(problem, form)
    sides = {
        "q": (form.of_queries, call.scale * problem.q, call.query_positions, call.scale),
        "k": (form.features, problem.k, call.key_positions, 1.0),
    }
    features = {name: function(x, at) for name, (function, x, at, _) in sides.items()}
    on_features = replace(problem, call=replace(call, scale=1.0), **features)
    results = analyse(on_features, Pairwise(IDENTITY, "sum"))
    for name, (function, x, at, factor) in sides.items():
        gradient = results["d" + name].stored(problem.inner)
        gradient = gradient.rounded(EVALUATION, gradient.value)
        results["d" + name] = through_features(function, x, at, gradient, factor)
    return results


@torch.enable_grad()
def through_features(
    function: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    at: Tensor,
    gradient: Approx,
    factor: float,
) -> Approx:
    """``factor`` · Jᵀ · ``gradient`` and its error bound, with the Jacobian J of the features."""
    x = x.detach().requires_grad_()
    features = function(x, at)
    value, error = torch.zeros_like(x), torch.zeros_like(x)
    for f in range(features.shape[-1]):
        (slope,) = torch.autograd.grad(features[..., f].sum(), x, retain_graph=True)
        slope = factor * slope
        value = value + slope * gradient.value[..., f, None]
        error = error + slope.abs() * gradient.error[..., f, None]
    return Approx(value.detach(), error.detach(), gradient.eps)


def analyse(problem: Problem, form: Pairwise) -> dict[str, Approx]:
    """The results and gradients of the call with their error bounds, by name.

    out, lse, dq, dk and dv have the shapes of the call. dscore is the gradient of the score bias,
    (B, H, Nq, Nk). The gradients of the form's vectors have the shapes of `Problem.vector`.
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
    terms = Terms(problem, form)
    slope = None
    if call.softcap is not None:
        z, slope = capped(z, call.softcap), cap_slope(z, call.softcap)
    gained = z if terms.gain is None else terms.gain * z
    s = terms.add(gain * gained + bias).where(visible)
    if problem.multiplies_queries:
        s = s.rounded(1, gain.value * pairs)
    s = s.rounded(SHIFTS, s.value.abs() + largest(s.value)).where(visible)

    weights = problem.weights(problem, form, s, visible)
    out = weights.dropped @ v
    results = {"out": out.stored(problem.dtype)}
    do = exact(problem.do)
    dp = (do @ v.mT) * exact(problem.keep)
    ds = weights.score_gradient(dp, do, out.stored(problem.inner))
    if call.return_lse:
        results["lse"] = weights.lse()
        ds = ds + weights.lse_gradient(results["lse"]) * exact(problem.dlse)[..., None]
    ds = ds.where(visible)
    results.update(weights.vector_gradients(ds, gained))
    results.update(terms.gradients(ds, gain * z))
    of_logits, results["dscore"] = [gain * ds], ds
    if statistics is not None and statistics.differentiable:
        through = results["dgain"] * statistics.slope * statistics.dentropy
        of_logits, results["dscore"] = [*of_logits, through], ds + through
        results["dscore parts"] = ds.stored(problem.dtype) + through.stored(problem.dtype)
    if problem.backend in FUSED:
        # Fused backends compute dgain from the gradient of q.
        results["dgain"] = (ds.stored(problem.inner) * gained).sum(-1, keepdim=True)
    if problem.multiplies_queries:
        size = (abs(call.scale) * (ds.value @ k.value) * q.value).abs().sum(-1, keepdim=True)
        results["dgain"] = results["dgain"].rounded(1, size)
    dq, dk = [], []
    for x in of_logits:
        for factor in (terms.gain, slope):
            x = x if factor is None else x * factor
        dz = exact(call.scale) * x.where(visible).stored(problem.inner)
        dq.append((dz @ k).stored(problem.dtype))
        dk.append(shared(dz.mT @ q, call).stored(problem.dtype))
    results["dq"], results["dk"] = (functools.reduce(operator.add, parts) for parts in (dq, dk))
    if problem.multiplies_queries:
        results["dq"] = results["dq"].stored(problem.inner)
    results["dv"] = shared(weights.dropped.mT @ do, call).stored(problem.dtype)
    return results


def capped(z: Approx, softcap: float) -> Approx:
    return z.map(lambda x: softcap * (x / softcap).tanh(), EVALUATION, z.value.abs())


def cap_slope(z: Approx, softcap: float) -> Approx:
    """1 − tanh²(z/c), which implementations compute from the rounded tanh."""
    one = torch.ones_like(z.value)
    return z.map(lambda x: 1 - (x / softcap).tanh() ** 2, EVALUATION, one)


class Terms:
    """The gain and the bias by distance, and the key bias minus the offset, of a form."""

    def __init__(self, problem: Problem, form: Pairwise) -> None:
        self.problem, self.form = problem, form
        call = problem.call
        self.gain = self.bias = None
        self.decay_slopes: list[Approx | None] = [None, None]  # of gain and bias
        if form.distance is None:
            return
        assert form.decay is not None
        away = call.distance.abs().double()
        decay = problem.vector(form.decay, "decay").value

        def made(function: Any) -> Approx | None:
            if function is None:
                return None
            x = function(away, decay)
            return problem.exact(x).rounded(EVALUATION, x)

        self.gain, self.bias = made(form.distance.gain), made(form.distance.bias)
        self.decay_slopes = [made(form.distance.gain_slope), made(form.distance.bias_slope)]

    def add(self, s: Approx) -> Approx:
        form, problem = self.form, self.problem
        if self.bias is not None:
            s = s + self.bias
        summed = form.key_bias is not None
        difference = None
        if form.key_bias is not None:
            difference = problem.vector(form.key_bias, "key_bias", summed).mT
        if form.offset is not None and (summed or form.normalize != "none"):
            offset = problem.vector(form.offset, "offset", summed)
            difference = -offset if difference is None else difference - offset
        return s if difference is None else s + difference

    def gradients(self, ds: Approx, gained: Approx) -> dict[str, Approx]:
        gradients = {}
        if self.form.key_bias is not None:
            gradients["dkey_bias"] = ds.mT.sum(-1, keepdim=True)
        total = None
        for slope, factor in zip(self.decay_slopes, (gained, None)):
            if slope is not None:
                part = ds * slope if factor is None else ds * slope * factor
                total = part if total is None else total + part
        if total is not None:
            gradients["ddecay"] = total.sum(-1, keepdim=True).sum(-2, keepdim=True)
        return gradients


def shared(x: Approx, call: Call) -> Approx:
    """``x`` summed over the query heads that share a key/value head."""
    return x.unflatten(1, (call.kv_heads, call.group)).sum(2)
