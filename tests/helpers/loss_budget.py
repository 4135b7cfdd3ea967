"""Error bounds, element by element, for the losses of output layers and their gradients.

The loss and its backward are evaluated once in fp64, and `approx` propagates the error bounds. The
constants of `error_budget` hold here too: `EVALUATION` roundings for a function, `SHIFTS` roundings
when a maximum or threshold is subtracted, |Σφ − 1| <= `SOLVED` for a threshold. Scores, statistics
and sums over tokens are in fp32 for 16-bit inputs. Then ∂L/∂z may be rounded to 16 bits before it
is multiplied by the inputs and the weight, and gradients are stored twice: when they are made in
the forward pass, and when the backward pass multiplies them.

With φ = 1 + s + s²/2, a sum over classes can be computed from the moments ΣE and EᵀE. For N tokens
the error bound of such a sum is that of a sum of V + d + N terms. It grows with Σ_k |h_k E_jk|, not
with the score. Centring at most doubles the largest |E_jk| and multiplies its square by at most 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helpers.approx import Approx
from helpers.loss_cases import Inputs
from helpers.loss_definitions import DEFAULTS, Dense, dense_linear, gain_of, of_rows, q_exp
from helpers.weights_budget import EVALUATION, SHIFTS, SOLVED, largest


@dataclass(frozen=True)
class Parts:
    """Parts of the loss and its derivatives, for each row.

    With the target distribution a and its sum m, the loss is m·potential − Σ a·aligned and its
    gradient is m·weights − a·slope. sink: the weight of the sink. shape: ∂potential/∂α.
    """

    potential: Approx  # (R, 1)
    weights: Approx  # ∂potential/∂s, (R, V)
    aligned: Approx  # (R, V)
    slope: Approx  # ∂aligned/∂s, (R, V)
    lse: Approx | None = None
    lse_weights: Approx | None = None
    sink: Approx | None = None
    shape: Approx | None = None


@torch.no_grad()
def bounds(inputs: Inputs) -> dict[str, Tensor]:
    """The allowed error of each element of the loss and of all gradients, by name."""
    _, arguments = inputs.arguments(torch.float64)
    dtype = inputs.leaves["input"].dtype
    budget = Budget(inputs, dense_linear(variant=inputs.variant, **arguments), arguments, dtype)
    return {name: x.error for name, x in budget.results().items()}


class Budget:
    def __init__(
        self, inputs: Inputs, exact: Dense, arguments: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self.inputs, self.dense, self.dtype = inputs, exact, dtype
        self.variant, self.arguments = inputs.variant, arguments
        self.p = {**DEFAULTS[inputs.variant], **arguments}
        self.accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        self.visible = exact.visible
        h = arguments["input"].reshape(-1, arguments["input"].shape[-1])
        self.h, self.weight = self.exact(h), self.exact(arguments["linear_weight"])
        z = self.h @ self.weight.mT
        self.sizes = self.h.value.abs() @ self.weight.value.abs().mT
        if "linear_bias" in arguments:
            z = z + self.exact(arguments["linear_bias"])
            self.sizes = self.sizes + arguments["linear_bias"].abs()
        self.cap, cap = None, self.p["softcap"]
        if cap is not None:
            z = z.map(lambda x: cap * torch.tanh(x / cap), EVALUATION, z.value.clamp(-cap, cap))
            one = torch.ones_like(z.value)
            self.cap = z.map(lambda x: 1 - (x / cap) ** 2, SHIFTS, one)
        gain = gain_of(self.variant, self.visible.sum(-1).double().log(), self.p)
        self.gain = self.exact(gain[:, None]).rounded(EVALUATION, gain[:, None])
        self.z, s = z, self.gain * z
        s = s.where(self.visible)
        self.s = s.rounded(SHIFTS, s.value.abs() + largest(s.value)).where(self.visible)

    def exact(self, value: Tensor | float) -> Approx:
        x = torch.as_tensor(value, dtype=torch.float64).detach()
        return Approx(x, torch.zeros_like(x), torch.finfo(self.accumulator).eps)

    def parts(self) -> Parts:
        if self.variant == "taylor":
            return self.series()
        if self.variant == "sigmoid":
            return self.independent()
        return self.exponentials() if self.dense.rows.lse is not None else self.sparse()

    def exponentials(self) -> Parts:
        seen = self.visible
        if self.variant == "topk":
            seen = self.dense.rows.weights > 0
        peak = self.s.value.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True)

        def exp(x: Approx) -> Approx:
            value = x.value.exp()
            return x.map(torch.exp, EVALUATION, value * (1 + x.value.abs()))

        def log(x: Approx) -> Approx:
            value = x.map(torch.log, EVALUATION, x.value.log()) + self.exact(peak)
            return value.rounded(SHIFTS, peak)

        phi = exp(self.s - self.exact(peak)).where(seen)
        total = without = phi.sum(-1, keepdim=True)
        extra, one = None, torch.ones_like(self.s.value)
        if self.variant == "sink":
            b = of_rows(self.p["b"])[:, None]
            x = self.exact(b) - self.exact(peak)
            extra = exp(x.rounded(SHIFTS, b.abs() + peak.abs()))
            total = total + extra
        return Parts(
            potential=log(total),
            weights=phi / total,
            aligned=self.s,
            slope=self.exact(one),
            lse=log(without),
            lse_weights=phi / without,
            sink=None if extra is None else extra / total,
        )

    def independent(self) -> Parts:
        n = self.visible.sum(-1, keepdim=True).double()
        bias = -n.log() if self.p["bias"] is None else of_rows(self.p["bias"])[:, None]
        x = self.s + self.exact(bias).rounded(EVALUATION, bias)
        x = x.rounded(SHIFTS, x.value)

        def softplus(x: Tensor) -> Tensor:
            return torch.logaddexp(x, torch.zeros_like(x))

        area = x.map(softplus, EVALUATION, softplus(x.value))
        w = x.map(torch.sigmoid, EVALUATION, x.value.sigmoid() * (1 + x.value.abs()))
        total = area.where(self.visible).sum(-1, keepdim=True)
        one = self.exact(torch.ones_like(x.value))
        return Parts(total, w.where(self.visible), x, one)

    def series(self) -> Parts:
        order = self.p["order"]

        def f(s: Tensor, top: int = order) -> Tensor:
            return sum((s**p / math.factorial(p) for p in range(1, top + 1)), torch.ones_like(s))

        s = self.s
        phi = s.map(f, EVALUATION, f(s.value.abs()))
        slope = s.map(lambda s: f(s, order - 1), EVALUATION, f(s.value.abs(), order - 1))
        total = phi.where(self.visible).sum(-1, keepdim=True)
        w = slope.where(self.visible)
        if order == 2:
            times = s.shape[-1] + self.h.shape[-1] + self.h.shape[0] + EVALUATION
            size = torch.where(self.visible, 4 * f(self.sizes), 0.0)
            total = total.rounded(times, size.sum(-1, keepdim=True))
            w = w.rounded(times, torch.where(self.visible, 4 * (1 + self.sizes), 0.0))
        log = phi.map(torch.log, EVALUATION, phi.value.log())
        potential = total.map(torch.log, EVALUATION, total.value.log())
        return Parts(potential, w / total, log, slope / phi)

    def sparse(self) -> Parts:
        rows, s = self.dense.rows, self.s
        assert rows.threshold is not None
        assert rows.alpha is not None
        tau, alpha = rows.threshold.detach()[:, None], rows.alpha.detach()[:, None]
        a = alpha - 1
        seen = self.visible
        # φ <= 1 and φ' = φ^{2−α}, so Σφ' >= Σφ = 1. An error of the scores or of Σφ therefore moves
        # τ by at most the same amount.
        error = (s.error * seen).amax(-1, keepdim=True) + SOLVED[self.accumulator]
        terms = torch.finfo(self.accumulator).eps * (seen.sum(-1, keepdim=True) / 2 + EVALUATION)
        t = Approx(tau, error + terms, s.eps).rounded(SHIFTS, tau.abs() + 1 / a)
        x = (s - t).rounded(SHIFTS, s.value.abs() + tau.abs() + 1 / a)

        def powered(power: Tensor | float) -> Approx:
            value = q_exp(x.value, alpha, power)
            size = value * (1 + 1 / a + value.clamp(min=1e-300).log().abs())
            return x.map(lambda x: q_exp(x, alpha, power), EVALUATION, size).where(seen)

        w = powered(1.0)
        power_sum = powered(alpha).sum(-1, keepdim=True)
        correction = (self.exact(1.0) - power_sum) / self.exact(alpha)
        one = self.exact(torch.ones_like(s.value))
        shape = self.slope_of_alpha(x, alpha) if "alpha" in self.inputs.leaves else None
        return Parts(t - correction, w, s, one, shape=shape)

    def slope_of_alpha(self, x: Approx, alpha: Tensor) -> Approx:
        """∂/∂α of Σ φ^α/α − 1/α at constant τ, with log φ^α = α log(u) / a and u = 1 + ax."""
        a = alpha - 1

        def terms(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            inside = a * x > -1
            x = torch.where(inside, x, 0.0)
            area = torch.where(inside, q_exp(x, alpha, alpha) / alpha, 0.0)
            u = 1 + a * x
            return area, u.log() / a**2, alpha * x / (a * u), 1 / alpha

        def slope(x: Tensor) -> Tensor:
            area, first, second, third = terms(x)
            return area * (second - first - third)

        area, first, second, third = terms(x.value)
        total = x.map(slope, EVALUATION, area * (first.abs() + second.abs() + third))
        total = total.where(self.visible).sum(-1, keepdim=True)
        inverse = self.exact(1 / alpha**2)
        return (total + inverse).rounded(EVALUATION, inverse.value)

    def omega(self, shares: Tensor, total: Tensor) -> tuple[Approx, Approx]:
        """Ω(a/m) = (Σp^α − 1)/(α(α−1)) and ∂Ω/∂α, (R, 1)."""
        assert self.dense.rows.alpha is not None
        alpha = self.dense.rows.alpha.detach()[:, None]
        p = shares / torch.where(total > 0, total, 1.0)
        scale, log = alpha * (alpha - 1), p.clamp(min=1e-300).log()
        powers = p**alpha
        times = p.shape[-1] / 2 + EVALUATION
        value = (powers.sum(-1, keepdim=True) - 1) / scale
        size = (powers * (1 + log.abs())).sum(-1, keepdim=True) + 1
        first = (powers * log).sum(-1, keepdim=True) / scale
        slope = first - value * (2 * alpha - 1) / scale
        sizes = first.abs() + size / scale**2 * (2 * alpha - 1)
        return (
            self.exact(value).rounded(times, size / scale),
            self.exact(slope).rounded(times, sizes),
        )

    def factors(self) -> Tensor:
        """The factor of each token's loss in the result, (R, 1)."""
        counted = self.dense.counted
        if self.p["reduction"] == "none":
            factor = self.inputs.do.double().reshape(-1)
        else:
            factor = torch.ones(counted.shape, dtype=torch.float64)
        if self.p["reduction"] == "mean":
            y = torch.where(counted, self.p["target"].reshape(-1), 0)
            each = self.p["weight"].double()[y] if "weight" in self.p else factor
            total = torch.where(counted, each, 0.0).sum()
            factor = factor / torch.where(total > 0, total, 1.0)
        return torch.where(counted, factor, 0.0)[:, None]

    def results(self) -> dict[str, Approx]:
        parts = self.parts()
        total = self.dense.shares.sum(-1, keepdim=True)
        a = self.exact(self.dense.shares).rounded(EVALUATION, self.dense.shares)
        m = self.exact(total).rounded(EVALUATION, total)
        loss = m * parts.potential - (a * parts.aligned).where(self.visible).sum(-1, keepdim=True)
        shape = parts.shape
        if self.dense.rows.alpha is not None:
            value, slope = self.omega(a.value, total)
            loss = loss + m * value
            shape = None if shape is None else m * (shape + slope)
        ds = m * parts.weights - (a * parts.slope).where(self.visible)
        penalty = self.p["lse_penalty"]
        if penalty:
            assert parts.lse is not None
            assert parts.lse_weights is not None
            loss = loss + self.exact(penalty) * parts.lse * parts.lse
            ds = ds + self.exact(2 * penalty) * parts.lse * parts.lse_weights
        g = self.exact(self.factors())
        g = g.rounded(EVALUATION + g.shape[0] / 2, g.value)
        counted = self.dense.counted
        if self.p["reduction"] == "none":
            results = {"loss": loss[:, 0].where(counted)}
            results["loss"] = self.shaped(results["loss"], self.p["target"].shape)
        else:
            results = {"loss": (g * loss)[:, 0].sum(0)}
        results["loss"] = results["loss"].stored(self.accumulator)
        ds = g * ds
        dgain = (ds * self.z).where(self.visible).sum(-1)
        dz = self.gain * ds if self.cap is None else self.gain * ds * self.cap
        dz = dz.where(self.visible)
        products = dz if self.dtype == self.accumulator else dz.stored(self.dtype)
        shape_of_input = self.arguments["input"].shape
        results["dinput"] = self.shaped(products @ self.weight, shape_of_input)
        results["dlinear_weight"] = products.mT @ self.h
        results["dlinear_bias"] = products.sum(0)
        per_row = {"bias": ds.sum(-1)}
        if parts.sink is not None:
            per_row["b"] = (g * m * parts.sink)[:, 0]
        if shape is not None:
            per_row["alpha"] = (g * shape)[:, 0]
        per_row.update(self.of_gain(dgain))
        for name, leaf in self.inputs.leaves.items():
            if name in per_row:
                x = per_row[name]
                x = x if leaf.numel() == x.shape[0] else x.sum(0)
                results["d" + name] = self.shaped(x, leaf.shape)
        for name, leaf in self.inputs.leaves.items():
            results["d" + name] = results["d" + name].stored(leaf.dtype).stored(leaf.dtype)
        return {name: results[name] for name in ["loss", *("d" + x for x in self.inputs.leaves)]}

    def of_gain(self, dgain: Approx) -> dict[str, Approx]:
        log_n = self.visible.sum(-1).double().log()
        many = log_n > 0
        safe = torch.where(many, log_n, 1.0)

        def times(slope: Tensor) -> Approx:
            return self.exact(slope).rounded(EVALUATION, slope) * dgain

        if self.variant == "ssmax":
            return {"s": times(log_n), "b": dgain}
        if self.variant != "asentmax":
            return {}
        beta, gamma = (of_rows(self.p[name]).detach() for name in ("beta", "gamma"))
        power = torch.where(many, safe**gamma, 0.0)
        return {"beta": times(power), "gamma": times(beta * power * safe.log()), "delta": dgain}

    def shaped(self, x: Approx, shape: torch.Size) -> Approx:
        return Approx(x.value.reshape(shape), x.error.reshape(shape), x.eps)
