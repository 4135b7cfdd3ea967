"""The figures of a group's results: the report embeds them, ``export`` writes them to files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from evals.reporting import adapt, plots, pretrained_plots
from evals.reporting.theory_plots import theory_plot
from evals.results.summary import Group
from evals.task import Metric
from evals.theory.trained_heads import Heads, head_names


class Drawing(NamedTuple):
    """A figure. name: its file name without suffix. kind: "curve", "theory" or "map"."""

    name: str
    title: str
    kind: str
    figure: Figure


class Picture(NamedTuple):
    """A drawing as the bytes of a PNG file."""

    name: str
    title: str
    kind: str
    data: bytes


def pictures(group: Group, heads: Sequence[Heads]) -> list[Picture]:
    """All figures of a group as PNG. heads: `evals.theory.trained_heads.fitted` of the group."""
    return [
        Picture(name, title, kind, plots.png(figure))
        for name, title, kind, figure in figures(group, heads)
    ]


def figures(
    group: Group, heads: Sequence[Heads], metrics: Sequence[Metric] | None = None
) -> Iterator[Drawing]:
    """The figures of a group. Of a task: the curves of these metrics (default: all metrics), then
    fitted laws and heat maps. An experiment has none."""
    if group.is_pretrained:
        for name, title, figure in (*pretrained_plots.figures(group), *adapt.figures(group)):
            yield Drawing(name, title, "curve", figure)
    elif group.task.axis == "n":
        yield from _of_task(group, heads, group.metrics if metrics is None else metrics)


def _of_task(group: Group, heads: Sequence[Heads], metrics: Sequence[Metric]) -> Iterator[Drawing]:
    for metric in metrics:
        yield Drawing(metric.name, metric.title, "curve", plots.metric_plot(group, metric))
    if (law := theory_plot(group, heads)) is not None:
        title = "Largest weight of each variant's sharpest head against n, and the fitted law"
        yield Drawing("law", title, "theory", law)
    over = ", mean over seeds" * (len(group.seeds) > 1)
    maps = (
        ("best_keys", "Mean weight of the closest keys by rank; rank 1 is the true key", True),
        ("bits_by_position", "Bits per byte for each sixteenth of the sequence", False),
        ("head_peak", "Largest weight of each head, by layer and head", True),
    )
    for curve, title, weights in maps:
        layers = group.settings.get("depth", 1) if curve == "head_peak" else 1

        def names(count: int, layers: int = layers) -> list[str]:
            return head_names(count, count // layers)

        drawn = plots.heat_map(group, curve, title + over, names, weights)
        if drawn is not None:
            yield Drawing(curve, title + over, "map", drawn)
