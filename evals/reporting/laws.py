"""The command ``laws``: prints tables of laws and measurements; writes laws.csv and laws.png."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

import attnzoo
from commandline.errors import UsageError
from commandline.files import check_writable, write_whole
from commandline.table import Table
from commandline.variants import VariantCall, load_plugin
from evals.measures.arithmetic import lean_arithmetic
from evals.measures.heads import jacobian_norm
from evals.options import check_unique
from evals.reporting.plots import GRID, length_axis, looks_of, png
from evals.theory.closed_forms import LAWS, Law
from evals.theory.laws import (
    GAPS,
    JACOBIAN_LENGTHS,
    KAPPA,
    LENGTHS,
    SHRINKING_FROM,
    Comparison,
    fixed_scores,
    growth,
    measure,
    shrinking_scores,
    stated,
    top_weights,
    without_law,
)


def _fixed_table(law: Law, points: list[Comparison]) -> Table:
    """One row per n: the measured largest weight and the law's prediction for each score gap Δ."""
    header = ["n", *(text for gap in GAPS for text in (f"Δ={gap:g}", "law"))]
    rows = []
    for n in dict.fromkeys(point.n for point in points):
        points_at_n = [point for point in points if point.n == n]
        pairs = [f"{x:.6f}" for point in points_at_n for x in (point.measured, point.predicted)]
        rows.append([str(n), *pairs, f"{max(point.deviation for point in points_at_n):.0e}"])
    title = f"{law}: largest weight with one key at Δ, the others at 0; the law is exact"
    return Table(title, [*header, "largest deviation"], rows)


def _shrinking_table(law: Law, points: list[Comparison]) -> Table:
    """One row per n: measurement, prediction, and the reason if the point is not checked."""
    rows = []
    for point in points:
        why = "" if point.n >= SHRINKING_FROM else f"n < {SHRINKING_FROM}"
        if not law.holds(point.n, KAPPA):
            why = "no law: all weights > 0"
        deviation = f"{100 * point.deviation:.2f} %"
        rows.append(
            [str(point.n), f"{point.measured:.6f}", f"{point.predicted:.6f}", deviation, why]
        )
    title = (
        f"{law}: largest weight with keys at κ(j + ½)/n, κ = {KAPPA:g}; the law is the "
        "leading term for n → ∞"
    )
    return Table(title, ["n", "measured", "law", "deviation", "not checked because"], rows)


def _jacobian_table(points: list[Comparison]) -> Table:
    """One row per variant: the measured norm and the law's prediction at each n."""
    header = ["variant", *(text for n in JACOBIAN_LENGTHS for text in (f"n={n}", "law"))]
    rows = []
    for name in dict.fromkeys(str(point.law) for point in points):
        variant_points = [point for point in points if str(point.law) == name]
        pairs = [f"{x:.6f}" for point in variant_points for x in (point.measured, point.predicted)]
        rows.append([name, *pairs, f"{max(point.deviation for point in variant_points):.0e}"])
    title = "Jacobian norm ‖∂w/∂z‖₂ at n scores of 0; the law is exact"
    return Table(title, [*header, "largest deviation"], rows)


def tables(points: list[Comparison]) -> list[Table]:
    """The tables: one for each law and kind of gap, and one for all Jacobian norms."""
    all_tables = []
    for make_table, gap in ((_fixed_table, "fixed"), (_shrinking_table, "shrinking")):
        for name in dict.fromkeys(str(point.law) for point in points):
            law_points = [p for p in points if str(p.law) == name and p.gap == gap]
            if law_points:
                all_tables.append(make_table(law_points[0].law, law_points))
    if uniform := [point for point in points if point.gap == "uniform"]:
        all_tables.append(_jacobian_table(uniform))
    return all_tables


def csv_text(points: list[Comparison]) -> str:
    """The text of laws.csv, with a line per comparison of a law with a measurement.

    The column ``held`` is 1 if the deviation is checked against the tolerance, otherwise 0.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = ("variant", "gap", "size", "n", "measured", "predicted", "deviation", "tolerance")
    writer.writerow([*names, "held", "failed"])
    for p in points:
        numbers = [f"{x:.12g}" for x in (p.measured, p.predicted)]
        start = [str(p.law), p.gap, p.size, p.n, *numbers]
        writer.writerow([*start, f"{p.deviation:.3g}", p.tolerance, int(p.held), int(p.failed)])
    return file.getvalue()


def measured_table(variant: VariantCall, lengths: Sequence[int] = LENGTHS) -> Table:
    """A table for a variant without closed forms: largest weights, Jacobian norms, their growth.

    Raises:
        ValueError, TypeError: the variant does not support the calls of the measurement.
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
    note = (
        "Δ: largest weight with one key at Δ, the others at 0. κ: largest weight with keys at\n"
        "κ(j + ½)/n. Jacobian norm: ‖∂w/∂z‖₂ at n scores of 0. Growth: exponent of n between the\n"
        "two largest n."
    )
    title = f"{variant}: measured only, no closed form"
    return Table(title, ["n", *columns, "Jacobian norm"], rows, note)


def _print_measured(variant: VariantCall) -> None:
    try:
        print(f"{measured_table(variant).text()}\n")
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"{variant}: no closed form, and not measured: {error}\n")


def plot(points: list[Comparison]) -> Figure:
    """Plot laws as lines and measurements as marks, for two fixed gaps and the shrinking gap."""
    panels = [("fixed", 1.5), ("fixed", 3.0), ("shrinking", KAPPA)]
    titles = ["one key at Δ = 1.5, others at 0", "one key at Δ = 3, others at 0",
              f"keys at κ(j + ½)/n, κ = {KAPPA:g}"]  # fmt: skip
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    grid = figure.subplots(1, 3)
    names = list(dict.fromkeys(str(point.law) for point in points))
    looks = looks_of(names)
    for axes, (gap, size), title in zip(grid, panels, titles, strict=True):
        for name in names:
            law_points = [p for p in points if (str(p.law), p.gap, p.size) == (name, gap, size)]
            if not law_points:
                continue
            look = looks[name]
            valid = [p for p in law_points if p.law.holds(p.n, p.size)]
            axes.plot([p.n for p in valid], [p.predicted for p in valid], color=look["color"],
                      linestyle=look["linestyle"], linewidth=1.3)  # fmt: skip
            axes.plot([p.n for p in law_points], [p.measured for p in law_points],
                      color=look["color"], marker=look["marker"], markersize=5, linestyle="",
                      label=name)  # fmt: skip
        length_axis(axes, [16, 256, 4096, 65536])
        axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.grid(**GRID)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("largest weight")
    figure.suptitle("Laws (lines) and measurements in fp64 (marks)", x=0.01, ha="left")
    handles, labels = grid[0].get_legend_handles_labels()
    more = dict(zip(*grid[2].get_legend_handles_labels()[::-1], strict=True))
    legend = {**more, **dict(zip(labels, handles, strict=True))}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend),
                  frameon=False, fontsize=9)  # fmt: skip
    return figure


def command(
    out: Path | None = None, plugin: Path | None = None, names: Sequence[str] | None = None
) -> int:
    """Check the laws, including those of a plugin, and measure the variants without a law.

    names: the variants to show; None shows all.

    Raises:
        UsageError: a name is not a registered variant, or it is repeated.
    """
    laws = (*LAWS, *(() if plugin is None else stated(load_plugin(plugin).module)))
    others = without_law(laws)
    if names is not None:
        check_unique("--variants", names)
        for name in names:
            try:
                attnzoo.get_variant(name)
            except ValueError as error:
                raise UsageError(f"--variants: {error}") from None
        laws = tuple(law for law in laws if law.variant in names)
        others = [variant for variant in others if variant.name in names]
    return main(out, laws, others)


def main(
    out: Path | None = None, laws: Sequence[Law] = LAWS, variants: Sequence[VariantCall] = ()
) -> int:
    """Measure and print; with ``out``, write laws.csv and laws.png. Return 1 if a law is broken.

    variants: variants without closed forms, which are measured but not checked.
    """
    if out is not None:
        check_writable("--out", out)
    with lean_arithmetic():
        points = measure(laws)
        for table in tables(points):
            print(f"{table.text()}\n")
        for variant in variants:
            _print_measured(variant)
    if out is not None:
        write_whole(out / "laws.csv", csv_text(points))
        write_whole(out / "laws.png", png(plot(points)))
        print(f"written: {out}/laws.csv, laws.png")
    failed = [point for point in points if point.failed]
    for p in failed:
        at = "Jacobian at equal scores" if p.gap == "uniform" else f"{p.gap} gap {p.size:g}"
        print(
            f"broken: {p.law}, {at}, n = {p.n}: measured {p.measured:.8g}, "
            f"law {p.predicted:.8g}, deviation {p.deviation:.2g} (allowed {p.tolerance:g})"
        )
    held = sum(point.held for point in points)
    print(f"{held - len(failed)} of {held} comparisons within tolerance")
    return 1 if failed else 0
