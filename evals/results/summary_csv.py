"""Summaries: the numbers of a group's tables, from its rows or from a summary.csv.

A summary contains no times and no host names, so the same runs give the same summary.csv even if
they were interrupted or split into shards. The documentation stores these files, and its tables are
made by the same code as those of new results.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from evals.results import pretrained
from evals.results.statistics import Estimate, estimate
from evals.results.summary import Group, Point, Series, SeriesFacts, metrics_of, task_of
from evals.results.tuned import chosen_score
from evals.task import Metric

ENDS = ("", "_se", "_low", "_high")
EFFECTIVE_SHARE = 0.85  # of the score at the train length, see `Summary.effective`


@dataclass(frozen=True)
class Summary:
    """The numbers of the tables of one group.

    Attributes:
        task: see `evals.results.summary.task_of`.
        cells: the columns of summary.csv by (series, x), in the order of the results. A metric NAME
            has the columns NAME, NAME_se, NAME_low and NAME_high, and where the counts differ
            between metrics, NAME_seeds.
        distinction, remarks: texts for the title and the notes.
        shown: the x that the tables show, None for all. Effective lengths are those of all x.
    """

    task: Any
    cells: dict[tuple[Series, Any], dict[str, str]]
    distinction: str = ""
    remarks: tuple[str, ...] = ()
    shown: tuple[Any, ...] | None = None

    @cached_property
    def _first(self) -> dict[str, str]:
        return next(iter(self.cells.values()))

    @cached_property
    def lines(self) -> dict[Series, SeriesFacts]:
        """What is known of each series; results other than those of tasks lack some columns."""
        return {
            series: SeriesFacts(
                int(line.get("untrained") or 0), line.get("unstable") == "1",
                line.get("at_edge") == "1", line.get("tuned") or "",
            )
            for (series, _), line in self.cells.items()
        }  # fmt: skip

    @cached_property
    def xs(self) -> list[Any]:
        """The eval lengths or conditions that the tables show."""
        return [x for x in self._measured if self.shown is None or x in self.shown]

    @cached_property
    def _measured(self) -> list[Any]:
        """All eval lengths or conditions."""
        xs = list(dict.fromkeys(x for _, x in self.cells))
        return sorted(xs) if self.task.axis == "n" else xs

    @cached_property
    def means(self) -> dict[tuple[Series, Any, str], Estimate]:
        """Metrics by (series, x, name), and the differences of the score: by the names `difference`
        from the baseline and `gain` from another condition."""
        return {
            (*place, name): _estimate(line, name)
            for place, line in self.cells.items()
            for name in line
            if line[name] and f"{name}_low" in line
        }

    @cached_property
    def failed(self) -> dict[tuple[Series, Any], str]:
        """The statuses of seeds without a score, such as "nan+missing"."""
        return {
            place: "+".join(part.split(":")[0] for part in line["failed"].split())
            for place, line in self.cells.items()
            if line.get("failed")
        }

    @cached_property
    def p(self) -> dict[tuple[Series, Any], float]:
        """The p values of the differences from the baseline, with Holm's correction."""
        name = f"{self.task.score.name}_p_holm"
        return {place: float(line[name]) for place, line in self.cells.items() if line.get(name)}

    @cached_property
    def seeds(self) -> int:
        """The number of seeds; 0 if it differs between lengths."""
        of_length = self.task.axis == "n"
        return max(
            int(line.get("seeds", 0)) + of_length * _failed(line.get("failed", ""))
            for line in self.cells.values()
        )

    @property
    def chance(self) -> float | None:
        return float(self._first["chance"]) if "chance" in self._first else None

    @property
    def schedule(self) -> str:
        return self._first.get("schedule", "")

    @property
    def train_length(self) -> int | None:
        """None for an experiment or a pretrained model."""
        return int(self._first["train_length"]) if "train_length" in self._first else None

    @property
    def title(self) -> str:
        """The name of the task, and what distinguishes the group from others of it."""
        return f"{self.task.name} ({self.distinction})" if self.distinction else self.task.name

    def mean(self, series: Series, x: Any, name: str) -> Estimate | None:
        return self.means.get((series, x, name))

    def label(self, series: Series) -> str:
        """The label of a series with its marks."""
        return series.label + self.lines[series].marks(self.seeds)

    def ranked(self, metric: Metric) -> list[Series]:
        """The series sorted by the value at the longest length; those without one come last."""
        sign = 1 if metric.lower_is_better else -1

        def rank(series: Series) -> tuple[bool, float]:
            mean = self.mean(series, self.xs[-1], metric.name)
            return mean is None, 0.0 if mean is None else sign * mean.mean

        return sorted(self.lines, key=rank)

    def effective(self, series: Series, metric: Metric) -> tuple[int, bool] | None:
        """The effective length: the longest length up to which the metric's lead over chance stays
        above `EFFECTIVE_SHARE` of that at the train length, of all lengths with a value; and
        whether it drops at a longer one, so that the effective length is not only a lower bound.
        Only the score has a chance other than 0.

        None if a seed is untrained, the value at the train length is missing or lower is better.
        """
        if self.train_length is None or metric.lower_is_better or self.lines[series].untrained:
            return None
        start, longest = self.mean(series, self.train_length, metric.name), None
        if start is None:
            return None
        chance = (self.chance or 0.0) if metric is self.task.score else 0.0
        for x in [x for x in self._measured if x >= self.train_length]:
            mean = self.mean(series, x, metric.name)
            if mean is None:  # missing or failed, which says nothing about the score
                continue
            if mean.mean - chance <= EFFECTIVE_SHARE * (start.mean - chance):
                return None if longest is None else (longest, True)
            longest = x
        return None if longest is None else (longest, False)


def difference(task: Any) -> str:
    """The name of the score's difference from the baseline, paired by seed."""
    return pretrained.RISE if task is pretrained.MODELS else f"{task.score.name}_minus_softmax"


def gain(task: Any) -> str:
    """The name of the score's difference from another condition, paired by seed."""
    return f"{task.score.name}_gain"


def summary_of(group: Group, xs: Sequence[Any] | None = None) -> Summary:
    """The summary of a group of rows. Its tables show these x (default: all), and Holm's correction
    is for the comparisons there."""
    cells = cells_from(group.task, lines_of(group, xs))
    return Summary(
        group.task,
        dict(sorted(cells.items(), key=lambda item: group.series.index(item[0][0]))),
        group.title if group.is_pretrained else group.distinction,
        tuple(group.task.remarks(group.settings)),
        None if xs is None else tuple(xs),
    )


# ---- files


def csv_text(groups: Sequence[Group]) -> str:
    """The summary.csv of a task, an experiment or pretrained models: a line for each (group,
    series, x), or for pretrained models for each (group, series, x, metric).

    A metric has its mean, standard error and 95 % interval. The column ``settings`` says how the
    groups differ. It is empty for a single group.
    """
    import pandas as pd

    metrics = metrics_of(groups)
    lines = [line for group in groups for line in lines_of(group, metrics=metrics)]
    return pd.DataFrame(lines).to_csv(index=False, lineterminator="\n")


def number_text(value: float | None) -> str:
    """A number with six digits; empty for None."""
    return "" if value is None else f"{value:.6g}"


def numbers(value: Estimate | None) -> list[str]:
    """Mean, standard error and both ends of the interval as text; empty where there is none."""
    if value is None:
        return [""] * len(ENDS)
    return [number_text(x) for x in (value.mean, value.error, *(value.interval or (None, None)))]


def _cells(name: str, value: Estimate | None, count: bool = False) -> dict[str, Any]:
    cells = {f"{name}{end}": text for end, text in zip(ENDS, numbers(value), strict=True)}
    seeds = "" if value is None else value.count
    return cells | ({f"{name}_seeds": seeds} if count else {})


def _statuses(point: Point) -> str:
    return " ".join(f"{status}:{len(x)}" for status, x in sorted(point.failures.items()))


def lines_of(
    group: Group, xs: Sequence[Any] | None = None, metrics: Sequence[Metric] | None = None
) -> list[dict[str, str]]:
    """The lines of a group in summary.csv, with these metrics (default: all).

    xs: those whose p values are corrected and in the lines (default: all).
    """
    if group.is_pretrained:
        lines = _of_model(group)
    else:
        lines = _of_points(group, xs, metrics or group.metrics)
    return [{name: str(value) for name, value in line.items()} for line in lines]


def _of_points(
    group: Group, xs: Sequence[Any] | None, metrics: Sequence[Metric]
) -> Iterable[dict[str, Any]]:
    """The lines of a task, sorted by series, or of an experiment."""
    task, settings, of_length = group.task, group.settings, group.task.axis == "n"
    score, p, points = task.score.name, group.p_values(xs), list(group.points.values())
    if of_length:
        points = sorted(points, key=lambda p: (p.series.variant, p.series.detail or "none"))
    for point in points:
        series = point.series
        means = {metric.name: point.mean(metric.name) for metric in metrics}
        means[difference(task)] = estimate(point.versus_baseline)
        line: dict[str, Any] = {"task": task.name, "variant": series.variant}
        if of_length:
            facts, tuned = group.facts(series), group.tuned(series)
            line |= {"positions": series.detail or "none", "length": point.x}
            line |= {"seeds": len(point.values(score)), "failed": _statuses(point)}
            line |= {"untrained": facts.untrained}
            after = {
                f"{score}_p_holm": number_text(p.get((series, point.x))),
                "unstable": int(facts.unstable),
                "at_edge": int(facts.at_edge),
                "tuned": facts.tuned,
                "validation": number_text(chosen_score(tuned)),
            }
        elif point.rows:
            line |= {"condition": point.x, "seeds": len(group.seeds), "failed": _statuses(point)}
            other = group.points.get((series, task.versus.get(point.x)))
            means[gain(task)] = estimate(point.minus(other))
            xy = zip(point.curve("x"), point.curve("score"), strict=True)
            after = {"curve": " ".join(f"{x:g}:{y:.6g}" for x, y in xy)}
        else:
            continue
        for name, mean in means.items():
            line |= _cells(name, mean, count=not of_length)
        line |= {**after, "chance": number_text(group.chance)}
        if of_length:
            line |= {"train_length": settings["train_longest"], "steps": settings["steps"]}
        yield line | {"schedule": group.rows[0]["schedule"], "settings": group.distinction}


def _of_model(group: Group) -> Iterable[dict[str, Any]]:
    row, settings = group.rows[0], group.settings
    for point in group.points.values():
        names = dict.fromkeys(name for row in point.rows for name in row["metrics"])
        means = {name: point.mean(name) for name in names}
        means[pretrained.RISE] = estimate(point.versus_baseline)
        for (begin, end), mean in by_position(group, point).items():
            means[f"loss at positions {begin} to {end - 1}"] = mean
        for name, mean in means.items():
            if mean is not None:
                middle, _, low, high = numbers(mean)
                yield {
                    "model": row["model"], "dtype": settings["dtype"], "text": row["text"],
                    "seed": settings["seed"], "series": point.series.label, "length": point.x,
                    "metric": name, "mean": middle, "low": low, "high": high,
                    "samples": mean.count,
                }  # fmt: skip


def by_position(group: Group, point: Point, rise: bool = False) -> dict[tuple[int, int], Estimate]:
    """The mean loss of each bin of positions, (first, end), in which a sample has tokens of the
    text. The mean is over samples. With ``rise``, the loss of the model as loaded is subtracted,
    paired by sample."""
    bins = _bins(point)
    if rise:
        base = _bins(group.points.get((group.base(point.series), point.x)))
        bins = {place: loss - base[place] for place, loss in bins.items() if place in base}
    losses: dict[tuple[int, int], list[float]] = {}
    for (_, span), loss in bins.items():
        losses.setdefault(span, []).append(loss)
    return {span: mean for span in sorted(losses) if (mean := estimate(losses[span]))}


def _bins(point: Point | None) -> dict[tuple[int, tuple[int, int]], float]:
    """The mean loss of each bin, by sample and (first position, end)."""
    curves = {s: row["curves"] for s, row in point.scored.items()} if point else {}
    return {
        (sample, span): total / count
        for sample, curve in curves.items()
        if "loss_sum" in curve
        for span, total, count in zip(
            pairwise(map(int, curve["loss_edges"])), curve["loss_sum"], curve["loss_count"],
            strict=True,
        )
        if count
    }  # fmt: skip


def read_summary(path: Path) -> Summary:
    """The summary in a file NAME.csv or NAME.OTHER-WORDS.csv. NAME is that of a task, "pretrained"
    or "adapt".

    Raises:
        UsageError: the lines of a task have different settings.
    """
    name, lines = path.stem.split(".")[0], list(csv.DictReader(path.read_text().splitlines()))
    if len(several := {line.get("settings") or "" for line in lines}) > 1:
        settings = "; ".join(sorted(several))
        raise UsageError(f"all lines of {path} must have the same settings, got {settings}")
    task = pretrained.MODELS if "series" in lines[0] else task_of(name)
    return Summary(task, cells_from(task, lines))


def cells_from(
    task: Any, lines: Iterable[Mapping[str, str]]
) -> dict[tuple[Series, Any], dict[str, str]]:
    """The lines of a summary.csv, in which all numbers have six digits, by (series, x).

    Those of pretrained models, one for each metric, become one for each (series, x).
    """
    cells: dict[tuple[Series, Any], dict[str, str]] = {}
    for line in lines:
        if task is pretrained.MODELS:
            place = Series(*line["series"].split(" · ")), int(line["length"])
            values = (line["mean"], "", line["low"], line["high"], line["samples"])
            named = dict(
                zip([line["metric"] + end for end in (*ENDS, "_seeds")], values, strict=True)
            )
            cells.setdefault(place, {}).update(named)
        elif task.axis == "n":
            detail = line["positions"] if line["positions"] != "none" else ""
            cells[Series(line["variant"], detail), int(line["length"])] = dict(line)
        else:
            cells[Series(line["variant"]), line["condition"]] = dict(line)
    return cells


def _failed(text: str) -> int:
    """The number of seeds without a score, from a text such as "nan:2 oom:1"."""
    return sum(int(part.split(":")[1]) for part in text.split())


def _estimate(line: Mapping[str, str], name: str) -> Estimate:
    mean, error, low, high = (line.get(f"{name}{end}") for end in ENDS)
    interval = (float(low), float(high)) if low and high else None
    count = int(line.get(f"{name}_seeds") or line["seeds"])
    return Estimate(float(mean or 0), float(error) if error else None, count, interval)
