"""Statistics over seeds: means, standard errors, bootstrap intervals, differences from softmax."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from commandline.errors import UsageError
from evals.results.paired import holm, t_test
from evals.results.rows import is_validation
from evals.results.store import Row
from evals.results.tuned import TUNED, at_edge
from evals.task import Metric, Task
from evals.tasks import TASKS

BASELINE = "softmax"
UNTRAINED = "†"
UNSTABLE = "‡"
# A series is unstable if the scores of its seeds at the train length differ by more than this.
SPREAD = 0.1
CONFIDENCE = 0.95
_EXACT = 5  # up to this many seeds the bootstrap enumerates all resamples
_DRAWS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error and its 95 % interval (both None for one seed)."""

    mean: float
    error: float | None
    count: int
    interval: tuple[float, float] | None = None

    def text(self, factor: float = 1.0, digits: int = 1, sign: bool = False) -> str:
        """The mean with its standard error, such as "98.6 ±0.1"."""
        mean = f"{factor * self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if self.error is None else f"{mean} ±{factor * self.error:.{digits}f}"

    def span(self, factor: float = 1.0, digits: int = 1) -> str:
        """The interval, such as "98.1 … 99.0"; empty for one seed."""
        if self.interval is None:
            return ""
        low, high = (f"{factor * end:.{digits}f}" for end in self.interval)
        return f"{low} … {high}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """The estimate from one value per seed; None if there are no values."""
    if not values:
        return None
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return Estimate(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count, bootstrap(values))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The percentile interval of the mean over resampled seeds.

    It uses all resamples for up to five seeds, otherwise 10 000 with a fixed random state.
    """
    x, count = np.asarray(values), len(values)
    if count <= _EXACT:
        picks = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        picks = np.random.Generator(np.random.Philox(count)).integers(count, size=(_DRAWS, count))
    tail = (1 - CONFIDENCE) / 2
    means = x[picks].mean(axis=1)
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


class Series(NamedTuple):
    """A variant with its position encoding."""

    variant: str
    positions: str

    @property
    def label(self) -> str:
        return self.variant if self.positions == "none" else f"{self.variant} · {self.positions}"


@dataclass(frozen=True)
class Point:
    """The results of one series at one eval length, over all seeds."""

    series: Series
    length: int
    metrics: dict[str, Estimate]
    versus_baseline: Estimate | None  # score minus that of softmax, paired by seed
    p: float | None  # the p value of this difference, without correction
    curves: dict[str, list[float]]
    rows: list[Row]
    failures: dict[str, int]  # number of failed or missing seeds by status
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Rows of one task with equal settings, data, device kind and numbers of test sequences."""

    task: Task
    settings: dict[str, Any]
    series: list[Series]
    lengths: list[int]
    seeds: list[int]
    points: dict[tuple[Series, int], Point]
    rows: list[Row]
    left_out: list[str]  # a message for each series with rows of older versions
    distinction: str = ""  # distinguishes the group from others of its task, such as "steps 3"

    @property
    def chance(self) -> float:
        return self.rows[0]["chance"]

    @property
    def metrics(self) -> list[Metric]:
        """The task's metrics. Optional metrics that occur in no result are left out."""
        return metrics_of([self])

    def of(self, series: Series) -> list[Point]:
        """The points of a series in the order of their lengths."""
        return [self.points[series, n] for n in self.lengths if (series, n) in self.points]

    def name(self, series: Series) -> str:
        """The label of a series, with "† k/S" added if k > 0 of S seeds are `untrained`, and "‡" if
        it is `unstable`."""
        count = self.untrained(series)
        mark = f" {UNTRAINED} {count}/{len(self.seeds)}" if count else ""
        return series.label + mark + (f" {UNSTABLE}" if self.unstable(series) else "")

    def untrained(self, series: Series) -> int:
        """The number of trained seeds without a score of ``trained_score`` or more at the train
        length. Seeds without a row are not counted.

        It is 0 if the task has no ``trained_score`` or the series has no result at this length.
        """
        scores = self._scores_at_train_length(series)
        if self.task.trained_score is None or scores is None:
            return 0
        return self._trained(series) - sum(score >= self.task.trained_score for score in scores)

    def _trained(self, series: Series) -> int:
        """The number of seeds of a series with a row at the train length."""
        return len(self.points[series, self.settings["train_longest"]].rows)

    def unstable(self, series: Series) -> bool:
        """Whether the scores of the seeds at the train length differ by more than `SPREAD`.

        It is false if the task has no ``trained_score``.
        """
        scores = self._scores_at_train_length(series)
        if self.task.trained_score is None or not scores:
            return False
        return max(scores) - min(scores) > SPREAD

    def at_edge(self, series: Series) -> bool:
        """Whether seeds are `untrained` although the series was tuned, and the sweep chose its
        smallest or largest value. A wider sweep may find values with which they train."""
        return self.untrained(series) > 0 and at_edge(self.tuned(series))

    def _scores_at_train_length(self, series: Series) -> list[float] | None:
        point = self.points.get((series, self.settings["train_longest"]))
        if point is None:
            return None
        name = self.task.score.name
        return [row["metrics"][name] for row in point.rows if row["status"] == "ok"]

    def tuned(self, series: Series) -> dict[str, Any]:
        """The tuned "values" of a series and the candidates "tried"; both empty if there was no
        sweep for it."""
        return self._a_row(series).get("tuned") or {"values": {}, "tried": []}

    def variant_settings(self, series: Series) -> dict[str, Any]:
        """The settings in which the variant may differ from others, besides those of the sweep.

        A variant that the sweep left out has the preset's values of these.
        """
        row = self._a_row(series)
        names = [name for name, x in row.get("shared", {}).items() if not _is_tuned(x)]
        return {name: row["settings"][name] for name in sorted(names) if name in row["settings"]}

    def _a_row(self, series: Series) -> Row:
        """A row of the series. Its settings do not depend on length and seed."""
        return next(row for point in self.of(series) for row in point.rows)

    def p_values(self, lengths: Collection[int] | None = None) -> dict[tuple[Series, int], float]:
        """The p values of the differences from softmax, with Holm's correction for all that are in
        the table of these lengths (default: all)."""
        return holm(
            {
                key: point.p
                for key, point in self.points.items()
                if point.p is not None and (lengths is None or key[1] in lengths)
            }
        )


def metrics_of(groups: Sequence[Group]) -> list[Metric]:
    """The metrics of one task, to which all ``groups`` belong.

    Optional metrics that occur in no result of these groups are left out.
    """
    measured = {name for x in groups for point in x.points.values() for name in point.metrics}
    return [m for m in groups[0].task.metrics if not m.optional or m.name in measured]


def groups(rows: Iterable[Row]) -> list[Group]:
    """Group rows by task, settings, data, device and number of sequences, in the task order of
    `TASKS`.

    Raises:
        UsageError: the task of a row is unknown.
    """
    keyed: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if is_validation(row):
            continue
        if row["task"] not in TASKS:
            raise UsageError(f"unknown task {row['task']!r}: load its file with --plugin")
        kind = str(row["device"]).split(":")[0]
        shared = json.dumps([_shared_settings(row), kind, row["data"]], sort_keys=True)
        keyed.setdefault((row["task"], shared), []).append(row)
    ordered = sorted(keyed.items(), key=lambda item: (list(TASKS).index(item[0][0]), item[0][1]))
    all_groups = [_group(TASKS[task], part) for (task, _), x in ordered for part in _by_sizes(x)]
    return [replace(group, distinction=_distinction(group, all_groups)) for group in all_groups]


def _shared_settings(row: Row) -> dict[str, Any]:
    """The settings of a row's table: in place of those that differ between its variants, a text."""
    settings = row["settings"] | row.get("shared", {})
    return {
        name: TUNED if _is_tuned(value) else value
        for name, value in settings.items()
        if value is not None
    }


def _is_tuned(value: Any) -> bool:
    """Whether a text stands in place of the values of a swept setting. Older rows also name the
    candidates, and variants of one table may have different ones."""
    return str(value).startswith(TUNED)


def _by_sizes(rows: list[Row]) -> list[list[Row]]:
    """Split rows into parts. In a part, all rows of one length have the same number of test
    sequences. The part with the largest numbers comes first."""
    sizes: dict[int, list[int]] = {}
    for length in {row["length"] for row in rows}:
        counts = {row["sequences"] for row in rows if row["length"] == length}
        sizes[length] = sorted(counts, reverse=True)
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(sizes[row["length"]].index(row["sequences"]), []).append(row)
    return [parts[index] for index in sorted(parts)]


def _distinction(group: Group, every: Sequence[Group]) -> str:
    """The text that distinguishes a group from the other groups of its task.

    It lists the settings in which the groups differ. If other groups have the same settings, it
    adds data and device where these differ. If some of those groups also have the same data and
    device, it adds the numbers of sequences.
    """
    others = [other for other in every if other.task is group.task and other is not group]
    parts = []
    for read in (_settings, _origins, _sizes):
        group_values, other_values = read(group), [read(other) for other in others]
        names = dict.fromkeys(name for x in (group_values, *other_values) for name in x)
        differs = [n for n in names if any(x.get(n) != group_values.get(n) for x in other_values)]
        parts += [f"{name} {group_values.get(name, 'default')}" for name in differs]
        others = [other for other, x in zip(others, other_values) if x == group_values]
    return ", ".join(parts)


def _settings(group: Group) -> dict[str, Any]:
    return group.settings


def _origins(group: Group) -> dict[str, Any]:
    row = group.rows[0]
    return {"data": row["data"], "device": str(row["device"]).split(":")[0]}


def _sizes(group: Group) -> dict[str, Any]:
    sizes = {row["length"]: row["sequences"] for row in group.rows}
    return {"test sequences": ", ".join(f"{sizes[n]} at {n}" for n in sorted(sizes))}


def _series(row: Row) -> Series:
    return Series(row["variant"], row["positions"])


def _version(row: Row) -> tuple[str, str]:
    """What all rows of a series share: the variant, and the settings that are its own or tuned."""
    differing = {name: row["settings"].get(name) for name in row.get("shared", {})}
    return row["version"], json.dumps(differing, sort_keys=True)


def _latest(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Keep the latest row of each (series, length, seed), from the latest version of each series.

    Also returns a message for each series with rows left out.
    """
    version = {_series(row): _version(row) for row in rows}
    current = [row for row in rows if _version(row) == version[_series(row)]]
    latest = {(_series(row), row["length"], row["seed"]): row for row in current}
    messages = []
    for series in version:
        old = sum(_series(row) == series for row in rows) - sum(key[0] == series for key in latest)
        if old:
            messages.append(
                f"{series.label}: left out {old} result(s) of other versions or settings of the "
                "variant"
            )
    return list(latest.values()), messages


def _group(task: Task, every: list[Row]) -> Group:
    rows, left_out = _latest(every)
    by_seed: dict[tuple[Series, int], dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_seed.setdefault((_series(row), row["length"]), {})[row["seed"]] = row
    all_series = list(dict.fromkeys(map(_series, rows)))
    lengths, seeds = (sorted({row[name] for row in rows}) for name in ("length", "seed"))
    points = {}
    for series, length in itertools.product(all_series, lengths):
        base = by_seed.get((Series(BASELINE, series.positions), length), {})
        at_length = by_seed.get((series, length), {})
        points[series, length] = _point(task, series, length, at_length, base, len(seeds))
    settings = _shared_settings(rows[0])
    return Group(task, settings, all_series, lengths, seeds, points, rows, left_out)


def _point(
    task: Task, series: Series, length: int, rows: dict[int, Row], base: dict[int, Row], seeds: int
) -> Point:
    valid = {seed: row for seed, row in rows.items() if row["status"] == "ok"}
    failures: dict[str, int] = {}
    for row in rows.values():
        if row["status"] != "ok":
            failures[row["status"]] = failures.get(row["status"], 0) + 1
    if missing := seeds - len(rows):
        failures["missing"] = missing
    metrics = {}
    for metric in task.metrics:
        values = [r["metrics"][metric.name] for r in valid.values() if metric.name in r["metrics"]]
        if (value := estimate(values)) is not None:
            metrics[metric.name] = value
    score = task.score.name
    paired = [
        row["metrics"][score] - base[seed]["metrics"][score]
        for seed, row in valid.items()
        if series.variant != BASELINE and seed in base and base[seed]["status"] == "ok"
    ]
    curves = {}
    for name in dict.fromkeys(name for row in valid.values() for name in row["curves"]):
        seed_curves = [row["curves"][name] for row in valid.values() if name in row["curves"]]
        curves[name] = [sum(column) / len(column) for column in zip(*seed_curves, strict=True)]
    messages = sorted({row["message"] for row in rows.values() if row["message"]})
    return Point(
        series, length, metrics, estimate(paired), t_test(paired), curves, list(rows.values()),
        failures, messages,
    )  # fmt: skip


def failures(group: Group) -> list[str]:
    """Messages about failed and missing results, one per series and reason."""
    lengths_by_failure: dict[tuple[Series, str, int], list[int]] = {}
    for point in group.points.values():
        for status, seeds in point.failures.items():
            reason = "; ".join(point.messages) if status != "missing" else "no result"
            key = point.series, reason or status, seeds
            lengths_by_failure.setdefault(key, []).append(point.length)
    return [
        f"failed: {series.label}, n = {', '.join(map(str, lengths))}: {reason} "
        f"({seeds} of {len(group.seeds)} seeds)"
        for (series, reason, seeds), lengths in lengths_by_failure.items()
    ]


def version_warnings(groups: Sequence[Group]) -> list[str]:
    """Warnings if results differ in commit or in the version of a variant, torch or attnzoo."""
    warnings = [f"warning: {x.task.name}: {text}" for x in groups for text in x.left_out]
    every = [row for group in groups for row in group.rows]
    for name in ("commit", "torch", "attnzoo", "arithmetic"):
        values = sorted({str(row[name]) for row in every if name in row})
        if len(values) > 1:
            warnings.append(f"warning: results differ in {name}: {', '.join(values)}")
    return warnings
