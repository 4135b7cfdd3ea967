"""Compares the closed forms of `evals.theory.closed_forms` with measurements in fp64 as n grows.

With a fixed gap the forms are exact: a relative deviation above 1e-6 fails. With a shrinking gap
(κ = 8) they are leading terms for n → ∞: a deviation above 5 % at n ≥ 1024 fails. A law that would
give nonzero weights to n keys or more does not hold at this n and is not checked there. The forms
of the Jacobian's 2-norm at n scores of 0 are exact: a deviation above 1e-6 fails.

Variants without closed forms are only measured, on the same scores. A plugin can state closed forms
for its variants as ``LAWS``, a tuple of `Law`. They are checked in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import attnzoo
from commandline.errors import UsageError
from commandline.table import Table
from commandline.variants import VariantCall, complete
from evals.measures.heads import jacobian_norms, weights_at
from evals.theory.closed_forms import LAWS, Law

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = tuple(2**i for i in range(4, 17))
JACOBIAN_LENGTHS = (16, 64, 256)
GAPS = (0.5, 1.0, 1.5, 3.0, 6.0)
KAPPA = 8.0
TOLERANCES = {"fixed": 1e-6, "shrinking": 0.05, "uniform": 1e-6}
SHRINKING_FROM = 1024  # the leading term is checked only for n >= 1024


# ------------------------------------------------------------------------------- measurement


def fixed_scores(n: int, gap: float) -> Tensor:
    """Scores (n,): one key at Δ, the others at 0."""
    return torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor([n // 2]), gap)


def shrinking_scores(n: int, kappa: float) -> Tensor:
    """Scores (n,): κ(j + ½)/n for j = 0 … n − 1."""
    return kappa * (torch.arange(n, dtype=torch.float64) + 0.5) / n


def measurement(law: Law, gap: str, size: float, n: int) -> float:
    """The largest weight of the law's variant, or its Jacobian norm for the gap "uniform".

    size: Δ or κ.
    """
    if gap == "uniform":
        return jacobian_norms(torch.zeros(1, 1, n), law.variant, law.params).item()
    scores = (fixed_scores if gap == "fixed" else shrinking_scores)(n, size)
    return weights_at(scores[None, None], law.variant, law.params).amax().item()


def cases(lengths: Sequence[int]) -> Iterator[tuple[str, float, int]]:
    """The measurements of each variant, as (gap, Δ or κ, n)."""
    yield from (("fixed", gap, n) for gap in GAPS for n in lengths)
    yield from (("shrinking", KAPPA, n) for n in lengths)
    yield from (("uniform", 0.0, n) for n in JACOBIAN_LENGTHS)


def measure(laws: Sequence[Law] = LAWS, lengths: Sequence[int] = LENGTHS) -> pd.DataFrame:
    """Compare each closed form with measurements, in one line per law, gap, size and n.

    Columns: variant, gap ("fixed", "shrinking" or "uniform"), size (Δ or κ), n, measured,
    predicted, deviation (|measured / predicted − 1|), tolerance, held (whether the deviation is
    checked), failed, and holds (whether n is large enough for the law).
    """
    import pandas as pd

    lines = []
    for law in laws:
        for gap, size, n in cases(lengths):
            if (form := getattr(law, gap)) is not None:
                predicted = form(n) if gap == "uniform" else form(n, size)
                holds = gap != "shrinking" or law.holds(n, size)
                held = holds and (gap != "shrinking" or n >= SHRINKING_FROM)
                values = measurement(law, gap, size, n), predicted, TOLERANCES[gap]
                lines.append((str(law), gap, size, n, *values, held, holds))
    columns = "variant gap size n measured predicted tolerance held holds".split()
    points = pd.DataFrame(lines, columns=columns)
    deviation = (points["measured"] / points["predicted"] - 1).abs()
    points.insert(6, "deviation", deviation.mask(points["measured"] == points["predicted"], 0.0))
    points["failed"] = points["held"] & ~(points["deviation"] <= points["tolerance"])
    return points


def without_law(laws: Sequence[Law]) -> list[Law]:
    """The registered variants without a closed form, with example values of required parameters."""
    names = sorted({*attnzoo.list_variants()} - {law.variant for law in laws})
    calls = [complete(VariantCall(name), max(LENGTHS)) for name in names]
    return [Law(call.name, call.params) for call in calls]


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


# ------------------------------------------------------------------------------------- tables


def tables(points: pd.DataFrame) -> list[Table]:
    """The tables: one for each law and kind of gap, and one for all Jacobian norms."""
    by_gap = dict(iter(points.groupby("gap")))
    all_tables = [
        make_table(str(name), lines)
        for make_table, gap in ((_fixed_table, "fixed"), (_shrinking_table, "shrinking"))
        if gap in by_gap
        for name, lines in by_gap[gap].groupby("variant", sort=False)
    ]
    if "uniform" in by_gap:
        title = "Jacobian norm ‖∂w/∂z‖₂ at n scores of 0; the law is exact"
        names = [f"n={n}" for n in JACOBIAN_LENGTHS]
        all_tables.append(_pairs(title, by_gap["uniform"], "variant", names))
    return all_tables


def _pairs(title: str, points: pd.DataFrame, by: str, names: Sequence[str]) -> Table:
    """A row per value of ``by``, with a measurement and its law for each of ``names``."""
    rows = [
        [str(value), *(f"{x:.6f}" for x in lines[["measured", "predicted"]].to_numpy().flat),
         f"{lines['deviation'].max(skipna=False):.0e}"]
        for value, lines in points.groupby(by, sort=False)
    ]  # fmt: skip
    header = [by, *(text for name in names for text in (name, "law")), "largest deviation"]
    return Table(title, header, rows)


def _fixed_table(name: str, points: pd.DataFrame) -> Table:
    title = f"{name}: largest weight with one key at Δ, the others at 0; the law is exact"
    return _pairs(title, points, "n", [f"Δ={gap:g}" for gap in GAPS])


def _shrinking_table(name: str, points: pd.DataFrame) -> Table:
    """One row per n: measurement, prediction, and the reason if the point is not checked."""
    rows = []
    columns = ["n", "measured", "predicted", "deviation", "holds"]
    for n, value, law, deviation, holds in points[columns].itertuples(index=False):
        why = "" if n >= SHRINKING_FROM else f"n < {SHRINKING_FROM}"
        why = why if holds else "no law: all weights > 0"
        rows.append([str(n), f"{value:.6f}", f"{law:.6f}", f"{100 * deviation:.2f} %", why])
    title = (
        f"{name}: largest weight with keys at κ(j + ½)/n, κ = {KAPPA:g}; the law is the "
        "leading term for n → ∞"
    )
    return Table(title, ["n", "measured", "law", "deviation", "not checked because"], rows)


def growth(values: dict[int, float]) -> float | None:
    """The exponent g if values by n grow as n^g between the two largest n; None for values <= 0."""
    (n1, v1), (n2, v2) = list(values.items())[-2:]
    return math.log(v2 / v1) / math.log(n2 / n1) if v1 > 0 and v2 > 0 else None


def measured_table(law: Law, lengths: Sequence[int] = LENGTHS) -> Table:
    """A table for a variant without closed forms: largest weights, Jacobian norms, their growth.

    Raises:
        ValueError, TypeError: the variant does not support the calls of the measurement.
    """
    names = {"fixed": "Δ={:g}", "shrinking": "κ={:g}", "uniform": "Jacobian norm"}
    columns: dict[str, dict[int, float]] = {}
    for gap, size, n in cases(lengths):
        columns.setdefault(names[gap].format(size), {})[n] = measurement(law, gap, size, n)
    rows = [
        [str(n), *(f"{values[n]:.6f}" if n in values else "" for values in columns.values())]
        for n in lengths
    ]
    slopes = [growth(values) for values in columns.values()]
    rows.append(["growth", *("—" if slope is None else f"{slope:.3f}" for slope in slopes)])
    note = (
        "Δ: largest weight with one key at Δ, the others at 0. κ: largest weight with keys at\n"
        "κ(j + ½)/n. Jacobian norm: ‖∂w/∂z‖₂ at n scores of 0. Growth: exponent of n between the\n"
        "two largest n."
    )
    return Table(f"{law}: measured only, no closed form", ["n", *columns], rows, note)
