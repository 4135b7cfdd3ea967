"""Compares the closed forms of `evals.theory.closed_forms` with measurements in fp64 as n grows.

With a fixed gap the forms are exact: a relative deviation above 1e-6 fails. With a shrinking gap
(κ = 8) they are leading terms for n → ∞: a deviation above 5 % at n ≥ 1024 fails. A law that would
give nonzero weights to n keys or more does not hold at this n and is not checked there. The forms
of the Jacobian's 2-norm at n scores of 0 are exact: a deviation above 1e-6 fails.

Variants without closed forms are only measured, on the same scores. A plugin can state closed forms
for its variants as ``LAWS``, a tuple of `Law`. They are checked in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnzoo
from commandline.errors import UsageError
from commandline.variants import VariantCall, complete
from evals.measures.heads import jacobian_norm
from evals.theory.closed_forms import LAWS, Law

LENGTHS = tuple(2**i for i in range(4, 17))
JACOBIAN_LENGTHS = (16, 64, 256)
GAPS = (0.5, 1.0, 1.5, 3.0, 6.0)
KAPPA = 8.0
EXACT_TOLERANCE = 1e-6
SHRINKING_TOLERANCE = 0.05
SHRINKING_FROM = 1024  # the leading term is checked only for n >= 1024


# ------------------------------------------------------------------------------- measurement


def top_weights(scores: Tensor, variant: str, params: Mapping[str, Any]) -> Tensor:
    """The largest weights (B, H) of a variant at scores (B, H, n), in fp64.

    A parameter is a number or a tensor (H,). Noise that belongs to training is left out.
    """
    params = {**params, **attnzoo.get_variant(variant).in_eval}
    k = scores.double()[..., None]
    q = torch.ones(*k.shape[:2], 1, 1, dtype=k.dtype)
    return attnzoo.attention_weights(q, k, k, variant, scale=1.0, **params).amax((-2, -1))


def top_weight(scores: Tensor, law: Law) -> float:
    """The largest weight of a law's variant at scores (n,)."""
    return top_weights(scores[None, None], law.variant, law.params).item()


def fixed_scores(n: int, gap: float) -> Tensor:
    """Scores (n,): one key at Δ, the others at 0."""
    return torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor([n // 2]), gap)


def shrinking_scores(n: int, kappa: float) -> Tensor:
    """Scores (n,): κ(j + ½)/n for j = 0 … n − 1."""
    return kappa * (torch.arange(n, dtype=torch.float64) + 0.5) / n


@dataclass(frozen=True)
class Comparison:
    """One comparison of a law with a measurement. The deviation is checked if ``held`` is true."""

    gap: str  # "fixed", "shrinking" or "uniform"
    size: float  # Δ or κ
    law: Law
    n: int
    predicted: float
    measured: float
    tolerance: float
    held: bool

    @property
    def deviation(self) -> float:
        """|measured / predicted − 1|."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else math.inf
        return abs(self.measured / self.predicted - 1)

    @property
    def failed(self) -> bool:
        return self.held and not self.deviation <= self.tolerance


def measure(laws: Sequence[Law] = LAWS, lengths: Sequence[int] = LENGTHS) -> list[Comparison]:
    """Compare each law with measurements: with a fixed gap for each Δ and n, with a shrinking gap
    at each n, and for the Jacobian norm at `JACOBIAN_LENGTHS`."""
    points = []
    for law in laws:
        if law.fixed is not None:
            for gap, n in itertools.product(GAPS, lengths):
                values = law.fixed(n, gap), top_weight(fixed_scores(n, gap), law)
                points.append(Comparison("fixed", gap, law, n, *values, EXACT_TOLERANCE, True))
        if law.shrinking is not None:
            for n in lengths:
                values = law.shrinking(n, KAPPA), top_weight(shrinking_scores(n, KAPPA), law)
                held = n >= SHRINKING_FROM and law.holds(n, KAPPA)
                points.append(
                    Comparison("shrinking", KAPPA, law, n, *values, SHRINKING_TOLERANCE, held)
                )
        if law.uniform is not None:
            for n in JACOBIAN_LENGTHS:
                norm = jacobian_norm(torch.zeros(n), law.variant, law.params)
                values = law.uniform(n), norm
                points.append(Comparison("uniform", 0.0, law, n, *values, EXACT_TOLERANCE, True))
    return points


def growth(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The exponent g if a value grows as n^g between the two largest n; None for values <= 0."""
    (n1, n2), (v1, v2) = lengths[-2:], values[-2:]
    return math.log(v2 / v1) / math.log(n2 / n1) if v1 > 0 and v2 > 0 else None


def without_law(laws: Sequence[Law]) -> list[VariantCall]:
    """The registered variants without a law, with example values for required parameters."""
    with_law = {law.variant for law in laws}
    names = [name for name in sorted(attnzoo.list_variants()) if name not in with_law]
    return [complete(VariantCall(name), max(LENGTHS)) for name in names]


def stated(module: object) -> tuple[Law, ...]:
    """The laws in ``LAWS`` of a plugin's module; empty if it has none.

    Raises:
        UsageError: LAWS is not a tuple of `Law`, or names a variant that is not registered.
    """
    laws = getattr(module, "LAWS", ())
    if not isinstance(laws, tuple | list) or not all(isinstance(law, Law) for law in laws):
        raise UsageError(f"LAWS of a plugin must be a tuple of evals.theory.laws.Law, got {laws!r}")
    for law in laws:
        if law.variant not in attnzoo.list_variants():
            raise UsageError(f"LAWS of a plugin must name registered variants, got {law.variant!r}")
    return tuple(laws)
