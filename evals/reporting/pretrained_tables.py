"""Tables of pretrained models, and of their trainings by the command ``adapt``.

Each number is a mean over samples with its 95 % interval. All variants read the same
samples, so differences from the model as loaded are paired by sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from commandline.table import Table
from evals.progress import clock
from evals.reporting.tables import HALF, NONE, WIDE_RANGE, by_x, entry, metric_table
from evals.results.pretrained import BASELINE, RETRIEVAL, RISE
from evals.results.rows import Row
from evals.results.summary import Group, Point, Series, series_of
from evals.results.summary_csv import Summary, by_position
from evals.task import Metric

_PREFIX = "head_learned_"
WINDOW = 10  # steps over which the training loss is averaged
_NOTES = {
    "loss": "Mean over samples (95 % interval). Planted sentences do not count.",
    "retrieval": "Share of answers that greedy decoding would give exactly.",
}
# By length in the documentation.
_PUBLISHED = ("loss", RISE, "retrieval", "retrieval_logprob", "needle_weight_max", "entropy")
# The ends of the names of metrics of single retrieval tasks, their titles, factors and digits.
_RETRIEVAL = {
    "": ("Retrieval at n = {n}, %", 100, 0),
    "_logprob": ("Log-probability of the right answers at n = {n}", 1, 2),
    "_greedy": ("Retrieval by greedy decoding at n = {n}, %", 100, 0),
}


def by_length(summary: Summary, spread: str = WIDE_RANGE) -> dict[str, Table]:
    """A table of each metric that was measured, and of the rise of the loss."""
    score, *others = summary.task.metrics
    rise = f"Rise of the loss above the model {BASELINE}, nats per token"
    note = f"Minus the loss of the model {BASELINE}, paired by sample."
    tables = {
        score.name: metric_table(summary, score, score.title, spread, note=_NOTES[score.name]),
        RISE: metric_table(summary, score, rise, spread, RISE, note),
    } | {
        metric.name: metric_table(
            summary, metric, metric.title, spread, note=_NOTES.get(metric.name, "")
        )
        for metric in others
    }
    return {name: table for name, table in tables.items() if table is not None}


def retrieval(
    summary: Summary, length: int, end: str = "", spread: str = WIDE_RANGE
) -> Table | None:
    """The scores of each retrieval task at one length."""
    title, factor, digits = _RETRIEVAL[end]
    rows = []
    for series in summary.lines:
        metrics = [Metric(name + end, "", factor, digits) for name in RETRIEVAL]
        cells = [entry(summary, series, length, metric, spread) for metric in metrics]
        if any((series, length, metric.name) in summary.means for metric in metrics):
            rows.append([series.label, *cells])
    header = ["variant", *RETRIEVAL.values()]
    return Table(title.format(n=length), header, rows) if rows else None


def published_tables(summary: Summary) -> list[Table]:
    """The tables of the documentation: some by length, and the retrieval tasks at the longest
    length that has the most samples."""
    tables = by_length(summary, HALF)
    samples = [(mean.count, x) for (_, x, name), mean in summary.means.items() if name in RETRIEVAL]
    tasks = retrieval(summary, max(samples)[1], spread=HALF) if samples else None
    chosen = [tables[name] for name in _PUBLISHED if name in tables]
    return [*chosen, *([tasks] if tasks else [])]


def samples_text(summary: Summary) -> str:
    """The numbers of samples, such as "20 at n = 512, 5 at n = 8192"."""
    counts = {
        x: max(mean.count for (_, at, _), mean in summary.means.items() if at == x)
        for x in sorted({x for _, x, _ in summary.means})
    }
    return ", ".join(f"{count} at n = {x}" for x, count in counts.items())


def notes(group: Group, summary: Summary) -> list[str]:
    """Lines about samples and lengths beyond the trained context."""
    lines, limit = [f"samples: {samples_text(summary)}"], group.rows[0]["limit"]
    if beyond := [x for x in group.xs if limit is not None and x > limit]:
        lengths = ", ".join(map(str, beyond))
        lines.append(f"n = {lengths}: beyond the trained context of {limit} tokens")
    return lines


def tables(group: Group, summary: Summary) -> list[Table]:
    """All tables of a group; those without any number are left out."""
    first = by_length(summary)
    more = [
        *(_positions(group, x, rise) for x in group.xs for rise in (False, True)),
        *(retrieval(summary, x, end) for end in _RETRIEVAL for x in group.xs),
    ]
    main = [first.pop(name) for name in ("loss", RISE, "retrieval") if name in first]
    every = [*main, *more, *first.values(), *_training_tables(group), _costs(group, summary)]
    return [table for table in every if table is not None]


def _positions(group: Group, length: int, rise: bool) -> Table | None:
    """The loss at each bin of positions, or its rise above the model as loaded."""
    bins = {
        series: by_position(group, group.points[series, length], rise)
        for series in group.series
        if not (rise and series.variant == BASELINE)
    }
    spans = list(dict.fromkeys(span for means in bins.values() for span in means))
    sign = "+" if rise else ""
    rows = [
        [series.label, *(f"{x[s].mean:{sign}.3f}" if s in x else NONE for s in spans)]
        for series, x in bins.items()
        if x
    ]
    header = ["variant", *(f"{begin}–{end - 1}" for begin, end in spans)]
    title = f"{'Rise of the loss' if rise else 'Loss'} by position at n = {length}, nats per token"
    return Table(title, header, rows) if rows else None


def _costs(group: Group, summary: Summary) -> Table | None:
    """Mean CPU seconds of a context, without intervals: they depend on the machine."""

    def text(series: Series, x: Any) -> str:
        seconds = [row["cpu_seconds"] for row in group.points[series, x].scored.values()]
        return f"{sum(seconds) / len(seconds):.1f}" if seconds else NONE

    return by_x(summary, "CPU seconds per context", text)


# ---- trainings by the command ``adapt``


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


def _training_tables(group: Group) -> Iterator[Table]:
    """How each variant was trained, and what it learned."""
    if not (trained := trainings(group)):
        return
    header = ["variant", "start", "parameters", "loss, first steps", "loss, last steps", "time"]
    rows = []
    for series, row in trained.items():
        loss, training = row["curves"]["training_loss"], row["training"]
        size = min(WINDOW, len(loss))
        ends = [f"{np.mean(part):.3f}" for part in (loss[:size], loss[-size:])]
        about = [series.label, training["start"], str(training["parameters"])]
        rows.append([*about, *ends, clock(training["seconds"])])
    yield Table("Training", header, rows, f"Losses are means over {WINDOW} steps, nats per token.")
    for name, layers_by_series in learned(group).items():
        rows = [
            [label, str(index), *(f"{x:.4g}" for x in (np.mean(heads), min(heads), max(heads)))]
            for label, layers in layers_by_series.items()
            for index, heads in enumerate(layers)
        ]
        header = ["variant", "layer", "mean of heads", "least", "largest"]
        yield Table(f"Learned {name}", header, rows)
