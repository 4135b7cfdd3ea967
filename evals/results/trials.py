"""Statistics over seeds of the rows of experiments.

A summary has a line for each output layer and condition. It contains no times, so the same runs
give the same summary.csv. Tables are made from these lines, here and in the documentation.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commandline.errors import UsageError
from evals.experiment import Experiment
from evals.results.rows import Row, is_pretrained, is_trial
from evals.results.summary import BASELINE, Estimate, estimate
from evals.tasks import EXPERIMENTS

SummaryLine = dict[str, str]


@dataclass(frozen=True)
class TrialGroup:
    """Rows of one experiment with equal settings, data and device kind.

    rows: by (variant, condition, seed). left_out: a message for each variant with rows of older
    versions. distinction: the settings in which the group differs from others of its experiment.
    """

    task: Experiment
    settings: Mapping[str, Any]
    rows: Mapping[tuple[str, str, int], Row]
    left_out: Sequence[str]
    distinction: str = ""

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(variant for variant, _, _ in self.rows))

    @property
    def conditions(self) -> list[str]:
        present = {condition for _, condition, _ in self.rows}
        return [name for name in self.task.conditions if name in present]

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, _, seed in self.rows})

    def scored_rows(self, variant: str, condition: str) -> dict[int, Row]:
        """The rows with scores, by seed."""
        rows = {seed: self.rows.get((variant, condition, seed)) for seed in self.seeds}
        return {s: row for s, row in rows.items() if row is not None and row["status"] == "ok"}

    def failed(self, variant: str, condition: str) -> str:
        """The statuses of the seeds without scores, such as "nan:2"; "" if all have scores."""
        counts: dict[str, int] = {}
        for seed in self.seeds:
            row = self.rows.get((variant, condition, seed))
            status = "missing" if row is None else row["status"]
            if status != "ok":
                counts[status] = counts.get(status, 0) + 1
        return " ".join(f"{status}:{count}" for status, count in sorted(counts.items()))

    def paired(self, one: tuple[str, str], other: tuple[str, str]) -> Estimate | None:
        """The score of one (variant, condition) minus that of another, paired by seed."""
        if one == other:
            return None
        name = self.task.score.name
        first, second = self.scored_rows(*one), self.scored_rows(*other)
        return estimate(
            [row["metrics"][name] - second[s]["metrics"][name]
             for s, row in first.items() if s in second]
        )  # fmt: skip


def of_tasks(rows: Sequence[Row], command: str, required: bool = True) -> list[Row]:
    """The rows of tasks, for a command that has no tables of experiments or pretrained models.

    Raises:
        UsageError: no rows are of tasks, and ``required`` is true.
    """
    others = [row for row in rows if is_trial(row) or is_pretrained(row)]
    task_rows = [row for row in rows if not is_trial(row) and not is_pretrained(row)]
    names = ", ".join(sorted({row["task"] for row in others}))
    where = "; their own folders have summary.csv and report.html"
    if names and not task_rows and required:
        raise UsageError(f"{command} needs results of tasks, got only those of {names}{where}")
    if names:
        print(f"note: {command} leaves out {names}{where}", file=sys.stderr)
    return task_rows


def trial_groups(rows: Iterable[Row]) -> list[TrialGroup]:
    """Group the rows of experiments by experiment, settings, data and kind of device."""
    rows_by_group: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kind = str(row["device"]).split(":")[0]
        shared = json.dumps([row["settings"], kind, row["data"]], sort_keys=True)
        rows_by_group.setdefault((row["task"], shared), []).append(row)
    names = list(EXPERIMENTS)
    ordered = sorted(rows_by_group.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
    return [
        _group(EXPERIMENTS[name], group_rows, [r[0] for (n, _), r in ordered if n == name])
        for (name, _), group_rows in ordered
    ]


def _group(task: Experiment, rows: Sequence[Row], firsts: Sequence[Row]) -> TrialGroup:
    """firsts: a row of each group of the experiment."""
    version = {row["variant"]: row["version"] for row in rows}
    current = [row for row in rows if row["version"] == version[row["variant"]]]
    messages = []
    for variant in version:
        old = sum(row["variant"] == variant for row in rows)
        if old := old - sum(row["variant"] == variant for row in current):
            messages.append(f"{variant}: left out {old} result(s) of other versions of the layer")
    settings = rows[0]["settings"]
    names = [n for n in settings if any(r["settings"].get(n) != settings[n] for r in firsts)]
    parts = [f"{name} {settings[name]}" for name in names]
    for name in ("data", "device"):
        values = {str(row[name]).split(":")[0] for row in firsts}
        parts += [f"{name} {rows[0][name]}"] * (len(values) > 1)
    by_point = {(row["variant"], row["condition"], row["seed"]): row for row in current}
    return TrialGroup(task, settings, by_point, messages, ", ".join(parts))


ENDS = ("", "_se", "_low", "_high", "_seeds")


def _cells(name: str, value: Estimate | None) -> SummaryLine:
    if value is None:
        return {f"{name}{suffix}": "" for suffix in ENDS}
    numbers = (value.mean, value.error, *(value.interval or (None, None)))
    texts = ["" if x is None else f"{x:.6g}" for x in numbers]
    return {f"{name}{suffix}": text for suffix, text in zip(ENDS, [*texts, str(value.count)])}


def summary_lines(group: TrialGroup) -> Iterator[SummaryLine]:
    """A line for each output layer and condition, all with the same columns.

    A metric has its mean, standard error, 95 % interval, and the number of seeds in which it is
    defined. ``curve`` has pairs x:score, means over seeds.
    """
    task = group.task
    for variant in group.variants:
        for condition in group.conditions:
            if not any((variant, condition, seed) in group.rows for seed in group.seeds):
                continue
            valid = group.scored_rows(variant, condition)
            line = {
                "task": task.name,
                "variant": variant,
                "condition": condition,
                "seeds": str(len(group.seeds)),
                "failed": group.failed(variant, condition),
            }
            for metric in task.metrics:
                results = [row["metrics"] for row in valid.values()]
                values = [metrics[metric.name] for metrics in results if metric.name in metrics]
                line |= _cells(metric.name, estimate(values))
            point, name = (variant, condition), task.score.name
            other = (variant, task.versus.get(condition, condition))
            line |= _cells(f"{name}_minus_softmax", group.paired(point, (BASELINE, condition)))
            line |= _cells(f"{name}_gain", group.paired(point, other))
            line["curve"] = _curve([row["curves"] for row in valid.values()])
            line |= {
                "chance": f"{task.chance(group.settings):.6g}",
                "schedule": _schedule(group),
                "settings": group.distinction,
            }
            yield line


def _schedule(group: TrialGroup) -> str:
    return next(iter(group.rows.values()))["schedule"]


def _curve(curves: Sequence[Mapping[str, Sequence[float]]]) -> str:
    measured = [curve for curve in curves if curve]
    if not measured:
        return ""
    columns = zip(*(curve["score"] for curve in measured), strict=True)
    means = [sum(column) / len(column) for column in columns]
    return " ".join(f"{x:g}:{y:.6g}" for x, y in zip(measured[0]["x"], means, strict=True))


def trials_csv(groups: Sequence[TrialGroup]) -> str:
    """The summary.csv of one experiment."""
    lines = [line for group in groups for line in summary_lines(group)]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
