"""The command ``laws``: prints tables of laws and measurements; writes laws.csv and laws.png."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.files import check_writable
from commandline.variants import load_plugin, unknown
from evals.measures.arithmetic import lean_arithmetic
from evals.options import check_unique
from evals.reporting.plots import add_legend, length_axis, looks_of, png, tidy
from evals.theory.closed_forms import LAWS, Law
from evals.theory.laws import KAPPA, measure, measured_table, stated, tables, without_law
from evals.theory.output import show

if TYPE_CHECKING:
    import pandas as pd

NAME = "laws"


def csv_text(points: pd.DataFrame) -> str:
    """The text of laws.csv, with a line per comparison of a law with a measurement.

    The column ``held`` is 1 if the deviation is checked against the tolerance, otherwise 0.
    """
    lines = points.drop(columns="holds").astype({"held": int, "failed": int})
    return lines.to_csv(index=False, lineterminator="\n", float_format="%.12g")


def plot(points: pd.DataFrame) -> Figure:
    """Plot laws as lines and measurements as marks, for two fixed gaps and the shrinking gap."""
    panels = {
        ("fixed", 1.5): "one key at Δ = 1.5, others at 0",
        ("fixed", 3.0): "one key at Δ = 3, others at 0",
        ("shrinking", KAPPA): f"keys at κ(j + ½)/n, κ = {KAPPA:g}",
    }
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    grid = figure.subplots(1, 3)
    looks = looks_of(list(points["variant"].unique()))
    for axes, ((gap, size), title) in zip(grid, panels.items(), strict=True):
        panel = points[(points["gap"] == gap) & (points["size"] == size)]
        for name, law_points in panel.groupby("variant", sort=False):
            look = looks[str(name)]
            valid = law_points[law_points["holds"]]
            axes.plot("n", "predicted", data=valid, color=look["color"], label="",
                      linestyle=look["linestyle"], linewidth=1.3)  # fmt: skip
            axes.plot("n", "measured", data=law_points, color=look["color"], label=name,
                      marker=look["marker"], markersize=5, linestyle="")  # fmt: skip
        length_axis(axes, [16, 256, 4096, 65536])
        axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=10.5)
        tidy(axes)
    grid[0].set_ylabel("largest weight")
    figure.suptitle("Laws (lines) and measurements in fp64 (marks)", x=0.01, ha="left")
    add_legend(figure, grid[2], grid[0], columns=len(looks))
    return figure


def add_parser(commands: Any) -> None:
    text = "Compare the largest weight of each variant with its formula; exit with 1 if they differ"
    parser = commands.add_parser(NAME, help=text, description=f"{text}.")
    text = "Write laws.csv and laws.png to DIR"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "Show only these variants: names, separated by commas (default: all)"
    parser.add_argument("--variants", metavar="LIST", help=text)
    add_plugin(parser)


def main(args: argparse.Namespace) -> int:
    """Check the laws, including those of a plugin, and measure the variants without a law.

    Raises:
        UsageError: a name is not a registered variant, or it is repeated.
    """
    laws = [*LAWS, *(() if args.plugin is None else stated(load_plugin(args.plugin).module))]
    others = without_law(laws)
    if args.variants is not None:
        names = args.variants.replace(" ", "").split(",")
        check_unique("--variants", names)
        for name in names:
            if (reason := unknown(name)) is not None:
                raise UsageError(f"--variants: {reason}")
        laws, others = ([law for law in x if law.variant in names] for x in (laws, others))
    return check_laws(args.out, laws, others)


def check_laws(
    out: Path | None = None, laws: Sequence[Law] = LAWS, measured_only: Sequence[Law] = ()
) -> int:
    """Measure and print; with ``out``, write laws.csv and laws.png. Return 1 if a law is broken.

    measured_only: variants without closed forms, which are measured but not checked.
    """
    if out is not None:
        check_writable("--out", out)
    unsupported = []
    with lean_arithmetic():
        points = measure(laws)
        all_tables = tables(points)
        for law in measured_only:
            try:
                all_tables.append(measured_table(law))
            except (ValueError, TypeError, RuntimeError) as error:
                unsupported.append(f"{law}: no closed form, and not measured: {error}\n")
    show(NAME, all_tables, out, note="\n".join(unsupported), csv=csv_text(points),
         png=lambda: png(plot(points)))  # fmt: skip
    failed = points.query("failed")
    columns = "variant gap size n measured predicted deviation tolerance".split()
    for name, gap, size, n, value, law, deviation, most in failed[columns].itertuples(index=False):
        at = "Jacobian at equal scores" if gap == "uniform" else f"{gap} gap {size:g}"
        print(
            f"broken: {name}, {at}, n = {n}: measured {value:.8g}, law {law:.8g}, "
            f"deviation {deviation:.2g} (allowed {most:g})"
        )
    held = points["held"].sum()
    print(f"{held - len(failed)} of {held} comparisons within tolerance")
    return 1 if len(failed) else 0
