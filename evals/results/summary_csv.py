"""The summary.csv of a task: one line per variant, position encoding and eval length.

A summary contains no times and no host names, so the same runs give the same summary.csv even if
they were interrupted or split into shards.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from evals.results.summary import Estimate, Group, Point, metrics_of
from evals.results.tuned import tuned_cells
from evals.task import Metric


def number_text(value: float | None) -> str:
    """A number with six digits; empty for None."""
    return "" if value is None else f"{value:.6g}"


def _columns(metric: str) -> list[str]:
    return [metric, f"{metric}_se", f"{metric}_low", f"{metric}_high"]


def _cells(value: Estimate | None) -> list[str]:
    if value is None:
        return [""] * 4
    return [number_text(x) for x in (value.mean, value.error, *(value.interval or (None, None)))]


def csv_text(groups: Sequence[Group]) -> str:
    """The summary.csv of a task: one line per (group, series, length).

    The column ``settings`` says how the groups differ. It is empty for a single group.
    """
    task = groups[0].task
    header = ["task", "variant", "positions", "length", "seeds", "failed", "untrained"]
    metrics = metrics_of(groups)
    for name in [*(metric.name for metric in metrics), f"{task.score.name}_minus_softmax"]:
        header += _columns(name)
    header.append(f"{task.score.name}_p_holm")
    header += ["unstable", "at_edge", "tuned", "validation"]
    header += ["chance", "train_length", "steps", "schedule", "settings"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    for group in groups:
        settings = group.settings
        constants = [
            f"{group.chance:.6g}", settings["train_longest"], settings["steps"],
            group.rows[0]["schedule"], group.distinction,
        ]  # fmt: skip
        p_values = group.p_values()
        for series in sorted(group.series):
            for point in group.of(series):
                tuning = [int(group.unstable(series)), int(group.at_edge(series))]
                tuning += tuned_cells(group.tuned(series))
                p = number_text(p_values.get((series, point.length)))
                writer.writerow([*_line(group, point, metrics), p, *tuning, *constants])
    return file.getvalue()


def _line(group: Group, point: Point, metrics: Sequence[Metric]) -> list[object]:
    score = point.metrics.get(group.task.score.name)
    failed = " ".join(f"{status}:{n}" for status, n in sorted(point.failures.items()))
    line: list[object] = [group.task.name, *point.series, point.length]
    line += [score.count if score else 0, failed, group.untrained(point.series)]
    for metric in metrics:
        line += _cells(point.metrics.get(metric.name))
    return [*line, *_cells(point.versus_baseline)]
