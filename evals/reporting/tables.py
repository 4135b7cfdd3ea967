"""The tables of the console and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from commandline.table import Table
from evals.results.summary import BASELINE, UNTRAINED, Group, Point
from evals.task import Metric

PARTIAL = "*"
ENOUGH_SEEDS = 6  # with fewer seeds, a 95 % bootstrap interval is too narrow


def legend(group: Group) -> list[str]:
    """An explanation of each mark (->, †, *) that occurs in a group's tables, and the remarks of
    the task."""
    remarks = group.task.remarks(group.settings)
    return remarks + mark_lines(
        variants=[series.variant for series in group.series],
        seeds=len(group.seeds),
        untrained=any(map(group.untrained, group.series)),
        partial=any(point.failures and point.metrics for point in group.points.values()),
        bar=group.task.trained_score,
        train_length=group.settings["train_longest"],
    )


def mark_lines(
    variants: Iterable[str],
    seeds: int,
    untrained: bool,
    partial: bool,
    bar: float | None,
    train_length: int,
) -> list[str]:
    """The explanations of ->, † and *, where they occur, and a note if there are few seeds.

    bar: the score at the train length below which a seed counts as untrained.
    """
    lines = []
    if any("->" in variant for variant in variants):
        lines.append("a->b: trained with variant a, evaluated with variant b")
    if untrained:
        mark, count = ("1/1", "") if seeds == 1 else (f"k/{seeds}", f" in k of {seeds} seeds")
        lines.append(
            f"{UNTRAINED} {mark}: did not reach {100 * (bar or 0):g} % at the train length "
            f"(n = {train_length}){count}"
        )
    if partial:
        lines.append(f"{PARTIAL} some seeds failed or are missing; the mean leaves them out")
    if 1 < seeds < ENOUGH_SEEDS:
        lines.append(
            f"With only {seeds} seeds the 95 % interval is too narrow: it covers the true mean in "
            "fewer than 95 % of cases"
        )
    return lines


def _by_length(
    group: Group, title: str, cell: Callable[[Point], str], skip: tuple[str, ...] = ()
) -> Table:
    header = ["variant", *(f"n = {length}" for length in group.lengths)]
    rows = [
        [group.name(series), *(cell(point) for point in group.of(series))]
        for series in group.series
        if series.variant not in skip
    ]
    return Table(title, header, rows)


def _cell(metric: Metric) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        failed = "+".join(point.failures)
        if metric.name not in point.metrics:
            return failed or "—"
        shown = point.metrics[metric.name].text(metric.factor, metric.digits)
        return shown + (PARTIAL if failed else "")

    return cell


def chance_text(metric: Metric, chance: float) -> str:
    """The score of blind guessing with its unit, such as "10 %"."""
    return f"{metric.factor * chance:.3g}{' %' * (metric.factor == 100)}"


def score_tables(group: Group) -> list[Table]:
    """Tables of the score, its intervals, the published scores and the differences from softmax."""
    score = group.task.score
    over = "mean ± standard error over seeds" if len(group.seeds) > 1 else "one seed"
    chance = chance_text(score, group.chance)
    tables = [_by_length(group, f"{score.title} ({over}; chance {chance})", _cell(score))]
    if len(group.seeds) > 1:
        tables.append(_by_length(group, f"{score.title}: 95 % bootstrap interval over seeds",
                                 lambda point: _span(point, score)))  # fmt: skip
    if group.task.published is not None and (beside := _published_table(group)) is not None:
        tables.append(beside)
    variants = {series.variant for series in group.series}
    if BASELINE in variants and len(variants) > 1:
        title = f"{score.title}: difference from softmax, paired by seed"
        tables.append(
            _by_length(group, title, lambda point: _difference(point, score), skip=(BASELINE,))
        )
    return tables


def _span(point: Point, score: Metric) -> str:
    found = point.metrics.get(score.name)
    return (found.span(score.factor, score.digits) if found else "") or "—"


def _difference(point: Point, score: Metric) -> str:
    versus = point.versus_baseline
    return "—" if versus is None else versus.text(score.factor, score.digits, sign=True)


def more_tables(group: Group) -> list[Table]:
    """A table for each metric other than the score."""
    return [_by_length(group, m.title, _cell(m)) for m in group.metrics[1:]]


def learned_table(group: Group) -> Table | None:
    """The learned parameters of the variants, or None if there are none."""
    rows = []
    for series in group.series:
        found: dict[str, list[float]] = {}
        for row in {r["training"]: r for p in group.of(series) for r in p.rows}.values():
            for name, values in row["learned"].items():
                found.setdefault(name, []).extend(values)
        rows += [[series.label, name, _spread(values, 3)] for name, values in found.items()]
    title = "Learned parameters: mean (range) over heads and seeds"
    return Table(title, ["variant", "parameter", "value"], rows) if rows else None


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "—"
    mean = f"{sum(values) / len(values):.{digits}f}"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def cost_table(group: Group) -> Table:
    """CPU seconds of training and evaluation. A substitution shares the training of the variant
    that it replaces, so it has no training time of its own."""
    rows = []
    for series in group.series:
        training: dict[int, float] = {}
        evaluation: dict[int, float] = {}
        for row in (row for point in group.of(series) for row in point.rows):
            seed = row["seed"]
            training[seed] = max(training.get(seed, 0.0), row["train_cpu_seconds"])
            evaluation[seed] = evaluation.get(seed, 0.0) + row["cpu_seconds"]
        shared = "->" in series.variant
        spent = list(training.values())
        per_step = [1000 * seconds / group.settings["steps"] for seconds in spent]
        costs = ["shared"] * 2 if shared else [_spread(spent), _spread(per_step)]
        rows.append([series.label, *costs, _spread(list(evaluation.values()))])
    title = "CPU time of a run: mean (range) over seeds"
    return Table(title, ["variant", "training, s", "per step, ms", "evaluation, s"], rows)


def _published_table(group: Group) -> Table | None:
    """The scores of a group beside the published ones of the same variants and lengths."""
    published, score = group.task.published, group.task.score
    assert published is not None
    lengths = [n for n in group.lengths if n in published.lengths]
    rows = []
    for variant, figures in published.rows.items():
        points = {p.length: p for s in group.series if s.variant == variant for p in group.of(s)}
        if points:
            ours = [_cell(score)(points[n]) for n in lengths]
            theirs = [
                f"{figures[published.lengths.index(n)]:.1f}{'?' * (n in published.second_hand)}"
                for n in lengths
            ]
            rows += [[f"{variant}, here", *ours], [f"{variant}, paper", *theirs]]
    if not rows or not lengths:
        return None
    return Table(published.title, ["variant", *(f"n = {n}" for n in lengths)], rows)
