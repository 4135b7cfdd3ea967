"""The tables of the console and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from commandline.table import Table
from evals.results.paired import LEVEL, coverage
from evals.results.summary import BASELINE, SPREAD, UNSTABLE, UNTRAINED, Group, Point, Series
from evals.results.tuned import validation, values_text
from evals.task import Metric

PARTIAL = "*"
BETTER, WORSE = "⁺", "⁻"  # than softmax, with a p value below `LEVEL`
ENOUGH_FOR_INTERVALS = 30  # with fewer seeds, a 95 % bootstrap interval is too narrow
ENOUGH_FOR_ERRORS = 6  # with fewer seeds, the estimated standard errors vary much


def legend(group: Group) -> list[str]:
    """An explanation of each mark (->, †, ‡, ⁺, ⁻, *) that occurs in a group's tables, and the
    remarks of the task."""
    remarks = group.task.remarks(group.settings)
    return remarks + mark_lines(
        variants=[series.variant for series in group.series],
        seeds=len(group.seeds),
        untrained=[series.variant for series in group.series if group.untrained(series)],
        untuned=[series.label for series in group.series if not group.tuned(series)["values"]],
        at_edge=[series.label for series in group.series if group.at_edge(series)],
        swept=any(group.tuned(series)["values"] for series in group.series),
        unstable=any(map(group.unstable, group.series)),
        factor=group.task.score.factor,
        tested=len(group.p_values()),
        partial=any(point.failures and point.metrics for point in group.points.values()),
        bar=group.task.trained_score,
        train_length=group.settings["train_longest"],
    )


def mark_lines(
    variants: Iterable[str],
    seeds: int,
    untrained: Sequence[str],
    partial: bool,
    bar: float | None,
    train_length: int,
    untuned: Sequence[str] = (),
    at_edge: Sequence[str] = (),
    swept: bool = False,
    unstable: bool = False,
    factor: float = 100,
    tested: int = 0,
) -> list[str]:
    """The explanations of the marks that occur, and a note if there are few seeds.

    untrained: the variants with seeds whose score at the train length is below ``bar``. untuned:
    the variants without a sweep. at_edge: those whose sweep chose its smallest or largest value.
    swept: whether any variant has one. factor: tables show
    score · factor. tested: the number of comparisons with softmax.
    """
    lines = []
    untrained_substitution = any("->" in variant for variant in untrained)
    if any("->" in variant for variant in variants):
        lines.append("a->b: trained with variant a, evaluated with variant b")
    if untrained:
        mark, count = ("1/1", "") if seeds == 1 else (f"k/{seeds}", f" in k of {seeds} seeds")
        lines.append(
            f"{UNTRAINED} {mark}: did not reach {100 * (bar or 0):g} % at the train length "
            f"(n = {train_length}){count}{_tuning(at_edge, swept)}"
        )
        if untrained_substitution:
            lines[-1] += ". For a->b, the substitution b may be the cause"
    if swept and untuned:
        lines.append(f"Trained with the settings of the preset, not tuned: {', '.join(untuned)}")
    if unstable:
        lines.append(
            f"{UNSTABLE} unstable: the seeds differ by more than {factor * SPREAD:g} points at the "
            "train length; another seed, or another rounding, can change the row"
        )
    if tested:
        lines.append(
            f"{BETTER} better, {WORSE} worse than {BASELINE} (p < {LEVEL:g}: paired t-test over "
            f"seeds, Holm's correction for the {tested} comparisons of the table)"
        )
    if partial:
        lines.append(f"{PARTIAL} some seeds failed or are missing; the mean leaves them out")
    if 1 < seeds < ENOUGH_FOR_INTERVALS:
        lines.append(coverage_line(seeds))
    return lines


def coverage_line(seeds: int) -> str:
    """How often a 95 % bootstrap interval over so few seeds covers the true mean."""
    share = 100 * coverage(seeds)
    return (
        f"The 95 % interval is too narrow with {seeds} seeds: if scores are normally distributed, "
        f"it covers the true mean in about {share:.0f} % of cases"
    )


def _tuning(at_edge: Sequence[str], swept: bool) -> str:
    """Whether the variants of such seeds were tuned."""
    if not swept:
        return " with these settings, not tuned"
    text = ", with the best values of a sweep"
    if at_edge:
        text += (
            f". For {', '.join(at_edge)} the best value was the smallest or largest of the sweep, "
            "so values beyond it may be better"
        )
    return text


def verdict(p: float | None, difference: float | None, metric: Metric) -> str:
    """`BETTER` or `WORSE` for a difference from softmax with a p value below `LEVEL`, else ""."""
    if p is None or difference is None or p >= LEVEL:
        return ""
    return WORSE if (difference < 0) != metric.lower_is_better else BETTER


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
        p = group.p_values()
        title = f"{score.title}: difference from softmax, paired by seed"
        if p:
            title += f" (p of a paired t-test, Holm's correction for {len(p)} comparisons)"
        tables.append(
            _by_length(group, title, lambda point: _difference(point, score, p), skip=(BASELINE,))
        )
    return tables


def _span(point: Point, score: Metric) -> str:
    mean = point.metrics.get(score.name)
    return (mean.span(score.factor, score.digits) if mean else "") or "—"


def _difference(point: Point, score: Metric, p_values: Mapping[tuple[Series, int], float]) -> str:
    versus = point.versus_baseline
    if versus is None:
        return "—"
    p = p_values.get((point.series, point.length))
    text = versus.text(score.factor, score.digits, sign=True)
    return text if p is None else f"{text} ({p_text(p)})"


def p_text(p: float) -> str:
    """A p value as text.

    >>> p_text(0.0123), p_text(1e-9)
    ('p 0.012', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def settings_table(group: Group) -> Table | None:
    """The settings that differ between the variants, and the validation scores of the sweep; None
    if there are no such settings."""
    score, tuned = group.task.score, {series: group.tuned(series) for series in group.series}
    variant_settings = {series: group.variant_settings(series) for series in group.series}
    if not any([*(x["values"] for x in tuned.values()), *variant_settings.values()]):
        return None
    tried = dict.fromkeys(
        values_text(candidate["values"]) for x in tuned.values() for candidate in x["tried"]
    )
    rows = []
    for series in group.series:
        scores = {
            values_text(candidate["values"]): validation(candidate)
            for candidate in tuned[series]["tried"]
        }
        shown = [scores.get(name) for name in tried]
        rows.append([
            series.label,
            ", ".join(f"{name} {value}" for name, value in variant_settings[series].items()) or "—",
            values_text(tuned[series]["values"]) or "not tuned",
            *("—" if x is None else f"{score.factor * x:.{score.digits}f}" for x in shown),
        ])  # fmt: skip
    title = "Settings of each variant, and mean validation score of each candidate of the sweep"
    return Table(title, ["variant", "own settings", "tuned", *tried], rows)


def more_tables(group: Group) -> list[Table]:
    """A table for each metric other than the score."""
    return [_by_length(group, m.title, _cell(m)) for m in group.metrics[1:]]


def learned_table(group: Group) -> Table | None:
    """The learned parameters of the variants, or None if there are none."""
    rows = []
    for series in group.series:
        values_by_name: dict[str, list[float]] = {}
        for row in {r["training"]: r for p in group.of(series) for r in p.rows}.values():
            for name, values in row["learned"].items():
                values_by_name.setdefault(name, []).extend(values)
        rows += [
            [series.label, name, _spread(values, 3)] for name, values in values_by_name.items()
        ]
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
            measured = [_cell(score)(points[n]) for n in lengths]
            paper = [
                f"{figures[published.lengths.index(n)]:.1f}{'?' * (n in published.second_hand)}"
                for n in lengths
            ]
            rows += [[f"{variant}, here", *measured], [f"{variant}, paper", *paper]]
    if not rows or not lengths:
        return None
    return Table(published.title, ["variant", *(f"n = {n}" for n in lengths)], rows)
