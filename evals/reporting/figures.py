"""The figures of a group's results: the report embeds them, ``export`` writes them to files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evals.reporting import plots
from evals.reporting.pretrained_tables import WINDOW, by_head, learned, trainings
from evals.results import pretrained
from evals.results.statistics import Estimate
from evals.results.summary import Group, Series
from evals.results.summary_csv import by_position
from evals.task import Metric
from evals.theory.trained_heads import head_names

# Of pretrained models, metrics by length: titles and factors.
_CURVES = {
    "loss": ("Loss, nats per token", 1.0),
    "retrieval": ("Retrieval, mean of the tasks, %", 100.0),
    "retrieval_logprob": ("Log-probability of right answers", 1.0),
    "needle_weight_max": ("Weight on the needle, largest of all heads", 1.0),
}
_HEAD_MAPS = {"needle_weight": "Weight on the needle", "max_weight": "Largest weight"}
# Of tasks, values by length: titles, and whether they are weights.
_MAPS = {
    "best_keys": ("Mean weight of the closest keys by rank; rank 1 is the true key", True),
    "bits_by_position": ("Bits per byte for each sixteenth of the sequence", False),
    "head_peak": ("Largest weight of each head, by layer and head", True),
    "head_entropy": ("Entropy of each head's weights over log n, by layer and head", False),
}


class Picture(NamedTuple):
    """A figure as the bytes of a file. name: its file name without suffix. kind: "curve" or
    "map"."""

    name: str
    title: str
    kind: str
    data: bytes


def pictures(
    group: Group,
    metrics: Sequence[Metric] | None = None,
    write: Callable[[Figure], bytes] | None = None,
) -> list[Picture]:
    """All figures of a group. An experiment has none.

    Args:
        group: the results.
        metrics: of a task, those whose curves are drawn (default: all).
        write: makes the bytes of a file (default: `evals.reporting.plots.png`).
    """
    write = write or plots.png
    if group.is_pretrained:
        drawn = ((name, title, "curve", x) for name, title, x in pretrained_figures(group))
    elif group.is_task:
        drawn = _of_task(group, group.metrics if metrics is None else metrics)
    else:
        return []
    return [Picture(name, title, kind, write(figure)) for name, title, kind, figure in drawn]


# ---- tasks


def _of_task(group: Group, metrics: Sequence[Metric]) -> Iterator[tuple[str, str, str, Figure]]:
    """(name, title, kind, figure): curves of the metrics and of the training, and heat maps."""
    for metric in metrics:
        yield metric.name, metric.title, "curve", plots.metric_plot(group, metric)
    if (losses := _loss_by_step(group)) is not None:
        yield "training_loss", "Training loss by step", "curve", losses
    for curve, (text, weights) in _MAPS.items():
        title = text + ", mean over seeds" * (len(group.seeds) > 1)
        layers = group.settings.get("depth", 1) if curve.startswith("head_") else 1

        def names(count: int, layers: int = layers) -> list[str]:
            return head_names(count, count // layers)

        if (heat_map := plots.heat_map(group, curve, title, names, weights)) is not None:
            yield curve, title, "map", heat_map


def _loss_by_step(group: Group) -> Figure | None:
    """The mean training loss in each part of the steps; None if no row has it."""
    (figure, axes), ends = plots.named_axes(group), []
    looks = plots.looks_of([series.label for series in group.series])
    for series in group.series:
        for point in group.of(series):
            if losses := point.curve("training_loss"):
                ends_of_parts = (
                    np.arange(1, len(losses) + 1) * group.settings["steps"] / len(losses)
                )
                look = looks[series.label]
                axes.plot(ends_of_parts, losses, color=look["color"], linestyle=look["linestyle"])
                ends.append((series.label, losses[-1], look["color"]))
    if not ends:
        return None
    plots.tidy(axes)
    axes.set_xlim(0, group.settings["steps"])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    plots.add_title(axes, f"{group.task.name}: training loss", ["means of parts of the training"])
    plots.name_lines(axes, ends, log=False)
    return figure


# ---- pretrained models


def pretrained_figures(group: Group) -> Iterator[tuple[str, str, Figure]]:
    """(name, title, figure) of all figures for which a row has values."""
    measured, longest = {name for row in group.rows for name in row["metrics"]}, group.xs[-1]
    if "loss" in measured:
        yield "loss-by-position", f"Loss by position at n = {longest}", _by_position(group, longest)
    if shown := [name for name in _CURVES if name in measured]:
        title = "Loss, retrieval and weight on the needle by length"
        yield "by-length", title, _by_length(group, shown)
    for name, title in _HEAD_MAPS.items():
        layers = {s.label: by_head(group.points[s, longest], name) for s in group.series}
        if layers := {label: values for label, values in layers.items() if values}:
            figure = plots.head_maps(layers, f"{title.lower()}, n = {longest}", (0.0, 1.0))
            yield f"heads-{name.replace('_', '-')}", f"{title} of each head", figure
    if trainings(group):
        yield "training-loss", "Training loss", _training_loss(group)
    for name, layers in learned(group).items():
        title = f"Learned {name} of each head"
        yield f"learned-{name.replace('_', '-')}", title, plots.head_maps(layers, f"learned {name}")


def _draw(
    axes: Axes, group: Group, lines: Mapping[Series, Mapping[float, Estimate]], factor: float = 1.0
) -> None:
    """A line with a band for the interval for each series."""
    looks = plots.looks_of([s.label for s in group.series if s.variant != pretrained.BASELINE])
    looks[pretrained.BASELINE] = {
        "color": "#999999", "linestyle": ":", "marker": "", "linewidth": 2.2
    }  # fmt: skip
    for series, means in lines.items():
        ends = [mean.interval or (math.nan, math.nan) for mean in means.values()]
        low, high = factor * np.array(ends).T
        y = [factor * mean.mean for mean in means.values()]
        look: dict[str, Any] = {"markersize": 4, "label": series.label} | looks[series.label]
        plots.draw_line(axes, list(means), y, low, high, alpha=0.12, **look)
    plots.tidy(axes)


def _by_position(group: Group, length: int) -> Figure:
    """The loss at the left; at the right its rise above the model as loaded, in which the
    differences between parts of the text cancel."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    titles = {False: f"Loss by position at n = {length}",
              True: f"Rise above the model {pretrained.BASELINE}"}  # fmt: skip
    both = figure.subplots(1, 2)
    for axes, (rise, title) in zip(both, titles.items(), strict=True):
        bins = {s: by_position(group, group.points[s, length], rise) for s in group.series}
        middles = {
            series: {(begin * end) ** 0.5: mean for (begin, end), mean in means.items()}
            for series, means in bins.items()
            if means
        }
        _draw(axes, group, middles)
        plots.length_axis(axes, [2**i for i in range(5, 20) if 2**i <= length], "position")
        limit = group.rows[0]["limit"]
        if limit is not None and limit < length:
            axes.axvline(limit, color="#555555", linewidth=1, linestyle="--")
            axes.annotate("trained context", (limit, axes.get_ylim()[1]), (3, -10),
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set_ylabel("nats per token")
        axes.set_title(title, loc="left", fontsize=11)
    plots.add_legend(figure, both[0])
    return figure


def _by_length(group: Group, names: list[str]) -> Figure:
    figure, grid = plots.panels(len(names), 2, 4.4, 3.9)
    for axes, name in zip(grid, names, strict=False):
        title, factor = _CURVES[name]
        means = {s: {p.x: p.mean(name) for p in group.of(s)} for s in group.series}
        measured = {s: {float(x): m for x, m in line.items() if m} for s, line in means.items()}
        _draw(axes, group, {series: line for series, line in measured.items() if line}, factor)
        plots.length_axis(axes, group.xs, "length n")
        axes.set_title(title, loc="left", fontsize=10)
    plots.add_legend(figure, grid[0])
    return figure


def _training_loss(group: Group) -> Figure:
    """The loss of each trained variant by step."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for series, row in trainings(group).items():
        loss = row["curves"]["training_loss"]
        size = min(WINDOW, len(loss))
        means = np.convolve(loss, np.full(size, 1 / size), mode="valid")
        axes.plot(np.arange(size, len(loss) + 1), means, label=series.label, linewidth=1.6)
    plots.tidy(axes)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per token, mean of {WINDOW} steps")
    plots.add_legend(figure, axes, columns=1)
    return figure
