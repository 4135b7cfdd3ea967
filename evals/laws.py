"""The closed forms of each normalizer's largest weight as n grows, against measurement in fp64.

Fixed gap: one key at Δ, n − 1 keys at 0. The forms are exact; a relative deviation above 1e-6
fails. Shrinking gap: z_j = κ(j + ½)/n for j = 0 … n − 1, κ = 8: keys that crowd as random draws do.
The forms are leading terms for n → ∞; more than 5 % off at n ≥ 1024 fails. Entmax's holds only
while its support is below n. Sigmoid looks at one key at a time: that gap has no law for it.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import attnzoo
from evals.store import write_whole
from evals.tables import Table

LENGTHS = tuple(2**i for i in range(4, 17))
GAPS = (0.5, 1.0, 1.5, 3.0, 6.0)
KAPPA = 8.0
FIXED_TOLERANCE = 1e-6
SHRINKING_TOLERANCE = 0.05
SHRINKING_FROM = 1024  # the leading term is held to its tolerance from this n on


@dataclass(frozen=True)
class Law:
    """A variant with the closed forms of its largest weight.

    fixed(n, Δ) is exact; shrinking(n, κ) is the leading term for n → ∞; holds(n, κ) says whether n
    is large enough for it to mean anything.
    """

    variant: str
    params: dict[str, Any] = field(default_factory=dict)
    fixed: Callable[[int, float], float] | None = None
    shrinking: Callable[[int, float], float] | None = None
    holds: Callable[[int, float], bool] = lambda n, kappa: True

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value}" for name, value in self.params.items())
        return f"{self.variant}({inside})" if inside else self.variant


# ----------------------------------------------------------------------------- the closed forms


def softmax_fixed(n: int, gap: float) -> float:
    """1 / (1 + (n − 1) e^{−Δ}) → 0, as e^Δ / n."""
    return 1 / (1 + (n - 1) * math.exp(-gap))


def softmax_shrinking(n: int, kappa: float) -> float:
    """κ / (n (1 − e^{−κ})); the grid's sum itself is (1 − e^{−κ/n}) / (1 − e^{−κ})."""
    return kappa / (n * (1 - math.exp(-kappa)))


def with_log_gain(form: Callable[[int, float], float], s: float) -> Callable[[int, float], float]:
    """A softmax law under the gain s log n: Δ and κ become s log n times as large.

    Fixed: 1 / (1 + (n − 1) n^{−sΔ}) → 1 iff sΔ > 1. Shrinking: sκ log n / (n (1 − n^{−sκ})).
    """
    return lambda n, size: form(n, s * math.log(n) * size)


def sparsemax_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 1, else (1 + (n − 1)Δ) / n → Δ."""
    return 1.0 if gap >= 1 else (1 + (n - 1) * gap) / n


def entmax15_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 2, else (a + u)², a = Δ/2, u = (−a + √(a² + n(1 − a²))) / n → Δ²/4."""
    a = gap / 2
    return 1.0 if a >= 1 else (a + (math.sqrt(a * a + n * (1 - a * a)) - a) / n) ** 2


def entmax_shrinking(alpha: float) -> Callable[[int, float], float]:
    """(ακ/n)^{1/α}: the sum over the grid as an integral, n/κ ∫ ((α−1)x)^{1/(α−1)} dx = 1.

    The integral leaves out half of the top key, so that the next term is −p/(2α) of it.
    """
    return lambda n, kappa: (alpha * kappa / n) ** (1 / alpha)


def entmax_support_below(alpha: float) -> Callable[[int, float], bool]:
    """Whether the support n p^{α−1} / ((α−1)κ) that the law implies is below n."""

    def holds(n: int, kappa: float) -> bool:
        return entmax_shrinking(alpha)(n, kappa) ** (alpha - 1) < (alpha - 1) * kappa

    return holds


def sigmoid_fixed(n: int, gap: float) -> float:
    """1 / (1 + n e^{−Δ}) with b = −log n → 0."""
    return 1 / (1 + n * math.exp(-gap))


LAWS = (
    Law("softmax", {}, softmax_fixed, softmax_shrinking),
    Law(
        "ssmax",
        {"s": 0.43},
        with_log_gain(softmax_fixed, 0.43),
        with_log_gain(softmax_shrinking, 0.43),
    ),
    Law(
        "log_n",
        {"train_length": 16},
        with_log_gain(softmax_fixed, 1 / math.log(16)),
        with_log_gain(softmax_shrinking, 1 / math.log(16)),
    ),
    Law("sparsemax", {}, sparsemax_fixed, entmax_shrinking(2.0), entmax_support_below(2.0)),
    Law("entmax", {}, entmax15_fixed, entmax_shrinking(1.5), entmax_support_below(1.5)),
    Law(
        "entmax",
        {"alpha": 1.25},
        None,
        entmax_shrinking(1.25),
        entmax_support_below(1.25),
    ),
    Law("sigmoid", {}, sigmoid_fixed),
)


# ------------------------------------------------------------------------------- measurement


def top_weight(scores: torch.Tensor, law: Law) -> float:
    """The largest weight that a variant gives to these scores (n,), in fp64."""
    k = scores.double()[None, None, :, None]
    weights = attnzoo.attention_weights(
        torch.ones(1, 1, 1, 1, dtype=torch.float64), k, k, law.variant, scale=1.0, **law.params
    )
    return weights.max().item()


def fixed_scores(n: int, gap: float) -> torch.Tensor:
    """One key at Δ, the others at 0."""
    return torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor([n // 2]), gap)


def shrinking_scores(n: int, kappa: float) -> torch.Tensor:
    """κ(j + ½)/n, j = 0 … n − 1."""
    return kappa * (torch.arange(n, dtype=torch.float64) + 0.5) / n


@dataclass(frozen=True)
class Point:
    """One comparison; held says whether its tolerance counts."""

    gap: str  # "fixed" or "shrinking"
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
        return abs(self.measured / self.predicted - 1)

    @property
    def failed(self) -> bool:
        return self.held and not self.deviation <= self.tolerance


def measure(laws: Sequence[Law] = LAWS, lengths: Sequence[int] = LENGTHS) -> list[Point]:
    """Every law at every n, for each Δ and for κ."""
    points = []
    for law in laws:
        if law.fixed is not None:
            for gap, n in itertools.product(GAPS, lengths):
                found = law.fixed(n, gap), top_weight(fixed_scores(n, gap), law)
                points.append(Point("fixed", gap, law, n, *found, FIXED_TOLERANCE, True))
        if law.shrinking is not None:
            for n in lengths:
                found = law.shrinking(n, KAPPA), top_weight(shrinking_scores(n, KAPPA), law)
                held = n >= SHRINKING_FROM and law.holds(n, KAPPA)
                points.append(Point("shrinking", KAPPA, law, n, *found, SHRINKING_TOLERANCE, held))
    return points


# ------------------------------------------------------------------------------------ showing


def _fixed_table(law: Law, points: list[Point]) -> Table:
    """Measured beside predicted, a pair of columns per Δ."""
    header = ["n", *(text for gap in GAPS for text in (f"Δ={gap:g}", "law")), "worst"]
    rows = []
    for n in dict.fromkeys(point.n for point in points):
        mine = [point for point in points if point.n == n]
        pairs = [f"{x:.6f}" for point in mine for x in (point.measured, point.predicted)]
        rows.append([str(n), *pairs, f"{max(point.deviation for point in mine):.0e}"])
    return Table(f"{law}: one key at Δ, the others at 0 (exact)", header, rows)


def _shrinking_table(law: Law, points: list[Point]) -> Table:
    """Measured beside predicted, with the reason where a point is not held to the law."""
    rows = []
    for point in points:
        why = "" if point.n >= SHRINKING_FROM else "n small"
        if not law.holds(point.n, KAPPA):
            why = "support = n: no law"
        deviation = f"{100 * point.deviation:.2f} %"
        rows.append(
            [str(point.n), f"{point.measured:.6f}", f"{point.predicted:.6f}", deviation, why]
        )
    title = f"{law}: keys at κ(j + ½)/n, κ = {KAPPA:g} (leading term for n → ∞)"
    return Table(title, ["n", "measured", "law", "off", "not held to it"], rows)


def tables(points: list[Point]) -> list[Table]:
    """One table per law and gap."""
    found = []
    for make, gap in ((_fixed_table, "fixed"), (_shrinking_table, "shrinking")):
        for name in dict.fromkeys(str(point.law) for point in points):
            mine = [p for p in points if str(p.law) == name and p.gap == gap]
            if mine:
                found.append(make(mine[0].law, mine))
    return found


def csv_text(points: list[Point]) -> str:
    """laws.csv: one line per comparison."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ("variant", "gap", "size", "n", "measured", "predicted", "deviation", "tolerance")
    writer.writerow([*names, "held", "failed"])
    for p in points:
        numbers = [f"{x:.12g}" for x in (p.measured, p.predicted)]
        start = [str(p.law), p.gap, p.size, p.n, *numbers]
        writer.writerow([*start, f"{p.deviation:.3g}", p.tolerance, int(p.held), int(p.failed)])
    return file.getvalue()


def main(out: Path | None = None, laws: Sequence[Law] = LAWS) -> int:
    """Measure, print and, with ``out``, write laws.csv and laws.png; 1 if a law is broken."""
    points = measure(laws)
    for table in tables(points):
        print(f"{table.text()}\n")
    if out is not None:
        from evals.plots import laws_plot, png

        write_whole(out / "laws.csv", csv_text(points))
        write_whole(out / "laws.png", png(laws_plot(points)))
        print(f"written: {out}/laws.csv, laws.png")
    failed = [point for point in points if point.failed]
    for p in failed:
        print(
            f"broken: {p.law}, {p.gap} gap {p.size:g}, n = {p.n}: measured {p.measured:.8g}, "
            f"law {p.predicted:.8g}, off by {p.deviation:.2g} (allowed {p.tolerance:g})"
        )
    held = sum(point.held for point in points)
    print(f"{held - len(failed)} of {held} comparisons within tolerance")
    return 1 if failed else 0
