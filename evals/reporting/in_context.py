"""The command ``in-context``: trains attention layers on softmax regression, compares them with one
gradient step, and writes in-context.csv and in-context.png."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.files import check_writable
from commandline.variants import VariantCall, complete, parse_specs, split_list
from evals.measures.arithmetic import lean_arithmetic
from evals.options import check_registered
from evals.reporting.plots import add_legend, length_axis, log_axis, looks_of, png, tidy
from evals.run import NotFinite
from evals.theory.in_context import (
    HEADS,
    LENGTHS,
    LINEAR,
    NAME,
    ROWS,
    SCHEDULE,
    VARIANTS,
    TrainedLayer,
    baselines,
    by_name,
    tables,
    train,
)
from evals.theory.output import show

if TYPE_CHECKING:
    import pandas as pd


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
        for call, heads, seed in product(calls, HEADS, range(args.seeds)):
            try:
                trained.append(train(call, heads, seed, base, schedule))
            except (NotFinite, ValueError, TypeError) as error:
                print(f"failed: {call}, heads {heads}, seed {seed}: {error}")
                failed += 1
    show(NAME, tables(base, trained, args.steps), args.out, png=lambda: png(plot(base, trained)))
    return 1 if failed else 0


def _variants(texts: list[str]) -> list[VariantCall]:
    calls = []
    for spec in parse_specs(texts):
        check_registered("--variants", spec)
        calls.append(complete(spec.test, max(LENGTHS)))
    return calls


# ------------------------------------------------------------------------------------- figure


def plot(base: pd.DataFrame, trained: Sequence[TrainedLayer]) -> Figure:
    """Losses during training at the left, losses by the number of rows at the right. Each line is a
    mean over seeds."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = looks_of(list(dict.fromkeys(layer.variant for layer in trained)))
    layers = {layer.name: layer for layer in trained}
    curves = by_name(trained, lambda layer: layer.curve).agg("mean") / base["zero"][ROWS]
    by_rows = by_name(trained, lambda layer: layer.loss).agg("mean") / base["zero"]
    for name, layer in layers.items():
        dashed = "--" if layer.heads == 1 else "-"
        style: dict[str, Any] = {"color": looks[layer.variant]["color"], "linestyle": dashed}
        left.plot(curves.loc[name], label=name, linewidth=1.5, **style)
        right.plot(by_rows.loc[name], marker="o", markersize=3.5, linewidth=1.5, **style)
    dotted: dict[str, Any] = {"color": "#555555", "linewidth": 1.2, "linestyle": ":"}
    step = base["step"][ROWS] / base["zero"][ROWS]
    left.axhline(step, label="one gradient step", **dotted)
    right.plot(base["scaled"] / base["zero"], **dotted)
    left.set_xlabel("training step")
    left.set_title(f"n = {ROWS} rows, as trained", loc="left", fontsize=10.5)
    length_axis(right, list(base.index), "number of rows n")
    right.set_title(f"trained at n = {ROWS}, tested at n", loc="left", fontsize=10.5)
    for axes in (left, right):
        log_axis(axes)
        tidy(axes)
    left.set_ylabel("loss / loss of x = 0 (log scale)")
    add_legend(figure, left, columns=5)
    title = "Softmax regression in context: one attention layer against one gradient step"
    figure.suptitle(title, x=0.01, ha="left")
    return figure
