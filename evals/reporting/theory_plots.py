"""The figure of trained heads: the largest weight of the sharpest head, and the fitted law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from evals.reporting.plots import GRID, length_axis, line_height, looks_of, name_lines
from evals.results.summary import BASELINE, Group
from evals.theory.trained_heads import Heads, fitted

_LOWEST = 0.7  # the lower end of the axis, as a multiple of the smallest weight


def _between(keys: Sequence[int]) -> list[int]:
    """``keys``, with the rounded geometric mean inserted between each pair of neighbours."""
    middle = [round(math.sqrt(a * b)) for a, b in pairwise(keys)]
    return sorted({*keys, *middle})


def log_axis(axes: Axes, subs: Sequence[int] = (1, 2, 5)) -> None:
    """Make the y axis a log axis with ticks at ``subs`` times powers of ten, and draw a grid."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def theory_plot(group: Group, all_heads: Sequence[Heads] | None = None) -> Figure | None:
    """Plot the largest weight of each series' sharpest head against n as marks, and its fitted law
    as a line. None if no heads were measured.

    all_heads: the result of `evals.theory.trained_heads.fitted` for the group; None computes it.
    """
    all_heads = fitted(group) if all_heads is None else all_heads
    if not all_heads:
        return None
    figure = Figure(figsize=(9.6, line_height(group)), layout="constrained")
    axes = figure.add_subplot()
    looks = looks_of([series.label for series in group.series])
    ends, weights = [], []
    for heads in all_heads:
        look, peaks = looks[heads.series.label], heads.mean_peaks(0)
        visible = [(n, w) for n, w in zip(heads.keys, peaks, strict=True) if w > 0]
        if not visible:
            continue
        colour = str(look["color"])
        x, y = zip(*visible, strict=True)
        axes.plot(x, y, color=colour, marker=str(look["marker"]), markersize=5, linestyle="")
        weights += y
        ends.append((heads.series.label, y[-1], colour))
        if (best := heads.closer(0)) is not None:
            dense = _between(heads.keys)
            axes.plot(dense, heads.curve(best, 0, dense), color=colour, linewidth=1.4)
        if heads.series.variant == BASELINE:
            bound = [curves["head_bound"][heads.indices[0]] for curves in heads.curves]
            axes.plot(heads.keys, bound, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
    if not weights:
        return None
    keys = sorted({n for heads in all_heads for n in heads.keys})
    length_axis(axes, keys)
    axes.set_xlim(keys[0] / 1.3, keys[-1] * 1.05)
    lowest = _LOWEST * min(weights)
    log_axis(axes, subs=(1,) if lowest < 0.005 else (1, 2, 5))
    axes.set_ylim(lowest, 1.3)
    title = f"{group.task.name}: largest weight of the sharpest head, and the fitted law\n"
    axes.set_title(title, loc="left", fontsize=12)
    notes = ["marks: measured", "lines: the law with the smaller error"]
    if any(heads.series.variant == BASELINE for heads in all_heads):
        notes.append("dashed: upper bound for softmax, e^δ/n")
    where = {"transform": axes.transAxes, "fontsize": 8.5, "color": "#555555"}
    axes.text(0, 1.02, "; ".join(notes), **where)
    name_lines(axes, ends, log=True)
    return figure
