"""The command ``in-context``: trains attention layers on softmax regression, compares them with one
gradient step, and writes in-context.csv and in-context.png."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.files import check_writable, write_whole
from commandline.table import tables_csv
from commandline.variants import VariantCall, complete, parse_specs, split_list
from evals.measures.arithmetic import lean_arithmetic
from evals.options import check_registered
from evals.reporting.plots import GRID, length_axis, looks_of, png
from evals.run import NotFinite
from evals.theory.in_context import (
    HEADS,
    LENGTHS,
    LINEAR,
    NAME,
    ROWS,
    SCHEDULE,
    VARIANTS,
    Baselines,
    TrainedLayer,
    baselines,
    by_name,
    tables,
    train,
)


def add_parser(commands: Any) -> None:
    text = "Compare a trained attention layer with a gradient step on softmax regression"
    parser = commands.add_parser(NAME, help=text, description=f"{text}.")
    add = parser.add_argument
    add("--variants", type=split_list, default=split_list(VARIANTS), metavar="a,b(x=1)",
        help="Train layers with these variants, beside attention without a normalizer "
        f"(default: {VARIANTS})")  # fmt: skip
    add("--seeds", type=int, default=3, metavar="N", help="Train with N seeds (default: 3)")
    add("--steps", type=int, default=SCHEDULE.steps, metavar="N",
        help=f"Train for N steps (default: {SCHEDULE.steps})")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help=f"Write {NAME}.csv and {NAME}.png to DIR")
    add_plugin(parser)


def main(args: argparse.Namespace) -> int:
    """Train, print the tables, and write them with --out. Returns 1 if a run failed, or 0."""
    for name in ("seeds", "steps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} must be an int >= 1, got {getattr(args, name)}")
    calls = [LINEAR, *_variants(args.variants)]
    if args.out is not None:
        check_writable("--out", args.out)
    schedule = replace(SCHEDULE, steps=args.steps)
    trained: list[TrainedLayer] = []
    failed = 0
    with lean_arithmetic():
        base = baselines(LENGTHS)
        for call in calls:
            for heads in HEADS:
                for seed in range(args.seeds):
                    try:
                        trained.append(train(call, heads, seed, base, schedule))
                    except (NotFinite, ValueError, TypeError) as error:
                        print(f"failed: {call}, heads {heads}, seed {seed}: {error}")
                        failed += 1
    all_tables = tables(base, trained, args.steps)
    for table in all_tables:
        print(f"{table.text()}\n")
    if args.out is not None:
        write_whole(args.out / f"{NAME}.csv", tables_csv(all_tables))
        write_whole(args.out / f"{NAME}.png", png(plot(base, trained)))
        print(f"written: {args.out}/{NAME}.csv, {NAME}.png")
    return 1 if failed else 0


def _variants(texts: list[str]) -> list[VariantCall]:
    calls = []
    for spec in parse_specs(texts):
        check_registered("--variants", spec)
        calls.append(complete(spec.test, max(LENGTHS)))
    return calls


# ------------------------------------------------------------------------------------- figure


def plot(base: Baselines, trained: Sequence[TrainedLayer]) -> Figure:
    """Losses during training at the left, losses by the number of rows at the right. Each line is a
    mean over seeds."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = by_name(trained)
    looks = looks_of(list(dict.fromkeys(layer.variant for layer in trained)))
    for name, results in layers.items():
        dashed = "--" if results[0].heads == 1 else "-"
        style = {"color": looks[results[0].variant]["color"], "linestyle": dashed}
        steps = [step for step, _ in results[0].curve]
        curves = [[loss / base.zero[ROWS] for _, loss in layer.curve] for layer in results]
        left.plot(steps, _means(curves), label=name, linewidth=1.5, **style)  # type: ignore[arg-type]
        by_rows = [[layer.loss[n] / base.zero[n] for n in base.zero] for layer in results]
        right.plot(list(base.zero), _means(by_rows), marker="o", markersize=3.5, linewidth=1.5,
                   **style)  # type: ignore[arg-type]  # fmt: skip
    relative = [base.scaled[n] / base.zero[n] for n in base.zero]
    left.axhline(base.step[ROWS] / base.zero[ROWS], color="#555555", linewidth=1.2, linestyle=":",
                 label="one gradient step")  # fmt: skip
    right.plot(list(base.zero), relative, color="#555555", linewidth=1.2, linestyle=":")
    left.set_xlabel("training step")
    left.set_title(f"n = {ROWS} rows, as trained", loc="left", fontsize=10.5)
    length_axis(right, list(base.zero), "number of rows n")
    right.set_title(f"trained at n = {ROWS}, tested at n", loc="left", fontsize=10.5)
    for axes in (left, right):
        _finish(axes)
    left.set_ylabel("loss / loss of x = 0 (log scale)")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    title = "Softmax regression in context: one attention layer against one gradient step"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*columns, strict=True)]


def _finish(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
