"""Tables and figures of trainings by `python -m evals adapt`, from the rows of trained variants."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
from matplotlib.figure import Figure

from commandline.table import Table
from evals.progress import clock
from evals.reporting.plots import head_maps, tidy
from evals.results.rows import Row
from evals.results.summary import Group, Point, Series, series_of

_PREFIX = "head_learned_"
_WINDOW = 10  # steps over which the loss is averaged


def by_head(point: Point, name: str) -> list[list[float]]:
    """A measure of each head, as a list for each layer; means over samples."""
    values, counts = point.curve(f"head_{name}"), point.curve("heads")
    ends = [0, *accumulate(map(int, counts))]
    return [values[begin:end] for begin, end in pairwise(ends)] if values else []


def trainings(group: Group) -> dict[Series, Row]:
    """A row of each trained variant."""
    return {
        series_of(row): row for row in group.rows if "training" in row and row["status"] == "ok"
    }


def learned(group: Group) -> dict[str, dict[str, list[list[float]]]]:
    """The values of each head, a list for each layer, by parameter and trained variant."""
    layers: dict[str, dict[str, list[list[float]]]] = {}
    for series in trainings(group):
        point = next(point for point in group.of(series) if point.scored)
        for curve in next(iter(point.scored.values()))["curves"]:
            if curve.startswith(_PREFIX):
                values = by_head(point, curve.removeprefix("head_"))
                layers.setdefault(curve.removeprefix(_PREFIX), {})[series.label] = values
    return layers


def tables(group: Group) -> Iterator[Table]:
    """How each variant was trained, and what it learned."""
    if not (trained := trainings(group)):
        return
    header = ["variant", "start", "parameters", "loss, first steps", "loss, last steps", "time"]
    rows = []
    for series, row in trained.items():
        loss, training = row["curves"]["training_loss"], row["training"]
        size = min(_WINDOW, len(loss))
        ends = [f"{np.mean(part):.3f}" for part in (loss[:size], loss[-size:])]
        about = [series.label, training["start"], str(training["parameters"])]
        rows.append([*about, *ends, clock(training["seconds"])])
    yield Table("Training", header, rows, f"Losses are means over {_WINDOW} steps, nats per token.")
    for name, layers_by_series in learned(group).items():
        rows = [
            [label, str(index), *(f"{x:.4g}" for x in (np.mean(heads), min(heads), max(heads)))]
            for label, layers in layers_by_series.items()
            for index, heads in enumerate(layers)
        ]
        header = ["variant", "layer", "mean of heads", "least", "largest"]
        yield Table(f"Learned {name}", header, rows)


def figures(group: Group) -> Iterator[tuple[str, str, Figure]]:
    """(name, title, figure): the training losses, and a map of heads of each parameter."""
    if not (trained := trainings(group)):
        return
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for series, row in trained.items():
        loss = row["curves"]["training_loss"]
        size = min(_WINDOW, len(loss))
        means = np.convolve(loss, np.full(size, 1 / size), mode="valid")
        axes.plot(np.arange(size, len(loss) + 1), means, label=series.label, linewidth=1.6)
    tidy(axes)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per token, mean of {_WINDOW} steps")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    yield "training-loss", "Training loss", figure
    for name, layers in learned(group).items():
        title = f"Learned {name} of each head"
        yield f"learned-{name.replace('_', '-')}", title, head_maps(layers, f"learned {name}")
