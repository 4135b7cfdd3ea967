"""The closed forms of `evals.theory.closed_forms` against measurement in fp64, as n grows.

Fixed gap: one key at Δ, n − 1 keys at 0. The forms are exact; a relative deviation above 1e-6
fails. Shrinking gap: z_j = κ(j + ½)/n for j = 0 … n − 1, κ = 8: keys that crowd as random draws do.
The forms are leading terms for n → ∞; more than 5 % off at n ≥ 1024 fails. Entmax's holds only
while its support is below n. The Jacobian's 2-norm at n scores of 0 is exact, and held to 1e-6.

A variant without closed forms is measured on the same scores; a plugin may state its own as
``LAWS``, a tuple of `Law`, and is held to them.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnzoo
from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.variants import VariantCall, complete, load_plugin
from evals.harness.jobs import lean_arithmetic
from evals.measures.heads import jacobian_norm
from evals.reporting.tables import Table
from evals.theory.closed_forms import LAWS, Law

LENGTHS = tuple(2**i for i in range(4, 17))
JACOBIAN_LENGTHS = (16, 64, 256)
GAPS = (0.5, 1.0, 1.5, 3.0, 6.0)
KAPPA = 8.0
EXACT_TOLERANCE = 1e-6
SHRINKING_TOLERANCE = 0.05
SHRINKING_FROM = 1024  # the leading term is held to its tolerance from this n on


# ------------------------------------------------------------------------------- measurement


def top_weights(scores: Tensor, variant: str, params: Mapping[str, Any]) -> Tensor:
    """The largest weights (B, H) that a variant gives to scores (B, H, n), in fp64.

    A parameter is a number, or a tensor (H,).
    """
    k = scores.double()[..., None]
    q = torch.ones(*k.shape[:2], 1, 1, dtype=k.dtype)
    return attnzoo.attention_weights(q, k, k, variant, scale=1.0, **params).amax((-2, -1))


def top_weight(scores: Tensor, law: Law) -> float:
    """The largest weight that a law's variant gives to scores (n,)."""
    return top_weights(scores[None, None], law.variant, law.params).item()


def fixed_scores(n: int, gap: float) -> Tensor:
    """One key at Δ, the others at 0."""
    return torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor([n // 2]), gap)


def shrinking_scores(n: int, kappa: float) -> Tensor:
    """κ(j + ½)/n, j = 0 … n − 1."""
    return kappa * (torch.arange(n, dtype=torch.float64) + 0.5) / n


@dataclass(frozen=True)
class Point:
    """One comparison; held says whether its tolerance counts."""

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


def measure(laws: Sequence[Law] = LAWS, lengths: Sequence[int] = LENGTHS) -> list[Point]:
    """Every law at every n: for each Δ, for κ, and of the Jacobian."""
    points = []
    for law in laws:
        if law.fixed is not None:
            for gap, n in itertools.product(GAPS, lengths):
                found = law.fixed(n, gap), top_weight(fixed_scores(n, gap), law)
                points.append(Point("fixed", gap, law, n, *found, EXACT_TOLERANCE, True))
        if law.shrinking is not None:
            for n in lengths:
                found = law.shrinking(n, KAPPA), top_weight(shrinking_scores(n, KAPPA), law)
                held = n >= SHRINKING_FROM and law.holds(n, KAPPA)
                points.append(Point("shrinking", KAPPA, law, n, *found, SHRINKING_TOLERANCE, held))
        if law.uniform is not None:
            for n in JACOBIAN_LENGTHS:
                norm = jacobian_norm(torch.zeros(n), law.variant, law.params)
                found = law.uniform(n), norm
                points.append(Point("uniform", 0.0, law, n, *found, EXACT_TOLERANCE, True))
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


def _jacobian_table(points: list[Point]) -> Table:
    """All laws, a pair of columns per n."""
    header = ["", *(text for n in JACOBIAN_LENGTHS for text in (f"n={n}", "law")), "worst"]
    rows = []
    for name in dict.fromkeys(str(point.law) for point in points):
        mine = [point for point in points if str(point.law) == name]
        pairs = [f"{x:.6f}" for point in mine for x in (point.measured, point.predicted)]
        rows.append([name, *pairs, f"{max(point.deviation for point in mine):.0e}"])
    title = "Jacobian at n scores of 0, ‖∂w/∂z‖₂ (exact; entmax-α: n^(α−2), softmax is α = 1)"
    return Table(title, header, rows)


def tables(points: list[Point]) -> list[Table]:
    """One table per law and gap, and one of all Jacobians."""
    found = []
    for make, gap in ((_fixed_table, "fixed"), (_shrinking_table, "shrinking")):
        for name in dict.fromkeys(str(point.law) for point in points):
            mine = [p for p in points if str(p.law) == name and p.gap == gap]
            if mine:
                found.append(make(mine[0].law, mine))
    if uniform := [point for point in points if point.gap == "uniform"]:
        found.append(_jacobian_table(uniform))
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


# ------------------------------------------------------------------- variants without a law


def growth(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The exponent g of a value ∝ n^g, between the two largest n; None where one is not > 0."""
    (n1, n2), (v1, v2) = lengths[-2:], values[-2:]
    return math.log(v2 / v1) / math.log(n2 / n1) if v1 > 0 and v2 > 0 else None


def measured_table(variant: VariantCall, lengths: Sequence[int] = LENGTHS) -> Table:
    """What a variant without closed forms gives: largest weights, Jacobian norm, their growth.

    Raises:
        ValueError, TypeError: the variant refuses such a call.
    """
    columns = {
        f"Δ={gap:g}": [
            top_weights(fixed_scores(n, gap)[None, None], variant.name, variant.params).item()
            for n in lengths
        ]
        for gap in GAPS
    }
    columns[f"κ={KAPPA:g}"] = [
        top_weights(shrinking_scores(n, KAPPA)[None, None], variant.name, variant.params).item()
        for n in lengths
    ]
    norms = {
        n: jacobian_norm(torch.zeros(n), variant.name, variant.params) for n in JACOBIAN_LENGTHS
    }
    rows = [
        [
            str(n),
            *(f"{values[i]:.6f}" for values in columns.values()),
            f"{norms[n]:.6f}" if n in norms else "",
        ]
        for i, n in enumerate(lengths)
    ]
    slopes = [growth(lengths, values) for values in columns.values()]
    slopes.append(growth(list(norms), list(norms.values())))
    rows.append(["growth", *("—" if slope is None else f"{slope:.3f}" for slope in slopes)])
    title = (
        f"{variant}: no closed form, measured. One key at Δ, the others at 0; keys at κ(j + ½)/n; "
        "‖∂w/∂z‖₂ at n scores of 0; growth: the exponent in n between the two largest n"
    )
    return Table(title, ["n", *columns, "Jacobian"], rows)


def _print_measured(variant: VariantCall) -> None:
    try:
        print(f"{measured_table(variant).text()}\n")
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{variant}: no closed form, and it refuses these scores: {error}\n")


def without_law(laws: Sequence[Law]) -> list[VariantCall]:
    """All registered variants that no law is of, with what they require."""
    lawful = {law.variant for law in laws}
    names = [name for name in sorted(attnzoo.list_variants()) if name not in lawful]
    return [complete(VariantCall(name), max(LENGTHS)) for name in names]


def stated(module: object) -> tuple[Law, ...]:
    """The laws that a plugin states as ``LAWS``; none if it states none.

    Raises:
        UsageError: they are no tuple of `Law`, or of a variant that is not registered.
    """
    laws = getattr(module, "LAWS", ())
    if not isinstance(laws, tuple | list) or not all(isinstance(law, Law) for law in laws):
        raise UsageError(f"a plugin's LAWS must be a tuple of evals.theory.laws.Law, got {laws!r}")
    for law in laws:
        if law.variant not in attnzoo.list_variants():
            raise UsageError(f"a plugin's LAWS: there is no variant {law.variant!r}")
    return tuple(laws)


# ------------------------------------------------------------------------------------ command


def command(out: Path | None = None, plugin: Path | None = None) -> int:
    """``laws [--out DIR] [--plugin FILE.py]``: all laws, a plugin's too, and who has none."""
    laws = (*LAWS, *(() if plugin is None else stated(load_plugin(plugin).module)))
    return main(out, laws, without_law(laws))


def main(
    out: Path | None = None, laws: Sequence[Law] = LAWS, variants: Sequence[VariantCall] = ()
) -> int:
    """Measure, print and, with ``out``, write laws.csv and laws.png; 1 if a law is broken.

    ``variants``: those without closed forms, which are measured and held to nothing.
    """
    with lean_arithmetic():
        points = measure(laws)
        for table in tables(points):
            print(f"{table.text()}\n")
        for variant in variants:
            _print_measured(variant)
    if out is not None:
        from evals.reporting.plots import laws_plot, png

        write_whole(out / "laws.csv", csv_text(points))
        write_whole(out / "laws.png", png(laws_plot(points)))
        print(f"written: {out}/laws.csv, laws.png")
    failed = [point for point in points if point.failed]
    for p in failed:
        at = "Jacobian at equal scores" if p.gap == "uniform" else f"{p.gap} gap {p.size:g}"
        print(
            f"broken: {p.law}, {at}, n = {p.n}: measured {p.measured:.8g}, "
            f"law {p.predicted:.8g}, off by {p.deviation:.2g} (allowed {p.tolerance:g})"
        )
    held = sum(point.held for point in points)
    print(f"{held - len(failed)} of {held} comparisons within tolerance")
    return 1 if failed else 0
