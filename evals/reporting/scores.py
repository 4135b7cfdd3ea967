"""The scores of one task by variant and length, from result rows or from a summary.csv.

These scores appear in the tables of the console, report, README, documentation and ``export``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commandline.errors import UsageError
from evals.reporting.tables import chance_text, mark_lines, verdict
from evals.results.summary import Group, Point, Series
from evals.results.tuned import values_text
from evals.task import Metric, Task
from evals.tasks import TASKS

EFFECTIVE_SHARE = (
    0.85  # effective length: the score stays above this share of its value at train length
)


class Value(NamedTuple):
    """A metric at one length: its mean over seeds, its standard error and its 95 % interval.

    failed: the status of seeds without a score, such as "oom+missing"; empty if all have one.
    difference: the score minus that of softmax, paired by seed. p: the p value of this difference,
    with Holm's correction for all differences of the table.
    """

    mean: float | None = None
    error: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    failed: str = ""
    difference: float | None = None
    p: float | None = None


class Effective(NamedTuple):
    """An effective length. dropped: whether the score drops at a longer length; if not, the
    effective length is at least ``length``."""

    length: int
    dropped: bool

    def __str__(self) -> str:
        return str(self.length) if self.dropped else f"≥ {self.length}"


class ScoreLine(NamedTuple):
    """One variant with its position encoding: a value for each length.

    untrained: the number of seeds whose score at the train length is missing or below the task's
    ``trained_score``. unstable: whether the scores of the seeds at the train length disagree.
    tuned: the tuned values in words. at_edge: whether the sweep of an untrained line chose its
    smallest or largest value. effective: the longest length up to which the score stays
    above 85 % of its value at the train length, of all eval lengths with a score; None if a seed is
    untrained, the value at the train length is missing, or lower values are better.
    """

    variant: str
    encoding: str
    untrained: int
    values: list[Value]
    unstable: bool = False
    tuned: str = ""
    effective: Effective | None = None
    at_edge: bool = False

    @property
    def label(self) -> str:
        return self.variant if self.encoding == "none" else f"{self.variant} · {self.encoding}"

    @property
    def effective_text(self) -> str:
        """The effective length, with "≥" if the score drops at no eval length."""
        return "—" if self.effective is None else str(self.effective)


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
    lines: list[ScoreLine]
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
        """The remarks of the task, and an explanation of each mark that occurs."""
        values = [value for line in self.lines for value in line.values]
        marks = mark_lines(
            variants=[line.variant for line in self.lines],
            seeds=self.seeds,
            untrained=[line.variant for line in self.lines if line.untrained],
            partial=any(value.failed and value.mean is not None for value in values),
            bar=self.task.trained_score,
            train_length=self.train_length,
            untuned=[line.label for line in self.lines if not line.tuned],
            at_edge=[line.label for line in self.lines if line.at_edge],
            swept=any(line.tuned for line in self.lines),
            unstable=any(line.unstable for line in self.lines),
            factor=self.task.score.factor,
            tested=sum(value.p is not None for value in values),
        )
        return [*self.remarks, *marks]

    def mark(self, value: Value) -> str:
        """The mark of a value that differs from that of softmax, or ""."""
        return verdict(value.p, value.difference, self.metric)

    @property
    def has_effective(self) -> bool:
        """Whether the metric has an effective length: higher values are better."""
        return not self.metric.lower_is_better


def effective_length(
    means: Mapping[int, float | None], train_length: int, metric: Metric, untrained: int
) -> Effective | None:
    """The effective length of `ScoreLine`, from the mean at each eval length."""
    start = means.get(train_length)
    if untrained or start is None or metric.lower_is_better:
        return None
    longest = None
    for length in sorted(n for n in means if n >= train_length):
        mean = means[length]
        if mean is None:  # missing or failed, which says nothing about the score
            continue
        if mean <= EFFECTIVE_SHARE * start:
            return None if longest is None else Effective(longest, dropped=True)
        longest = length
    return None if longest is None else Effective(longest, dropped=False)


def _effective(group: Group, series: Series, metric: Metric) -> Effective | None:
    estimates = {point.length: point.metrics.get(metric.name) for point in group.of(series)}
    means = {length: None if value is None else value.mean for length, value in estimates.items()}
    return effective_length(means, group.settings["train_longest"], metric, group.untrained(series))


def of_group(group: Group, metric: Metric, lengths: Sequence[int] | None = None) -> Scores:
    """The scores of a group of rows, at these lengths (default: all)."""
    chosen = [n for n in group.lengths if lengths is None or n in lengths]
    is_score = metric is group.task.score
    p = group.p_values(chosen) if is_score else {}
    lines = [
        ScoreLine(
            *series,
            group.untrained(series),
            [
                _of_point(group.points[series, n], metric, is_score, p.get((series, n)))
                for n in chosen
            ],
            group.unstable(series),
            values_text(group.tuned(series)["values"]),
            _effective(group, series, metric),
            group.at_edge(series),
        )
        for series in group.series
    ]
    return Scores(
        task=group.task,
        metric=metric,
        lengths=chosen,
        train_length=group.settings["train_longest"],
        seeds=len(group.seeds),
        chance=group.chance if is_score else None,
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
        settings = "; ".join(sorted(several))
        raise UsageError(
            f"all lines of {name}'s summary must have the same settings, got {settings}"
        )
    lengths = sorted({int(line["length"]) for line in summary})
    lines = []
    for variant, encoding in dict.fromkeys((x["variant"], x["positions"]) for x in summary):
        by_length = {
            int(line["length"]): line
            for line in summary
            if (line["variant"], line["positions"]) == (variant, encoding)
        }
        untrained = int(by_length[min(by_length)]["untrained"])
        values = [
            _of_line(by_length[n], task.score.name) if n in by_length else Value() for n in lengths
        ]
        first_line = by_length[min(by_length)]
        # Older files lack these columns.
        unstable, at_edge = (first_line.get(name) == "1" for name in ("unstable", "at_edge"))
        means = {n: value.mean for n, value in zip(lengths, values, strict=True)}
        effective = effective_length(means, int(first["train_length"]), task.score, untrained)
        tuned = first_line.get("tuned") or ""
        lines.append(
            ScoreLine(variant, encoding, untrained, values, unstable, tuned, effective, at_edge)
        )
    return Scores(
        task=task,
        metric=task.score,
        lengths=lengths,
        train_length=int(first["train_length"]),
        seeds=max(int(line["seeds"]) + _failed(line) for line in summary),
        chance=float(first["chance"]),
        schedule=first["schedule"],
        lines=_best_first(lines, task.score),
    )


def _failed(line: Mapping[str, str]) -> int:
    """The number of seeds without a score, from a text such as "nan:2 oom:1"."""
    return sum(int(part.split(":")[1]) for part in line["failed"].split())


def _of_point(point: Point, metric: Metric, is_score: bool, p: float | None) -> Value:
    failed = "+".join(point.failures)
    if (mean := point.metrics.get(metric.name)) is None:
        return Value(failed=failed)
    low, high = mean.interval or (None, None)
    versus = point.versus_baseline if is_score else None
    difference = None if versus is None else versus.mean
    return Value(mean.mean, mean.error, low, high, mean.count, failed, difference, p)


def _of_line(line: Mapping[str, str], name: str) -> Value:
    failed = "+".join(part.split(":")[0] for part in line["failed"].split())
    numbers = (line[f"{name}{end}"] for end in ("", "_se", "_low", "_high"))
    mean, error, low, high = (float(text) if text else None for text in numbers)
    more = (line.get(f"{name}{end}") or "" for end in ("_minus_softmax", "_p_holm"))
    difference, p = (float(text) if text else None for text in more)
    return Value(mean, error, low, high, int(line["seeds"]), failed, difference, p)


def _best_first(lines: list[ScoreLine], metric: Metric) -> list[ScoreLine]:
    """The lines sorted by the value at the longest length; lines without one come last."""
    sign = 1 if metric.lower_is_better else -1

    def rank(line: ScoreLine) -> tuple[bool, float]:
        mean = line.values[-1].mean
        return mean is None, sign * (mean or 0.0)

    return sorted(lines, key=rank)
