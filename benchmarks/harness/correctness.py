"""Each result against fp64, on 128 query rows, before anything is timed.

The reference is the definition (backend `eager`) in fp64, a few neighbouring query rows at a time
with their prefix of the keys: under bottom-right causality these are the whole rows, positions and
key counts included, in memory linear in N. Without causality a row sees all keys; its position is
then lost, and a variant which needs it is refused. For gradients the output's gradient is zero
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

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case, Inputs
from commandline.errors import UsageError

ROWS, RUN = 128, 4
RESIDUAL = 1e-6


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
    def corners(batch: int, heads: int) -> Pairs:
        """The first and the last, where a wrong stride shows most."""
        return Pairs(sorted({0, batch - 1}), sorted({0, heads - 1}))

    @staticmethod
    def all(batch: int, heads: int) -> Pairs:
        return Pairs(list(range(batch)), list(range(heads)))

    def __len__(self) -> int:
        return len(self.batches) * len(self.heads)


@dataclass(frozen=True)
class Check:
    """By name: "out", and the gradients as "dq", "dk", "dv" and "d" + a parameter's name."""

    rows: int
    deviations: dict[str, Deviation]
    pairs: int | None = None

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.deviations.values())

    @property
    def worst(self) -> tuple[str, Deviation]:
        """The one that uses up most of its budget."""
        return max(self.deviations.items(), key=lambda item: item[1].share)

    @property
    def shown(self) -> str:
        """The worst, its error, and the share of its budget."""
        name, worst = self.worst
        return f"{name} {worst.error:.1e} ({worst.share:.2f})"


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
    outs = []
    for run in runs:
        rows = slice(run.start, run.stop)
        seen = slice(run.stop) if inputs.causal else slice(None)
        prefix = {"q": q[:, :, rows], "k": k[:, :, seen], "v": v[:, :, seen]}
        given = {**leaves, **prefix}
        # Parameters stay in fp32 under half-precision inputs, as they do in a model.
        tensors = {n: _leaf(x, dtype if n in prefix else wide) for n, x in given.items()}
        params = {**inputs.params, **{n: x for n, x in tensors.items() if n not in prefix}}
        with torch.set_grad_enabled(bool(leaves)):
            out = attnzoo.attention(
                tensors["q"], tensors["k"], tensors["v"], case.variant, is_causal=inputs.causal,
                backend="eager", **params,
            )  # fmt: skip
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


def by_call(
    case: Case,
    inputs: Inputs,
    runs: list[range],
    backend: str | None,
    pairs: Pairs | None = None,
) -> dict[str, Tensor]:
    """The same tensors as `by_definition`, from one call over the whole sequence."""
    leaves = inputs.leaves()
    with torch.set_grad_enabled(bool(leaves)):
        out = attnzoo.attention(
            inputs.q, inputs.k, inputs.v, case.variant, is_causal=inputs.causal, backend=backend,
            **inputs.params,
        )  # fmt: skip
    found = {"out": at_rows(out.detach(), runs, pairs)}
    if leaves:
        where = _index(inputs.do, runs, pairs)
        do = torch.zeros_like(inputs.do)
        do[where] = inputs.do[where]
        gradients = torch.autograd.grad(out, list(leaves.values()), do)
        for name, gradient in zip(leaves, gradients, strict=True):
            if pairs is not None and name in ("q", "k", "v"):
                gradient = _spoilt(gradient[pairs.batches][:, pairs.heads], gradient)
            found[f"d{name}"] = gradient
    return found


def at_rows(x: Tensor, runs: list[range], pairs: Pairs | None) -> Tensor:
    """x (B, H, N, D) at the checked rows of the checked pairs; NaN if any of x is not finite."""
    return _spoilt(x[_index(x, runs, pairs)], x)


def _spoilt(part: Tensor, whole: Tensor) -> Tensor:
    """What was not checked row by row must be finite at least: it fails the check if it is not."""
    return part if whole.isfinite().all() else torch.full_like(part, torch.nan)


def _index(x: Tensor, runs: list[range], pairs: Pairs | None) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of batches, heads and rows that broadcast to (B, H, R)."""
    chosen = pairs or Pairs.all(*x.shape[:2])
    batches = torch.tensor(chosen.batches, device=x.device)[:, None, None]
    heads = torch.tensor(chosen.heads, device=x.device)[:, None]
    rows = torch.cat([torch.arange(run.start, run.stop, device=x.device) for run in runs])
    return batches, heads, rows


def positions_enter(case: Case) -> bool:
    """Whether a row without causality depends on where it stands among the keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 1, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    whole, first = (
        attnzoo.attention(x, k, v, case.variant, backend="eager", **case.params)
        for x in (q, q[:, :, :1])
    )
    return not torch.allclose(whole[:, :, :1], first)


def relative_error(
    case: Case, inputs: Inputs, out: Tensor, seed: int = 0, pairs: Pairs | None = None
) -> float:
    """Of another's output: the root mean square of its error, in that of fp64, on the same rows."""
    runs = check_runs(inputs.q.shape[2], seed)
    part = inputs.detached()
    part = part if pairs is None else part.part(pairs.batches, pairs.heads)
    exact = by_definition(case, part, runs, torch.float64)["out"]
    error, _ = _errors(at_rows(out.detach(), runs, pairs), exact)
    return error / _errors(exact, torch.zeros_like(exact))[0]


def check(
    case: Case,
    inputs: Inputs,
    backend: str | None,
    seed: int = 0,
    pairs: Pairs | None = None,
) -> Check:
    """Compares a call with the definition in fp64, on all (batch, head) pairs or on some."""
    if not inputs.causal and positions_enter(case):
        raise UsageError(f"{case.spec} needs positions: it is checked, and timed, causally only")
    runs = check_runs(inputs.q.shape[2], seed)
    part = inputs if pairs is None else inputs.part(pairs.batches, pairs.heads)
    exact = by_definition(case, part, runs, torch.float64)
    plain = by_definition(case, part, runs, inputs.q.dtype)
    found = by_call(case, inputs, runs, backend, pairs)
    slack = slack_of(case, inputs.q.dtype)
    growth = linear_condition(case, inputs, backend) ** 0.5
    deviations = compare(found, exact, plain, slack, growth)
    return Check(sum(map(len, runs)), deviations, None if pairs is None else len(pairs))


def slack_of(case: Case, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps + (RESIDUAL if case.has_threshold else 0.0)


def compare(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    plain: dict[str, Tensor],
    slack: float,
    growth: float = 1.0,
) -> dict[str, Deviation]:
    """By name. ``slack`` is relative; errors of the plain computation count ``growth`` times."""
    deviations = {}
    for name, reference in exact.items():
        error, largest = _errors(found[name], reference)
        plain_error, plain_largest = _errors(plain[name], reference)
        rms, peak = _errors(reference, torch.zeros_like(reference))
        deviations[name] = Deviation(
            error,
            2 * growth * plain_error + slack * rms,
            largest,
            8 * growth * plain_largest + slack * peak,
        )
    return deviations


def linear_condition(case: Case, inputs: Inputs, backend: str | None) -> float:
    """Σ|ψ(q)ψ(k)| / |Σ ψ(q)ψ(k)| over the last keys, median row, where the linear form runs."""
    plan = attnzoo.explain(
        inputs.q, inputs.k, inputs.v, case.variant, is_causal=inputs.causal, backend=backend,
        **inputs.params,
    )  # fmt: skip
    forms = [c.form for c in plan.candidates if isinstance(c.form, attnzoo.Linear)]
    if plan.chosen not in ("linear", "flash_linear") or not forms:
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
