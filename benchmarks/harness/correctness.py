"""Each result against fp64, on 128 query rows, before anything is timed.

The reference is the definition (backend `eager`) in fp64, a few neighbouring query rows at a time
with their prefix of the keys: under bottom-right causality these are the whole rows, positions and
key counts included, in memory linear in N. Without causality a row sees all keys; its position is
then lost, and a variant which needs it is not checked. For gradients the output's gradient is zero
elsewhere, so that the rows' gradients add up to those of the whole. A call with many batches and
heads may be checked on a few of them (`Pairs`); all others must be finite.

The budget is the project's: at most twice the error of the same rows computed plainly in the
inputs' dtype, plus one rounding; where a threshold is iterated to a residual of 1e-6 in Σw, also
what that may move. It holds for the root mean square. The largest single error has eight times as
much instead of two: where all terms of a sum cancel (the gradient of a row with one key is
w·(dP − dP)), one order of summation hits 0 by luck where another is left with a rounding. A linear
form adds up F products for each key, larger than the weight that remains of them: the error of the
plain computation counts √(Σ|ψψ| / |Σψψ|) times there, as roundings of either sign add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Attend, Case, Inputs
from commandline.errors import UsageError

ROWS, RUN = 128, 4
FEW = 16
RESIDUAL = 1e-6
# torch's fused CPU kernel takes an exp that is good to so many units in the last place; in one row
# of small weights nothing else is as large.
SDPA_EXP = 20


@dataclass(frozen=True)
class Deviation:
    """From fp64: the root mean square and the largest error, each with its budget."""

    error: float
    budget: float
    largest: float
    largest_budget: float

    @property
    def share(self) -> float:
        """Of the budget that is used up, by the error that uses more of it; inf for NaN."""
        shares = [
            error / budget if budget > 0 else (0.0 if error == 0 else math.inf)
            for error, budget in ((self.error, self.budget), (self.largest, self.largest_budget))
        ]
        return math.inf if any(map(math.isnan, shares)) else max(shares)

    @property
    def ok(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True)
class Pairs:
    """The (batch, head) pairs that are checked: each of these batches with each of these heads."""

    batches: list[int]
    heads: list[int]

    @staticmethod
    def of(batch: int, heads: int, rows: int) -> Pairs:
        """All where they are few. Else the first and the last, where a wrong stride shows most; of
        calls with one row all heads, which kernels take together."""
        if batch * heads <= FEW:
            return Pairs(list(range(batch)), list(range(heads)))
        ends = sorted({0, heads - 1})
        return Pairs(sorted({0, batch - 1}), list(range(heads)) if rows == 1 else ends)

    def __len__(self) -> int:
        return len(self.batches) * len(self.heads)


@dataclass(frozen=True)
class Check:
    """By name: "out", and the gradients as "dq", "dk", "dv" and "d" + a parameter's name."""

    rows: int
    pairs: int
    deviations: dict[str, Deviation]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.deviations.values())

    @property
    def worst(self) -> tuple[str, Deviation]:
        """The one that uses up most of its budget."""
        return max(self.deviations.items(), key=lambda item: item[1].share)

    def record(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: what was worst."""
        name, worst = self.worst
        error, share = (x if math.isfinite(x) else None for x in (worst.error, worst.share))
        return {"ok": self.ok, "rows": self.rows, "pairs": self.pairs, "worst": name,
                "error": error, "share": share}  # fmt: skip


def check_runs(length: int, seed: int = 0) -> list[range]:
    """The first rows, the last rows, and short runs at random places between, ascending."""
    if length <= ROWS:
        return [range(length)]
    ends = ROWS // 4
    generator = torch.Generator().manual_seed(seed + length)
    places = torch.randperm((length - 2 * ends) // RUN, generator=generator)
    starts = (ends + RUN * places[: (ROWS - 2 * ends) // RUN]).sort().values.tolist()
    middle = [range(start, start + RUN) for start in starts]
    return [range(ends), *middle, range(length - ends, length)]


def by_definition(
    case: Case, inputs: Inputs, runs: list[range], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs at the runs' rows (B, H, R, D), and the gradients that only these rows cause."""
    q, k, v, do = (x.detach().to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    leaves = inputs.leaves()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # A product of matrices adds up in fp32 and rounds once, and so do the sums over rows.
    sums = {n: torch.zeros_like(x, dtype=wide, requires_grad=False) for n, x in leaves.items()}
    outs, before = [], k.shape[2] - q.shape[2]
    for run in runs:
        rows = slice(run.start, run.stop)
        seen = slice(before + run.stop) if inputs.causal else slice(None)
        prefix = {"q": q[:, :, rows], "k": k[:, :, seen], "v": v[:, :, seen]}
        given = {**leaves, **prefix}
        # Parameters stay in fp32 under half-precision inputs, as they do in a model.
        tensors = {n: _leaf(x, dtype if n in prefix else wide) for n, x in given.items()}
        params = {**inputs.params, **{n: x for n, x in tensors.items() if n not in prefix}}
        with torch.set_grad_enabled(bool(leaves)):
            attend = case.attend(params, "eager", **inputs.options)
            out = attend(tensors["q"], tensors["k"], tensors["v"])
        outs.append(out.detach())
        if leaves:
            wanted = [tensors[n] for n in leaves]
            gradients = torch.autograd.grad(out, wanted, do[:, :, rows])
            for (name, total), gradient in zip(sums.items(), gradients, strict=True):
                if name in ("q", "k", "v"):
                    total[:, :, rows if name == "q" else seen] += gradient
                else:
                    total += gradient
    rounded = {f"d{n}": x.to(dtype if n in ("q", "k", "v") else wide) for n, x in sums.items()}
    return {"out": torch.cat(outs, dim=2), **rounded}


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_()


def by_call(attend: Attend, inputs: Inputs, runs: list[range], pairs: Pairs) -> dict[str, Tensor]:
    """The same tensors as `by_definition` of these pairs, from one call over the whole sequence."""
    leaves = inputs.leaves()
    with torch.set_grad_enabled(bool(leaves)):
        out = attend(inputs.q, inputs.k, inputs.v)
    found = {"out": _finite(out.detach()[_index(out, runs, pairs)], out)}
    if leaves:
        where = _index(inputs.do, runs, pairs)
        do = torch.zeros_like(inputs.do)
        do[where] = inputs.do[where]
        gradients = torch.autograd.grad(out, list(leaves.values()), do)
        group = inputs.q.shape[1] // inputs.k.shape[1]
        of_kv = sorted({head // group for head in pairs.heads})
        for name, gradient in zip(leaves, gradients, strict=True):
            heads = of_kv if name in ("k", "v") else pairs.heads
            whole = name in ("q", "k", "v")
            part = gradient[pairs.batches][:, heads] if whole else gradient[heads]
            found[f"d{name}"] = _finite(part, gradient)
    return found


def _finite(part: Tensor, whole: Tensor) -> Tensor:
    """What is not checked row by row must be finite at least: without that the part is NaN."""
    return part if whole.isfinite().all() else torch.full_like(part, torch.nan)


def _index(x: Tensor, runs: list[range], pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of batches, heads and rows that broadcast to (B, H, R)."""
    batches = torch.tensor(pairs.batches, device=x.device)[:, None, None]
    heads = torch.tensor(pairs.heads, device=x.device)[:, None]
    rows = torch.cat([torch.arange(run.start, run.stop, device=x.device) for run in runs])
    return batches, heads, rows


@dataclass(frozen=True)
class Reference:
    """What calls of a case on these inputs are compared with, on some rows of some pairs."""

    case: Case
    inputs: Inputs
    runs: list[range]
    pairs: Pairs
    exact: dict[str, Tensor]  # in fp64
    plain: dict[str, Tensor]  # in the inputs' dtype

    @staticmethod
    def of(case: Case, inputs: Inputs, seed: int = 0, pairs: Pairs | None = None) -> Reference:
        batch, heads, rows, _ = inputs.q.shape
        runs = check_runs(rows, seed)
        positional = attnzoo.get_variant(case.variant).positional
        if positional and not inputs.causal and len(runs) > 1:
            raise UsageError(
                f"{case.spec} needs positions: it is checked, and timed, causally only"
            )
        pairs = pairs or Pairs.of(batch, heads, rows)
        part = inputs.part(pairs.batches, pairs.heads)
        exact, plain = (
            by_definition(case, part, runs, dtype) for dtype in (torch.float64, inputs.q.dtype)
        )
        return Reference(case, inputs, runs, pairs, exact, plain)

    def check(self, backend: str | None, gradients: bool) -> Check:
        """Of attnzoo's call through this backend, with gradients or without."""
        inputs = self.inputs if gradients else self.inputs.detached()
        attend = self.case.attend(inputs.params, backend, **inputs.options)
        found = by_call(attend, inputs, self.runs, self.pairs)
        plan = plan_of(self.case, inputs, backend)
        slack = torch.finfo(inputs.q.dtype).eps + (RESIDUAL if self.case.has_threshold else 0.0)
        if inputs.q.shape[2] == 1 and plan.chosen == "sdpa" and inputs.q.device.type == "cpu":
            slack += SDPA_EXP * torch.finfo(torch.float32).eps
        growth = linear_condition(plan, inputs) ** 0.5
        deviations = {n: self.deviation(n, x, slack, growth) for n, x in found.items()}
        return Check(sum(map(len, self.runs)), len(self.pairs), deviations)

    def relative_error(self, attend: Attend) -> float:
        """Of another's output: the root mean square of its error, in that of fp64."""
        out = by_call(attend, self.inputs.detached(), self.runs, self.pairs)["out"]
        exact = self.exact["out"]
        return _errors(out, exact)[0] / _errors(exact, torch.zeros_like(exact))[0]

    def deviation(self, name: str, found: Tensor, slack: float, growth: float) -> Deviation:
        """``slack`` is relative; errors of the plain computation count ``growth`` times."""
        exact = self.exact[name]
        error, largest = _errors(found, exact)
        plain_error, plain_largest = _errors(self.plain[name], exact)
        rms, peak = _errors(exact, torch.zeros_like(exact))
        return Deviation(
            error,
            2 * growth * plain_error + slack * rms,
            largest,
            8 * growth * plain_largest + slack * peak,
        )


def plan_of(case: Case, inputs: Inputs, backend: str | None) -> attnzoo.Plan:
    return attnzoo.explain(
        inputs.q, inputs.k, inputs.v, case.variant, backend=backend, **inputs.options,
        **inputs.params,
    )  # fmt: skip


def linear_condition(plan: attnzoo.Plan, inputs: Inputs) -> float:
    """Σ|ψ(q)ψ(k)| / |Σ ψ(q)ψ(k)| over the last keys, median row, where a linear form runs."""
    forms = [
        c.form for c in plan.candidates
        if c.backend == plan.chosen and isinstance(c.form, attnzoo.Linear)
    ]  # fmt: skip
    if not forms:
        return 1.0
    length, device = inputs.q.shape[2], inputs.q.device
    last = torch.arange(max(0, length - ROWS), length, device=device)
    scale = inputs.q.shape[-1] ** -0.5
    psi_q = forms[0].features(scale * inputs.q.detach()[:, :, last].double(), last)
    psi_k = forms[0].features(inputs.k.detach()[:, :, last].double(), last)
    most = (psi_q.abs() @ psi_k.abs().mT).sum(-1)
    left = (psi_q @ psi_k.mT).sum(-1).abs()
    return (most / left).nan_to_num(1.0, 1.0, 1.0).median().item()


def _errors(x: Tensor, reference: Tensor) -> tuple[float, float]:
    """Root mean square and largest difference."""
    difference = x.double() - reference
    return difference.square().mean().sqrt().item(), difference.abs().max().item()
