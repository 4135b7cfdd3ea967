"""Compares up to 128 query rows of the results with fp64, before anything is timed.

**Reference.** The definition (backend `eager`) in fp64, computed for a few consecutive query rows
at a time. In causal calls the keys after the last of these rows are left out. The causal mask
aligns bottom-right, so each row keeps its position and its number of keys, and memory is linear in
N. In non-causal calls a block of rows gets all keys, but other positions than in the whole call.
Variants that use positions are therefore not checked there, unless one block contains all rows. For
gradients, dO is zero outside the checked rows. With many (batch, head) pairs only some are compared
(`Pairs`); the others must be finite.

**Error budget.** The plain computation is the definition in the inputs' dtype, for the same rows. A
result's rms error may be twice the rms error of the plain computation. The largest error may be
eight times the largest error of the plain computation: where the terms of a sum cancel, one order
of summation may give exactly 0 while another leaves a rounding error. Both budgets also allow one
rounding and, for threshold variants, the solver's residual (1e-6 in Σw). In a linear form each
weight is a sum of F products of features, whose terms may cancel too. There the error of the plain
computation is multiplied by √(Σ|ψψ| / |Σψψ|); see `linear_condition`.
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

ROWS, BLOCK = 128, 4
MAX_PAIRS = 16
RESIDUAL = 1e-6
# Error of the exp in torch's fused CPU kernel, in units in the last place. For a single query with
# many small weights this error exceeds all others.
SDPA_EXP = 20


@dataclass(frozen=True)
class Deviation:
    """The rms error and the largest error of one tensor, each with the allowed value (budget)."""

    error: float
    budget: float
    largest: float
    largest_budget: float

    @property
    def share(self) -> float:
        """error / budget of the rms or of the largest error, whichever is larger; inf for NaN."""
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
    """The checked (batch, head) pairs: every combination of a batch and a head listed here."""

    batches: list[int]
    heads: list[int]

    @staticmethod
    def of(batch: int, heads: int, rows: int) -> Pairs:
        """All pairs, or the first and last batch and head if there are more than `MAX_PAIRS` pairs.

        A wrong stride has the largest effect on the last pair. In calls with one query all heads
        are checked, because kernels process them together.
        """
        if batch * heads <= MAX_PAIRS:
            return Pairs(list(range(batch)), list(range(heads)))
        ends = sorted({0, heads - 1})
        return Pairs(sorted({0, batch - 1}), list(range(heads)) if rows == 1 else ends)

    def __len__(self) -> int:
        return len(self.batches) * len(self.heads)


@dataclass(frozen=True)
class Check:
    """The number of checked rows and pairs, and the deviations of "out", "dq", "dk" and so on."""

    rows: int
    pairs: int
    deviations: dict[str, Deviation]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.deviations.values())

    @property
    def worst(self) -> tuple[str, Deviation]:
        """The deviation that uses the largest share of its budget, with its name."""
        return max(self.deviations.items(), key=lambda item: item[1].share)

    def record(self) -> dict[str, Any]:
        """Name, error and budget share of the worst tensor for JSON; None for NaN and infinity."""
        name, worst = self.worst
        error, share = (x if math.isfinite(x) else None for x in (worst.error, worst.share))
        return {"ok": self.ok, "rows": self.rows, "pairs": self.pairs, "worst": name,
                "error": error, "share": share}  # fmt: skip


def rows_to_check(length: int, seed: int = 0) -> list[range]:
    """Sorted ranges of the query rows to check: the first, the last, and random blocks between."""
    if length <= ROWS:
        return [range(length)]
    ends = ROWS // 4
    generator = torch.Generator().manual_seed(seed + length)
    blocks = torch.randperm((length - 2 * ends) // BLOCK, generator=generator)
    starts = (ends + BLOCK * blocks[: (ROWS - 2 * ends) // BLOCK]).sort().values.tolist()
    middle = [range(start, start + BLOCK) for start in starts]
    return [range(ends), *middle, range(length - ends, length)]


def by_definition(
    case: Case, inputs: Inputs, ranges: list[range], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output (B, H, R, D) of `eager` for the rows in ``ranges``, and gradients.

    The gradients are computed as if dO were 0 in all other rows.
    """
    q, k, v, do = (x.detach().to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    leaves = inputs.leaves()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Sums are accumulated in fp32 and rounded once, as in a matrix product.
    sums = {n: torch.zeros_like(x, dtype=wide, requires_grad=False) for n, x in leaves.items()}
    outs, offset = [], k.shape[2] - q.shape[2]
    for block in ranges:
        rows = slice(block.start, block.stop)
        keys = slice(offset + block.stop) if inputs.causal else slice(None)
        prefix = {"q": q[:, :, rows], "k": k[:, :, keys], "v": v[:, :, keys]}
        parts = {**leaves, **prefix}
        # Parameters stay in fp32 with half-precision inputs, as in a model.
        tensors = {n: _leaf(x, dtype if n in prefix else wide) for n, x in parts.items()}
        params = {**inputs.params, **{n: x for n, x in tensors.items() if n not in prefix}}
        with torch.set_grad_enabled(bool(leaves)):
            attend = case.attend(params, "eager", **inputs.options)
            out = attend(tensors["q"], tensors["k"], tensors["v"])
        outs.append(out.detach())
        if leaves:
            differentiated = [tensors[n] for n in leaves]
            gradients = torch.autograd.grad(out, differentiated, do[:, :, rows])
            for (name, total), gradient in zip(sums.items(), gradients, strict=True):
                if name in ("q", "k", "v"):
                    total[:, :, rows if name == "q" else keys] += gradient
                else:
                    total += gradient
    rounded = {f"d{n}": x.to(dtype if n in ("q", "k", "v") else wide) for n, x in sums.items()}
    return {"out": torch.cat(outs, dim=2), **rounded}


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_()


def by_call(attend: Attend, inputs: Inputs, ranges: list[range], pairs: Pairs) -> dict[str, Tensor]:
    """The tensors of `by_definition` for these pairs, computed by one call on all inputs."""
    leaves = inputs.leaves()
    with torch.set_grad_enabled(bool(leaves)):
        out = attend(inputs.q, inputs.k, inputs.v)
    results = {"out": _finite(out.detach()[_index(out, ranges, pairs)], out)}
    if leaves:
        index = _index(inputs.do, ranges, pairs)
        do = torch.zeros_like(inputs.do)
        do[index] = inputs.do[index]
        gradients = torch.autograd.grad(out, list(leaves.values()), do)
        group = inputs.q.shape[1] // inputs.k.shape[1]
        of_kv = sorted({head // group for head in pairs.heads})
        for name, gradient in zip(leaves, gradients, strict=True):
            heads = of_kv if name in ("k", "v") else pairs.heads
            has_batches = name in ("q", "k", "v")
            part = gradient[pairs.batches][:, heads] if has_batches else gradient[heads]
            results[f"d{name}"] = _finite(part, gradient)
    return results


def _finite(part: Tensor, full: Tensor) -> Tensor:
    """``part``, or NaN everywhere if a value in ``full`` is not finite."""
    return part if full.isfinite().all() else torch.full_like(part, torch.nan)


def _index(x: Tensor, ranges: list[range], pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Index tensors for batches, heads and query rows, which broadcast to (B, H, R)."""
    batches = torch.tensor(pairs.batches, device=x.device)[:, None, None]
    heads = torch.tensor(pairs.heads, device=x.device)[:, None]
    rows = torch.cat([torch.arange(block.start, block.stop, device=x.device) for block in ranges])
    return batches, heads, rows


@dataclass(frozen=True)
class Reference:
    """Reference results of a case for the checked query rows of the checked pairs."""

    case: Case
    inputs: Inputs
    ranges: list[range]
    pairs: Pairs
    exact: dict[str, Tensor]  # in fp64
    plain: dict[str, Tensor]  # in the inputs' dtype

    @staticmethod
    def of(case: Case, inputs: Inputs, seed: int = 0, pairs: Pairs | None = None) -> Reference:
        batch, heads, rows, _ = inputs.q.shape
        ranges = rows_to_check(rows, seed)
        positional = attnzoo.get_variant(case.variant).by_position
        if positional and not inputs.causal and len(ranges) > 1:
            raise UsageError(f"{case.spec} can only be checked in causal calls: it uses positions")
        pairs = pairs or Pairs.of(batch, heads, rows)
        part = inputs.part(pairs.batches, pairs.heads)
        exact, plain = (
            by_definition(case, part, ranges, dtype) for dtype in (torch.float64, inputs.q.dtype)
        )
        return Reference(case, inputs, ranges, pairs, exact, plain)

    def check(self, backend: str | None, gradients: bool) -> Check:
        """Compares `attnzoo.attention` on this backend with the reference."""
        inputs = self.inputs if gradients else self.inputs.detached()
        attend = self.case.attend(inputs.params, backend, **inputs.options)
        results = by_call(attend, inputs, self.ranges, self.pairs)
        plan = plan_of(self.case, inputs, backend)
        slack = torch.finfo(inputs.q.dtype).eps + (RESIDUAL if self.case.has_threshold else 0.0)
        if inputs.q.shape[2] == 1 and plan.chosen == "sdpa" and inputs.q.device.type == "cpu":
            slack += SDPA_EXP * torch.finfo(torch.float32).eps
        growth = linear_condition(plan, inputs) ** 0.5
        deviations = {
            n: deviation(x, self.plain[n], self.exact[n], slack, growth) for n, x in results.items()
        }
        return Check(sum(map(len, self.ranges)), len(self.pairs), deviations)

    def relative_error(self, attend: Attend, inputs: Inputs) -> float:
        """The rms error of a baseline's output, divided by the rms of the exact output.

        ``inputs`` have the values of the reference's inputs, perhaps in another layout.
        """
        out = by_call(attend, inputs, self.ranges, self.pairs)["out"]
        exact = self.exact["out"]
        return _errors(out, exact)[0] / _errors(exact, torch.zeros_like(exact))[0]


def deviation(
    actual: Tensor, plain: Tensor, exact: Tensor, slack: float, growth: float = 1.0
) -> Deviation:
    """The errors of the tensor ``actual`` and their budgets.

    plain, exact: the same from a plain computation, in the dtype of the inputs and in fp64. slack:
    an additional allowed error, relative to the exact values. growth: a factor on the errors of the
    plain computation.
    """
    error, largest = _errors(actual, exact)
    plain_error, plain_largest = _errors(plain, exact)
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
    """Median over the last `ROWS` queries of Σ|ψ(q)ψ(k)| / |Σ ψ(q)ψ(k)|; 1 for pairwise forms.

    The sums are over the last `ROWS` keys and all features ψ.
    """
    forms = [
        c.form for c in plan.candidates
        if c.backend == plan.chosen and isinstance(c.form, attnzoo.Linear)
    ]  # fmt: skip
    if not forms:
        return 1.0
    length, device = inputs.q.shape[2], inputs.q.device
    last = torch.arange(max(0, length - ROWS), length, device=device)
    scale = inputs.q.shape[-1] ** -0.5
    psi_q = forms[0].of_queries(scale * inputs.q.detach()[:, :, last].double(), last)
    psi_k = forms[0].features(inputs.k.detach()[:, :, last].double(), last)
    absolute = (psi_q.abs() @ psi_k.abs().mT).sum(-1)
    total = (psi_q @ psi_k.mT).sum(-1).abs()
    return (absolute / total).nan_to_num(1.0, 1.0, 1.0).median().item()


def _errors(x: Tensor, reference: Tensor) -> tuple[float, float]:
    """The rms difference and the largest absolute difference of two tensors."""
    difference = x.double() - reference
    return difference.square().mean().sqrt().item(), difference.abs().max().item()
