"""The scores of one task by variant and length, from result rows or from a summary.csv.

These scores appear in the tables of the console, report, README, documentation and ``export``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commandline.errors import UsageError
from evals.reporting.tables import chance_text, mark_lines
from evals.results.summary import Group, Point
from evals.task import Metric, Task
from evals.tasks import TASKS

KEPT = 0.85  # effective length: the score stays above this share of its value at train length


class Value(NamedTuple):
    """A metric at one length: its mean over seeds, its standard error and its 95 % interval.

    failed: the status of seeds without a score, such as "oom+missing"; empty if all have one.
    """

    mean: float | None = None
    error: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    failed: str = ""


class Line(NamedTuple):
    """One variant with its position encoding: a value for each length.

    untrained: the number of seeds whose score at the train length is missing or below the task's
    ``trained_score``.
    """

    variant: str
    encoding: str
    untrained: int
    values: list[Value]


@dataclass(frozen=True)
class Scores:
    """One metric of one task. lines: the variant that is best at the longest length comes first.

    chance: the score of blind guessing; None if the metric is not the task's score. distinction:
    the settings that differ from other results of the same task, such as "steps 3".
    """

    task: Task
    metric: Metric
    lengths: list[int]
    train_length: int
    seeds: int
    chance: float | None
    schedule: str
    lines: list[Line]
    distinction: str = ""
    remarks: tuple[str, ...] = ()

    def shown(self, value: float) -> str:
        """A value of the metric as text, in the unit of the tables: 0.986 as "98.6"."""
        return f"{self.metric.factor * value:.{self.metric.digits}f}"

    @property
    def title(self) -> str:
        """The text above the table: task, metric, number of seeds, train length and chance."""
        name = f"{self.task.name} ({self.distinction})" if self.distinction else self.task.name
        seeds = "One seed" if self.seeds == 1 else f"Mean of {self.seeds} seeds"
        interval = "" if self.seeds == 1 else " (95 % bootstrap interval)"
        chance = self.chance
        guessing = "" if chance is None else f", chance {chance_text(self.metric, chance)}"
        return (
            f"{name}: {self.metric.title}, by eval length n. {seeds}{interval}. "
            f"Train length n = {self.train_length}{guessing}."
        )

    def notes(self) -> list[str]:
        """The remarks of the task, and an explanation of each mark (->, †, *) that occurs."""
        values = [value for line in self.lines for value in line.values]
        marks = mark_lines(
            variants=[line.variant for line in self.lines],
            seeds=self.seeds,
            untrained=any(line.untrained for line in self.lines),
            partial=any(value.failed and value.mean is not None for value in values),
            bar=self.task.trained_score,
            train_length=self.train_length,
        )
        return [*self.remarks, *marks]

    def effective_length(self, line: Line) -> int | None:
        """The longest length up to which the score stays above 85 % of its value at the train
        length; None if a seed is untrained, that value is missing, or lower values are better."""
        found = dict(zip(self.lengths, line.values, strict=True))
        start = found.get(self.train_length, Value()).mean
        if line.untrained or start is None or self.metric.lower_is_better:
            return None
        longest = None
        for length in (n for n in self.lengths if n >= self.train_length):
            mean = found[length].mean
            if mean is None or mean <= KEPT * start:
                break
            longest = length
        return longest

    def effective_text(self, line: Line) -> str:
        """The effective length, with "≥" if it is the longest eval length."""
        length = self.effective_length(line)
        if length is None:
            return "—"
        return f"≥ {length}" if length == self.lengths[-1] else str(length)


def of_group(group: Group, metric: Metric, lengths: Sequence[int] | None = None) -> Scores:
    """The scores of a group of rows, at these lengths (default: all)."""
    chosen = [n for n in group.lengths if lengths is None or n in lengths]
    lines = [
        Line(
            *series,
            group.untrained(series),
            [_of_point(group.points[series, n], metric) for n in chosen],
        )
        for series in group.series
    ]
    return Scores(
        task=group.task,
        metric=metric,
        lengths=chosen,
        train_length=group.settings["train_longest"],
        seeds=len(group.seeds),
        chance=group.chance if metric is group.task.score else None,
        schedule=group.rows[0]["schedule"],
        lines=_best_first(lines, metric),
        distinction=group.distinction,
        remarks=tuple(group.task.remarks(group.settings)),
    )


def of_summary(name: str, summary: Sequence[Mapping[str, str]]) -> Scores:
    """The scores in the lines of a task's summary.csv.

    Raises:
        UsageError: the lines have different settings.
    """
    task, first = TASKS[name], summary[0]
    if len(several := {line.get("settings") or "" for line in summary}) > 1:
        found = "; ".join(sorted(several))
        raise UsageError(f"all lines of {name}'s summary must have the same settings, got {found}")
    lengths = sorted({int(line["length"]) for line in summary})
    lines = []
    for variant, encoding in dict.fromkeys((x["variant"], x["positions"]) for x in summary):
        mine = {
            int(line["length"]): line
            for line in summary
            if (line["variant"], line["positions"]) == (variant, encoding)
        }
        untrained = int(mine[min(mine)]["untrained"])
        values = [_of_line(mine[n], task.score.name) if n in mine else Value() for n in lengths]
        lines.append(Line(variant, encoding, untrained, values))
    return Scores(
        task=task,
        metric=task.score,
        lengths=lengths,
        train_length=int(first["train_length"]),
        seeds=max(int(line["seeds"]) for line in summary),
        chance=float(first["chance"]),
        schedule=first["schedule"],
        lines=_best_first(lines, task.score),
    )


def _of_point(point: Point, metric: Metric) -> Value:
    failed = "+".join(point.failures)
    if (found := point.metrics.get(metric.name)) is None:
        return Value(failed=failed)
    low, high = found.interval or (None, None)
    return Value(found.mean, found.error, low, high, found.count, failed)


def _of_line(line: Mapping[str, str], name: str) -> Value:
    failed = "+".join(part.split(":")[0] for part in line["failed"].split())
    numbers = (line[f"{name}{end}"] for end in ("", "_se", "_low", "_high"))
    mean, error, low, high = (float(text) if text else None for text in numbers)
    return Value(mean, error, low, high, int(line["seeds"]), failed)


def _best_first(lines: list[Line], metric: Metric) -> list[Line]:
    """The lines sorted by the value at the longest length; lines without one come last."""
    sign = 1 if metric.lower_is_better else -1

    def rank(line: Line) -> tuple[bool, float]:
        mean = line.values[-1].mean
        return mean is None, sign * (mean or 0.0)

    return sorted(lines, key=rank)
