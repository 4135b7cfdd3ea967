"""From rows to a summary: means and standard errors over seeds, and the tables made of them.

The summary holds nothing that depends on the run (no times, no hosts): two runs of the same cells
write the same summary.csv, however often one of them was killed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from evals.cells import Study
from evals.metrics import METRICS
from evals.store import Row

BASELINE = "softmax"


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds, and its standard error s/√k (None for one seed)."""

    mean: float
    error: float | None
    count: int

    def text(self, factor: float = 1.0, digits: int = 1, sign: bool = False) -> str:
        """Such as "98.6 ±0.1"."""
        mean = f"{factor * self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if self.error is None else f"{mean} ±{factor * self.error:.{digits}f}"


def estimate(values: list[float]) -> Estimate | None:
    """Mean and standard error of one value per seed."""
    if not values:
        return None
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return Estimate(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count), count)


@dataclass(frozen=True)
class Point:
    """One variant at one length, over the seeds."""

    variant: str
    length: int
    metrics: dict[str, Estimate]
    versus_baseline: Estimate | None  # of accuracy, paired by seed
    best_keys: list[float]
    failures: dict[str, int]  # status -> seeds
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one variant: of its training and of its tests, one number per seed."""

    variant: str
    is_swap: bool
    training: list[float]
    testing: list[float]


@dataclass(frozen=True)
class Summary:
    """Every point of a study, in the study's order."""

    study: Study
    points: list[Point]
    costs: list[Cost]

    @property
    def variants(self) -> list[str]:
        return [str(spec) for spec in self.study.specs]

    def of(self, variant: str) -> list[Point]:
        """A variant's points, by length."""
        return [point for point in self.points if point.variant == variant]


def summarize(study: Study, rows: Mapping[str, Row]) -> Summary:
    """The summary of those rows that belong to the study; others in the file do not count."""
    found = {
        (str(spec), seed, length): rows[key]
        for spec in study.specs
        for seed in range(study.seeds)
        for length in study.lengths
        if (key := study.row_key(spec, seed, length)) in rows
    }
    points = [
        _point(study, found, str(spec), length) for spec in study.specs for length in study.lengths
    ]
    costs = []
    for spec in study.specs:
        training, testing = [], []
        for seed in range(study.seeds):
            mine = [row for n in study.lengths if (row := found.get((str(spec), seed, n)))]
            if mine:
                training.append(max(row["train_cpu_seconds"] for row in mine))
                testing.append(sum(row["cpu_seconds"] for row in mine))
        costs.append(Cost(str(spec), spec.is_swap, training, testing))
    return Summary(study, points, costs)


def _point(
    study: Study, found: Mapping[tuple[str, int, int], Row], variant: str, length: int
) -> Point:
    every = {
        s: found[variant, s, length] for s in range(study.seeds) if (variant, s, length) in found
    }
    good = {seed: row for seed, row in every.items() if row["status"] == "ok"}
    failures: dict[str, int] = {}
    for row in every.values():
        if row["status"] != "ok":
            failures[row["status"]] = failures.get(row["status"], 0) + 1
    if missing := study.seeds - len(every):
        failures["missing"] = missing
    metrics = {}
    for name in METRICS:
        if (value := estimate([row[name] for row in good.values()])) is not None:
            metrics[name] = value
    paired = []
    if variant != BASELINE:
        for seed, row in good.items():
            base = found.get((BASELINE, seed, length))
            if base is not None and base["status"] == "ok":
                paired.append(row["accuracy"] - base["accuracy"])
    columns = zip(*(row["best_keys"] for row in good.values()), strict=True)
    best = [sum(column) / len(column) for column in columns]
    messages = sorted({row["message"] for row in every.values() if row["message"]})
    return Point(variant, length, metrics, estimate(paired), best, failures, messages)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def csv_text(summary: Summary, task: str, chance: float) -> str:
    """summary.csv: one line per (variant, length)."""
    columns = [column for name in METRICS for column in (name, f"{name}_se")]
    header = ["task", "variant", "length", "seeds", "failed", *columns]
    header += ["accuracy_minus_softmax", "accuracy_minus_softmax_se"]
    settings = summary.study.settings
    constants = {"chance": chance, "steps": settings.steps, "schedule": settings.schedule}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*header, *constants])
    for point in summary.points:
        values: list[object] = []
        for name in METRICS:
            value = point.metrics.get(name)
            values += [_digits(value and value.mean), _digits(value and value.error)]
        versus = point.versus_baseline
        values += [_digits(versus and versus.mean), _digits(versus and versus.error)]
        seeds = point.metrics["accuracy"].count if point.metrics else 0
        failed = " ".join(f"{status}:{n}" for status, n in sorted(point.failures.items()))
        start = [task, point.variant, point.length, seeds, failed]
        writer.writerow([*start, *values, *constants.values()])
    return file.getvalue()
