"""Groups of result rows: a `Group` for each table, a `Point` for each of its entries.

Tasks, experiments and pretrained models have the same groups. A line of a table is a `Series`. Its
columns are the values of x: eval lengths, or the conditions of an experiment. A seed of a
pretrained model is a sample of its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from commandline.errors import UsageError
from evals.results import pretrained
from evals.results.rows import Row, differing, distinct, is_validation
from evals.results.statistics import Estimate, estimate, holm, t_test
from evals.results.tuned import TUNED, at_edge, values_text
from evals.task import Metric
from evals.tasks import EXPERIMENTS, TASKS

BASELINE = "softmax"
UNTRAINED = "†"
UNSTABLE = "‡"
# A series is unstable if the scores of its seeds at the train length differ by more than this.
SPREAD = 0.1


def task_of(name: str) -> Any:
    """The `Task` or `Experiment` with this name, or `evals.results.pretrained.MODELS`.

    Raises:
        UsageError: it is unknown.
    """
    known = {**TASKS, **EXPERIMENTS, pretrained.MODELS.name: pretrained.MODELS}
    if name not in known:
        raise UsageError(f"unknown task {name!r}: load its file with --plugin")
    return known[name]


def largest_change(task: Any) -> float:
    """By how much the score of a seed may change in a second run that `holds`: infinity for a task
    without ``trained_score``."""
    return math.inf if task.trained_score is None else SPREAD


def baseline_of(task: Any) -> str:
    """The variant with which the others are compared."""
    return pretrained.BASELINE if task is pretrained.MODELS else BASELINE


def at(task: Any, *xs: Any) -> str:
    """Values of x in words, such as "n = 16, 64"; conditions are named only."""
    text = ", ".join(map(str, xs))
    return f"n = {text}" if task.axis == "n" else text


class Series(NamedTuple):
    """A variant with its position encoding, or with the layers in which it was substituted.

    detail: "" for the position encoding "none", and for all layers.
    """

    variant: str
    detail: str = ""

    @property
    def label(self) -> str:
        return f"{self.variant} · {self.detail}" if self.detail else self.variant


def series_of(row: Row) -> Series:
    """The line of a table to which a row belongs."""
    named = {name: value for name, value in row["series"].items() if value not in ("none", "all")}
    parts = [value if name == "positions" else f"{name} {value}" for name, value in named.items()]
    return Series(row["variant"], ", ".join(parts))


@dataclass(frozen=True)
class SeriesFacts:
    """What is known of a series.

    untrained: the number of trained seeds without a score of ``trained_score`` or more at the train
    length; seeds without a row are not counted. unstable: whether the scores of the seeds differ by
    more than `SPREAD` there. Both need a task with a ``trained_score`` and results at this length.
    at_edge: whether seeds are untrained and the sweep chose its smallest or largest value; a wider
    sweep may find values with which they train. tuned: the tuned values in words.
    """

    untrained: int = 0
    unstable: bool = False
    at_edge: bool = False
    tuned: str = ""

    def marks(self, seeds: int) -> str:
        """ "† k/S" if k > 0 of S seeds are untrained, and "‡" if the series is unstable."""
        untrained = f" {UNTRAINED} {self.untrained}/{seeds}" * (self.untrained > 0)
        return untrained + f" {UNSTABLE}" * self.unstable


@dataclass(frozen=True, eq=False)
class Point:
    """The results of one series at one x. rows: one for each seed, in their order."""

    group: Group = field(repr=False)
    series: Series
    x: Any
    rows: list[Row]

    @cached_property
    def scored(self) -> dict[int, Row]:
        """The rows without a failure, by seed."""
        return {row["seed"]: row for row in self.rows if row["status"] == "ok"}

    def values(self, name: str) -> dict[int, float]:
        """A metric by seed."""
        metrics = {seed: row["metrics"] for seed, row in self.scored.items()}
        return {seed: values[name] for seed, values in metrics.items() if name in values}

    def mean(self, name: str) -> Estimate | None:
        """The mean of a metric over seeds."""
        return estimate(list(self.values(name).values()))

    def minus(self, other: Point | None) -> list[float]:
        """The scores minus those of another point, paired by seed."""
        if other is None or other is self:
            return []
        name = self.group.task.score.name
        base = other.values(name)
        return [value - base[seed] for seed, value in self.values(name).items() if seed in base]

    @cached_property
    def versus_baseline(self) -> list[float]:
        """The scores minus those of the baseline, paired by seed."""
        return self.minus(self.group.points.get((self.group.base(self.series), self.x)))

    @cached_property
    def failures(self) -> dict[str, list[int]]:
        """The seeds that failed or are missing, by status."""
        failures: dict[str, list[int]] = {}
        for row in self.rows:
            if row["status"] != "ok":
                failures.setdefault(row["status"], []).append(row["seed"])
        present = {row["seed"] for row in self.rows}
        # The number of samples of a pretrained model differs between lengths.
        expected = [] if self.group.task is pretrained.MODELS else self.group.seeds
        missing = [seed for seed in expected if seed not in present]
        return failures | ({"missing": missing} if missing else {})

    @property
    def messages(self) -> list[str]:
        return sorted({row["message"] for row in self.rows if row["message"]})

    def curve(self, name: str) -> list[float]:
        """The mean of a curve over seeds; empty if no row has it."""
        curves = [row["curves"][name] for row in self.scored.values() if name in row["curves"]]
        return [sum(column) / len(column) for column in zip(*curves, strict=True)]

    @cached_property
    def curves(self) -> dict[str, list[float]]:
        """The means of all curves over seeds, by name."""
        names = dict.fromkeys(name for row in self.scored.values() for name in row["curves"])
        return {name: self.curve(name) for name in names}


@dataclass(frozen=True, eq=False)
class Group:
    """Rows with equal settings, data, kind of device and numbers of test sequences.

    task: see `task_of`. settings: what all rows share. left_out: a message for each series with
    rows of older versions. distinction: distinguishes the group from others of its task, such as
    "steps 3".
    """

    task: Any
    settings: dict[str, Any]
    rows: list[Row] = field(repr=False)
    left_out: list[str] = field(default_factory=list)
    distinction: str = ""

    @property
    def is_pretrained(self) -> bool:
        return self.task is pretrained.MODELS

    @property
    def is_task(self) -> bool:
        """Whether the results are of a task, not of an experiment or a pretrained model."""
        return self.task.axis == "n" and not self.is_pretrained

    @property
    def title(self) -> str:
        """The task, or the model, text, dtype and seed; and what distinguishes the group."""
        if not self.is_pretrained:
            return f"{self.task.name} ({self.distinction})" if self.distinction else self.task.name
        row, settings = self.rows[0], self.settings
        device = "" if settings["device"] == "cpu" else f", {settings['device']}"
        planted = "" if settings["planted"] else ", nothing planted"
        return (
            f"{row['model']}, {row['text']}, {settings['dtype']}{device}, "
            f"seed {settings['seed']}{planted}"
        )

    @cached_property
    def series(self) -> list[Series]:
        names = dict.fromkeys(map(series_of, self.rows))
        return sorted(names, key=lambda series: series.variant != pretrained.BASELINE)

    @cached_property
    def xs(self) -> list[Any]:
        """The eval lengths in ascending order, or the conditions in the order of the experiment."""
        present = {row["x"] for row in self.rows}
        return sorted(
            present, key=None if self.task.axis == "n" else list(self.task.conditions).index
        )

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({row["seed"] for row in self.rows})

    @cached_property
    def points(self) -> dict[tuple[Series, Any], Point]:
        """The point of each series and x, also of those without rows."""
        rows: dict[tuple[Series, Any], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row["seed"]):
            rows.setdefault((series_of(row), row["x"]), []).append(row)
        keys = product(self.series, self.xs)
        return {(s, x): Point(self, s, x, rows.get((s, x), [])) for s, x in keys}

    def of(self, series: Series) -> list[Point]:
        """The points of a series in the order of x."""
        return [self.points[series, x] for x in self.xs]

    def name(self, series: Series) -> str:
        """The label of a series with its marks."""
        return series.label + self.facts(series).marks(len(self.seeds))

    def base(self, series: Series) -> Series:
        """The baseline of a series: with the same position encoding. A model has only one."""
        return Series(baseline_of(self.task), "" if self.is_pretrained else series.detail)

    @property
    def chance(self) -> float | None:
        return self.rows[0].get("chance")

    @property
    def metrics(self) -> list[Metric]:
        """The metrics. Optional ones that occur in no result are left out."""
        return metrics_of([self])

    # ---- trained seeds and sweeps, of tasks

    def facts(self, series: Series) -> SeriesFacts:
        """What is known of a series."""
        tuned, bar = self.tuned(series), self.task.trained_score
        point = self.points.get((series, self.settings.get("train_longest")))
        untrained, unstable = 0, False
        if bar is not None and point is not None:
            scores = list(point.values(self.task.score.name).values())
            untrained = len(point.rows) - sum(score >= bar for score in scores)
            unstable = bool(scores) and max(scores) - min(scores) > SPREAD
        edge = untrained > 0 and at_edge(tuned)
        return SeriesFacts(untrained, unstable, edge, values_text(tuned["values"]))

    def tuned(self, series: Series) -> dict[str, Any]:
        """The tuned "values" of a series and the candidates "tried"; both empty if there was no
        sweep for it."""
        return self._a_row(series).get("tuned") or {"values": {}, "tried": []}

    def variant_settings(self, series: Series) -> dict[str, Any]:
        """The settings of the variant that differ from those of the table, besides those of the
        sweep."""
        shared = self.settings
        return {
            name: value
            for name, value in sorted(self._a_row(series)["settings"].items())
            if shared.get(name) not in (value, TUNED)
        }

    def _a_row(self, series: Series) -> Row:
        """A row of the series. Its settings do not depend on x and seed."""
        return next(row for point in self.of(series) for row in point.rows)

    def p_values(self, xs: Collection[Any] | None = None) -> dict[tuple[Series, Any], float]:
        """The p values of the differences from the baseline, with Holm's correction for all that
        are in the table of these x (default: all)."""
        chosen = {k: p for k, p in self.points.items() if xs is None or p.x in xs}
        tests = {key: t_test(point.versus_baseline) for key, point in chosen.items()}
        return holm({key: p for key, p in tests.items() if p is not None})


def metrics_of(groups: Sequence[Group]) -> list[Metric]:
    """The metrics of one task, to which all ``groups`` belong.

    Optional metrics that occur in no result of these groups are left out.
    """
    measured = {name for group in groups for row in group.rows for name in row["metrics"]}
    optional = groups[0].is_pretrained  # its measures are options
    return [m for m in groups[0].task.metrics if not (m.optional or optional) or m.name in measured]


def groups(rows: Iterable[Row]) -> list[Group]:
    """Group rows by task and by what the rows of a table share; rows of sweeps are left out.

    Tasks come first, then experiments, then pretrained models.

    Raises:
        UsageError: the task of a row is unknown.
    """
    keyed: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not is_validation(row):
            task_of(row["task"])
            keyed.setdefault((row["task"], json.dumps(_shared(row), sort_keys=True)), []).append(
                row
            )
    names = [*TASKS, *EXPERIMENTS, pretrained.MODELS.name]
    # Pretrained models are in the order of the rows.
    ordered = sorted(
        keyed.items(),
        key=lambda item: (names.index(item[0][0]), item[0][1] * (item[0][0] != names[-1])),
    )
    all_groups = [_group(part) for _, table_rows in ordered for part in _by_sizes(table_rows)]
    return [replace(group, distinction=_distinction(group, all_groups)) for group in all_groups]


def _shared(row: Row) -> dict[str, Any]:
    """What the rows of a table share, without the settings of the test set. Settings that give the
    same number of test sequences at an x share rows, so these numbers tell the tables apart."""
    return {name: value for name, value in row["group"].items() if not name.startswith("test_")}


def _by_sizes(rows: list[Row]) -> list[list[Row]]:
    """Split rows into parts. In a part, all rows of one x have the same number of test sequences.
    The part with the largest numbers comes first."""
    sizes: dict[Any, set[int]] = {}
    for row in rows:
        sizes.setdefault(row["x"], set()).add(row.get("sequences", 0))
    parts: dict[int, list[Row]] = {}
    for row in rows:
        larger = [size for size in sizes[row["x"]] if size > row.get("sequences", 0)]
        parts.setdefault(len(larger), []).append(row)
    return [parts[index] for index in sorted(parts)]


def _group(rows: list[Row]) -> Group:
    """The group of the latest row of each (series, x, seed), of the latest version of the series.

    Rows of pretrained models with the same place have different measures, which are joined.
    """
    task, version = task_of(rows[0]["task"]), {series_of(row): row["version"] for row in rows}
    join = task is pretrained.MODELS
    latest: dict[tuple[Any, ...], Row] = {}
    old: dict[str, int] = {}
    for row in rows:
        series = series_of(row)
        if row["version"] != version[series]:
            old[series.label] = old.get(series.label, 0) + 1
            continue
        key = series, row["x"], row["seed"], join and row["status"] != "ok"
        if join and key in latest:
            joined = {name: {**latest[key][name], **row[name]} for name in ("metrics", "curves")}
            row = {**row, **joined}
        latest[key] = row
    text = "result(s) of other versions or settings of the variant"
    left_out = [f"{label}: left out {count} {text}" for label, count in old.items()]
    return Group(task, _shared(rows[0]), list(latest.values()), left_out)


def _distinction(group: Group, every: Sequence[Group]) -> str:
    """What distinguishes a group from the others of its task: the settings, data, device and
    numbers of test sequences in which they differ."""
    settings = described_settings(group)
    names = differing([described_settings(x) for x in every if x.task is group.task])
    return ", ".join(f"{name} {settings.get(name, 'default')}" for name in names)


def described_settings(group: Group) -> dict[str, Any]:
    """The settings of a group, with its numbers of test sequences."""
    sizes = {row["x"]: row["sequences"] for row in group.rows if "sequences" in row}
    text = ", ".join(f"{sizes[x]} at {x}" for x in sorted(sizes))
    return {**group.settings, **({"test sequences": text} if sizes else {})}


def failures(group: Group) -> list[str]:
    """Messages about failed and missing results, one per series and reason."""
    xs_by_failure: dict[tuple[Series, str, tuple[int, ...]], list[Any]] = {}
    for point in group.points.values():
        for status, seeds in point.failures.items():
            if status == "missing" and not point.rows and group.task.axis != "n":
                continue  # not every output layer is trained under every condition
            reason = "no result" if status == "missing" else "; ".join(point.messages) or status
            key = point.series, reason, tuple(seeds)
            xs_by_failure.setdefault(key, []).append(point.x)
    return [
        f"failed: {series.label}, {at(group.task, *xs)}: {reason} "
        f"({len(seeds)} of {len(group.seeds)} seeds: {', '.join(map(str, seeds))})"
        for (series, reason, seeds), xs in xs_by_failure.items()
    ]


def version_warnings(groups: Sequence[Group]) -> list[str]:
    """Warnings if results differ in commit or in the version of a variant, torch or attnzoo."""
    warnings = [f"warning: {x.task.name}: {text}" for x in groups for text in x.left_out]
    every = [row for group in groups for row in group.rows]
    for name in ("commit", "torch", "attnzoo", "arithmetic"):
        if len(values := distinct(every, name)) > 1:
            warnings.append(f"warning: results differ in {name}: {', '.join(values)}")
    return warnings
