"""Which pictures there are of a task's results: the report embeds them, and files hold them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from evals.reporting import plots
from evals.reporting.theory_plots import theory_plot
from evals.results.summary import Group
from evals.theory.trained_heads import Heads, head_names


class Picture(NamedTuple):
    """A PNG file by its name without the suffix; kind is "curve", "theory" or "map"."""

    name: str
    title: str
    kind: str
    data: bytes


def pictures(group: Group, heads: Sequence[Heads]) -> list[Picture]:
    """Every picture of a group. heads: `evals.theory.trained_heads.fitted` of it."""
    return [
        Picture(name, title, kind, plots.png(figure))
        for name, title, kind, figure in _figures(group, heads)
        if figure is not None
    ]


def _figures(group: Group, heads: Sequence[Heads]) -> Iterator[tuple[str, str, str, Figure | None]]:
    for metric in group.task.metrics:
        yield metric.name, metric.title, "curve", plots.metric_plot(group, metric)
    law = "The largest weight of each series' sharpest head against n, and the law fitted to it"
    yield "law", law, "theory", theory_plot(group, heads)
    over = ", mean over seeds" * (len(group.seeds) > 1)
    maps = (
        ("best_keys", "Mean weight of the closest keys, by rank, the true key first", True),
        ("bits_by_position", "Bits per byte along the sequence, by sixteenth", False),
        ("head_peak", "Largest weight of each head, by layer and head", True),
    )
    for curve, title, weights in maps:
        per_layer = group.settings.get("heads", 0) if curve == "head_peak" else 0

        def names(count: int, per_layer: int = per_layer) -> list[str]:
            return head_names(count, per_layer or count)

        drawn = plots.heat_map(group, curve, title + over, names, weights)
        yield curve, title + over, "map", drawn
