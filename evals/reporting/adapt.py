"""Tables and figures of trainings by `python -m evals adapt`, from the rows of trained variants."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure

from commandline.table import Table
from evals.progress import clock
from evals.reporting.plots import GRID
from evals.results.pretrained import PretrainedGroup, series_of
from evals.results.rows import Row

_PREFIX = "head_learned_"
_WINDOW = 10  # steps over which the loss is averaged


def trainings(group: PretrainedGroup) -> dict[str, Row]:
    """A row of each trained variant, by series."""
    return {
        series_of(row): row for row in group.rows if "training" in row and row["status"] == "ok"
    }


def names(group: PretrainedGroup) -> list[str]:
    """The names of all learned parameters."""
    curves = [name for row in trainings(group).values() for name in row["curves"]]
    return list(dict.fromkeys(n.removeprefix(_PREFIX) for n in curves if n.startswith(_PREFIX)))


def tables(group: PretrainedGroup) -> Iterator[Table]:
    """How each variant was trained, and what it learned."""
    trained = trainings(group)
    if not trained:
        return
    header = ["variant", "start", "parameters", "loss, first steps", "loss, last steps", "time"]
    rows = []
    for series, row in trained.items():
        loss, training = row["curves"]["training_loss"], row["training"]
        size = min(_WINDOW, len(loss))
        ends = [f"{np.mean(part):.3f}" for part in (loss[:size], loss[-size:])]
        time = clock(training["seconds"])
        rows.append([series, training["start"], str(training["parameters"]), *ends, time])
    yield Table("Training", header, rows, f"Losses are means over {_WINDOW} steps, nats per token.")
    for name in names(group):
        rows = []
        for series in trained:
            layers = [np.array(heads) for heads in group.by_head(series, _length(group, series),
                                                                 _PREFIX[5:] + name)]  # fmt: skip
            rows += [
                [series, str(index), *(f"{x:.4g}" for x in (h.mean(), h.min(), h.max()))]
                for index, h in enumerate(layers)
            ]
        if rows:
            header = ["variant", "layer", "mean of heads", "least", "largest"]
            yield Table(f"Learned {name}", header, rows)


def _length(group: PretrainedGroup, series: str) -> int:
    """A length at which the series has rows."""
    return next(n for n in group.lengths if group.samples(series, n))


def figures(group: PretrainedGroup) -> Iterator[tuple[str, str, Figure]]:
    """(name, title, figure): the training losses, and a map of heads of each parameter."""
    trained = trainings(group)
    if not trained:
        return
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for series, row in trained.items():
        loss = row["curves"]["training_loss"]
        size = min(_WINDOW, len(loss))
        means = np.convolve(loss, np.full(size, 1 / size), mode="valid")
        axes.plot(np.arange(size, len(loss) + 1), means, label=series, linewidth=1.6)
    axes.grid(**GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per token, mean of {_WINDOW} steps")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    yield "training-loss", "Training loss", figure
    for name in names(group):
        maps = {series: group.by_head(series, _length(group, series), _PREFIX[5:] + name)
                for series in trained}  # fmt: skip
        yield (
            f"learned-{name.replace('_', '-')}",
            f"Learned {name} of each head",
            _map({series: layers for series, layers in maps.items() if layers}, name),
        )


def _map(layers_by_series: dict[str, list[list[float]]], name: str) -> Figure:
    """A heat map by layer and head for each series, with one scale."""
    figure = Figure(figsize=(3.4 * len(layers_by_series) + 0.9, 3.6), layout="constrained")
    grid = figure.subplots(1, len(layers_by_series), squeeze=False)
    every = [x for layers in layers_by_series.values() for heads in layers for x in heads]
    for axes, (series, layers) in zip(grid.flat, layers_by_series.items(), strict=True):
        cells = np.full((len(layers), max(map(len, layers))), np.nan)
        for index, heads in enumerate(layers):
            cells[index, : len(heads)] = heads
        axes.imshow(cells, vmin=min(every), vmax=max(every), cmap="cividis", aspect="auto")
        axes.set_title(fill(series, 44), fontsize=7)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.colorbar(grid.flat[0].images[0], ax=grid, shrink=0.7, label=f"learned {name}")
    return figure
