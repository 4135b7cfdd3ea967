"""Figures of pretrained models: curves of losses, retrieval and weights, and maps of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.reporting.adapt import by_head
from evals.reporting.plots import head_maps, length_axis, looks_of, panels, tidy
from evals.results.pretrained import BASELINE
from evals.results.statistics import Estimate
from evals.results.summary import Group, Series
from evals.results.summary_csv import by_position

# Metrics by length: titles and factors.
_CURVES = {
    "loss": ("Loss, nats per token", 1.0),
    "retrieval": ("Retrieval, mean of the tasks, %", 100.0),
    "retrieval_logprob": ("Log-probability of right answers", 1.0),
    "needle_weight_max": ("Weight on the needle, largest of all heads", 1.0),
}
_MAPS = {"needle_weight": "Weight on the needle", "max_weight": "Largest weight"}


def figures(group: Group) -> Iterator[tuple[str, str, Figure]]:
    """(name, title, figure) of all figures for which a row has values."""
    measured, longest = {name for row in group.rows for name in row["metrics"]}, group.xs[-1]
    if "loss" in measured:
        yield "loss-by-position", f"Loss by position at n = {longest}", _by_position(group, longest)
    if shown := [name for name in _CURVES if name in measured]:
        title = "Loss, retrieval and weight on the needle by length"
        yield "by-length", title, _by_length(group, shown)
    for name, title in _MAPS.items():
        layers = {s.label: by_head(group.points[s, longest], name) for s in group.series}
        if layers := {label: values for label, values in layers.items() if values}:
            figure = head_maps(layers, f"{title.lower()}, n = {longest}", (0.0, 1.0))
            yield f"heads-{name.replace('_', '-')}", f"{title} of each head", figure


def _draw(
    axes: Axes, group: Group, lines: Mapping[Series, Mapping[float, Estimate]], factor: float = 1.0
) -> None:
    """A line with a band for the interval for each series."""
    looks = looks_of([series.label for series in group.series if series.variant != BASELINE])
    looks[BASELINE] = {"color": "#999999", "linestyle": ":", "marker": "", "linewidth": 2.2}
    for series, means in lines.items():
        look: dict[str, Any] = {"linewidth": 1.6, "markersize": 4} | looks[series.label]
        axes.plot(list(means), [factor * mean.mean for mean in means.values()],
                  label=series.label, **look)  # fmt: skip
        ends = [mean.interval for mean in means.values() if mean.interval]
        if len(ends) == len(means):
            low, high = factor * np.array(ends).T
            axes.fill_between(list(means), low, high, color=look["color"], alpha=0.12, linewidth=0)
    tidy(axes)


def _legend(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _by_position(group: Group, length: int) -> Figure:
    """The loss at the left; at the right its rise above the model as loaded, in which the
    differences between parts of the text cancel."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    titles = {False: f"Loss by position at n = {length}", True: f"Rise above the model {BASELINE}"}
    both = figure.subplots(1, 2)
    for axes, (rise, title) in zip(both, titles.items(), strict=True):
        bins = {s: by_position(group, group.points[s, length], rise) for s in group.series}
        middles = {
            series: {(begin * end) ** 0.5: mean for (begin, end), mean in means.items()}
            for series, means in bins.items()
            if means
        }
        _draw(axes, group, middles)
        length_axis(axes, [2**i for i in range(5, 20) if 2**i <= length], "position")
        limit = group.rows[0]["limit"]
        if limit is not None and limit < length:
            axes.axvline(limit, color="#555555", linewidth=1, linestyle="--")
            axes.annotate("trained context", (limit, axes.get_ylim()[1]), (3, -10),
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set_ylabel("nats per token")
        axes.set_title(title, loc="left", fontsize=11)
    return _legend(figure, both[0])


def _by_length(group: Group, names: list[str]) -> Figure:
    figure, grid = panels(len(names), 2, 4.4, 3.9)
    for axes, name in zip(grid, names, strict=False):
        title, factor = _CURVES[name]
        means = {s: {p.x: p.mean(name) for p in group.of(s)} for s in group.series}
        measured = {s: {float(x): m for x, m in line.items() if m} for s, line in means.items()}
        _draw(axes, group, {series: line for series, line in measured.items() if line}, factor)
        length_axis(axes, group.xs, "length n")
        axes.set_title(title, loc="left", fontsize=10)
    return _legend(figure, grid[0])
