"""Figures of pretrained models: curves of losses, retrieval and weights, and maps of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.reporting.plots import GRID, length_axis, looks_of
from evals.results.pretrained import BASELINE, PretrainedGroup
from evals.results.summary import Estimate

Curve = tuple[list[float], list[Estimate]]
_MAPS = {"needle_weight": "Weight on the needle", "max_weight": "Largest weight"}


def figures(group: PretrainedGroup) -> Iterator[tuple[str, str, Figure]]:
    """(name, title, figure) of all figures for which a row has values."""
    if group.has("loss"):
        title = f"Loss by position at n = {group.lengths[-1]}"
        yield "loss-by-position", title, _loss_by_position(group, group.lengths[-1])
    curves = [
        ("loss", "Loss, nats per token", 1.0),
        ("retrieval", "Retrieval, mean of the tasks, %", 100.0),
        ("retrieval_logprob", "Log-probability of right answers", 1.0),
        ("needle_weight_max", "Weight on the needle, largest of all heads", 1.0),
    ]
    shown = [curve for curve in curves if group.has(curve[0])]
    if shown:
        yield (
            "by-length",
            "Loss, retrieval and weight on the needle by length",
            _by_length(group, shown),
        )
    for name, title in _MAPS.items():
        if (figure := _head_map(group, name, title)) is not None:
            yield f"heads-{name.replace('_', '-')}", f"{title} of each head", figure


def _draw(axes: Axes, group: PretrainedGroup, lines: dict[str, Curve], factor: float) -> None:
    """A line with a band for the interval for each series."""
    looks = looks_of([series for series in group.series if series != BASELINE])
    looks[BASELINE] = {"color": "#999999", "linestyle": ":", "marker": "", "linewidth": 2.2}
    for series, (x, means) in lines.items():
        look = {"linewidth": 1.6, "markersize": 4} | looks[series]
        y = [factor * mean.mean for mean in means]
        axes.plot(x, y, label=series, **look)  # type: ignore[arg-type]
        if all(mean.interval for mean in means):
            ends = [mean.interval or (0.0, 0.0) for mean in means]
            low, high = ([factor * end[i] for end in ends] for i in (0, 1))
            axes.fill_between(x, low, high, color=str(look["color"]), alpha=0.12, linewidth=0)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _loss_by_position(group: PretrainedGroup, length: int) -> Figure:
    """The loss at the left; at the right its rise above the model as loaded, in which the
    differences between parts of the text cancel."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    titles = {False: f"Loss by position at n = {length}", True: f"Rise above the model {BASELINE}"}
    panels = figure.subplots(1, 2)
    for axes, (rise, title) in zip(panels, titles.items(), strict=True):
        lines: dict[str, Curve] = {}
        for series in group.series:
            if bins := group.by_position(series, length, rise):
                x = [(begin * end) ** 0.5 for begin, end, _ in bins]
                lines[series] = x, [mean for _, _, mean in bins]
        _draw(axes, group, lines, 1.0)
        length_axis(axes, [2**i for i in range(5, 20) if 2**i <= length], "position")
        limit = group.first["limit"]
        if limit is not None and limit < length:
            axes.axvline(limit, color="#555555", linewidth=1, linestyle="--")
            axes.annotate("trained context", (limit, axes.get_ylim()[1]), (3, -10),
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set_ylabel("nats per token")
        axes.set_title(title, loc="left", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _by_length(group: PretrainedGroup, shown: Sequence[tuple[str, str, float]]) -> Figure:
    figure = Figure(figsize=(4.8 * min(2, len(shown)), 3.9 * -(-len(shown) // 2) + 0.8),
                    layout="constrained")  # fmt: skip
    grid = figure.subplots(-(-len(shown) // 2), min(2, len(shown)), squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (metric, title, factor) in zip(grid.flat, shown, strict=False):
        lines: dict[str, Curve] = {}
        for series in group.series:
            means = [(float(n), group.mean(series, n, metric)) for n in group.lengths]
            measured = [(n, mean) for n, mean in means if mean is not None]
            if measured:
                lines[series] = [n for n, _ in measured], [mean for _, mean in measured]
        _draw(axes, group, lines, factor)
        length_axis(axes, group.lengths, "length n")
        axes.set_title(title, loc="left", fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _head_map(group: PretrainedGroup, name: str, title: str) -> Figure | None:
    """A heat map by layer and head for each series, at the longest length."""
    length = group.lengths[-1]
    layers_by_series = {series: group.by_head(series, length, name) for series in group.series}
    layers_by_series = {series: layers for series, layers in layers_by_series.items() if layers}
    if not layers_by_series:
        return None
    wide = min(4, len(layers_by_series))
    high = -(-len(layers_by_series) // wide)
    figure = Figure(figsize=(2.6 * wide + 0.9, 3.0 * high + 0.4), layout="constrained")
    grid = figure.subplots(high, wide, squeeze=False)
    for axes in grid.flat[len(layers_by_series) :]:
        axes.set_visible(False)
    for axes, (series, layers) in zip(grid.flat, layers_by_series.items(), strict=False):
        cells = np.full((len(layers), max(map(len, layers))), np.nan)
        for index, layer in enumerate(layers):
            cells[index, : len(layer)] = layer
        axes.imshow(cells, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axes.set_title(series, fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    shades = grid.flat[0].images[0]
    figure.colorbar(shades, ax=grid, shrink=0.7, label=f"{title.lower()}, n = {length}")
    return figure
