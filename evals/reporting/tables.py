"""Tables of results: a line for each variant and a column for each eval length or condition.

Console, report, export and documentation show these tables. They are made from a `Summary`, which
comes from result rows or from a stored summary.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commandline.table import Table
from evals.results.statistics import LEVEL, Estimate
from evals.results.summary import SPREAD, UNSTABLE, UNTRAINED, Group, Series, baseline_of
from evals.results.summary_csv import EFFECTIVE_SHARE, Summary, difference, gain
from evals.results.tuned import validation, values_text
from evals.task import Metric

NONE = "—"  # an entry without a number
PARTIAL = "*"
BETTER, WORSE = "⁺", "⁻"  # than softmax, with a p value below `LEVEL`
EFFECTIVE = "effective length"
EFFECTIVE_NOTE = (
    f"the longest n up to which the lead of the score over chance stays above "
    f"{100 * EFFECTIVE_SHARE:g} % of that at the train length"
)
ENOUGH_FOR_ERRORS = 6  # with fewer seeds, the estimated standard errors vary much
# What a table shows besides the mean: nothing, the standard error, half the width of the interval,
# or its ends.
BARE, ERROR, HALF, RANGE, WIDE_RANGE = "", "±", "half", "–", " … "
HALF_NOTE = "mean ± half the width of its 95 % interval"
MOST_LENGTHS = 5  # columns of a short table; the effective length is the sixth


# ---- entries


def number(metric: Metric, value: float, sign: bool = False) -> str:
    """A value of the metric as text, in the unit of the tables: 0.986 as "98.6"."""
    return f"{metric.factor * value:{'+' if sign else ''}.{metric.digits}f}"


def shown(
    value: Estimate | None, metric: Metric, spread: str = BARE, sign: bool = False, mark: str = ""
) -> str:
    """A mean with its spread, such as "98.6 ±0.4" or "98.6 (98.1–99.0)"; `NONE` for None."""
    if value is None:
        return NONE
    text = number(metric, value.mean, sign) + mark
    if spread == ERROR:
        return text if value.error is None else f"{text} ±{number(metric, value.error)}"
    if spread == HALF:
        if value.interval is None:
            return text
        low, high = value.interval
        return f"{text} ±{number(metric, (high - low) / 2)}"
    return f"{text} ({interval(value, metric, spread)})" if spread and value.interval else text


def interval(value: Estimate | None, metric: Metric, between: str = WIDE_RANGE) -> str:
    """The 95 % interval, such as "98.1 … 99.0"; "" for one seed."""
    ends = value.interval if value is not None else None
    return between.join(number(metric, end) for end in ends or ())


def entry(
    summary: Summary,
    series: Series,
    x: Any,
    metric: Metric,
    spread: str = ERROR,
    name: str = "",
    marked: bool = False,
) -> str:
    """The entry of a table: the mean of a metric with the spread, or why there is none.

    `PARTIAL` is added if a seed has no value, and with ``marked`` the `verdict`. name: that of a
    difference of the score, which has a sign.
    """
    value = summary.mean(series, x, name or metric.name)
    if value is None:
        return NONE if name else summary.failed.get((series, x), NONE)
    mark = verdict(summary, series, x) if marked and metric is summary.task.score else ""
    partial = PARTIAL * is_partial(summary, value)
    return shown(value, metric, spread, bool(name), mark) + partial


def is_partial(summary: Summary, value: Estimate | None) -> bool:
    """Whether a mean leaves out seeds that failed, are missing or have no value."""
    return value is not None and value.count < summary.seeds


def verdict(summary: Summary, series: Series, x: Any) -> str:
    """`BETTER` or `WORSE` for a difference from softmax with a p value below `LEVEL`, else ""."""
    p, versus = summary.p.get((series, x)), summary.mean(series, x, difference(summary.task))
    if p is None or versus is None or p >= LEVEL:
        return ""
    return WORSE if (versus.mean < 0) != summary.task.score.lower_is_better else BETTER


def chance_text(metric: Metric, chance: float) -> str:
    """The score of blind guessing with its unit.

    >>> [chance_text(Metric("accuracy", "", factor=100), chance) for chance in (0.1, 1e-8)]
    ['10 %', 'about 0 %']
    """
    value = metric.factor * chance
    text = "about 0" if 0 < value < 1e-3 else f"{value:.3g}"
    return text + " %" * (metric.factor == 100)


def p_text(p: float) -> str:
    """A p value as text.

    >>> p_text(0.0123), p_text(1e-9)
    ('p 0.012', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def has_effective(summary: Summary, metric: Metric) -> bool:
    """Whether the metric has an effective length: higher values are better, at several lengths."""
    return summary.train_length is not None and not metric.lower_is_better


def effective_text(summary: Summary, series: Series, metric: Metric) -> str:
    """The effective length, with "≥" if the score drops at no eval length."""
    length, drops = summary.effective(series, metric) or (NONE, True)
    return str(length) if drops else f"≥ {length}"


# ---- tables of a summary


def by_x(
    summary: Summary,
    title: str,
    text: Callable[[Series, Any], str],
    note: str = "",
) -> Table | None:
    """A line for each series and a column for each x; None without any entry.

    Series and x without entries are left out. If there are more conditions than output layers, they
    are the lines.
    """
    chosen = list(summary.lines)
    cells = {(one, x): text(one, x) for one in chosen for x in summary.xs}
    filled = {key for key, cell in cells.items() if cell != NONE}
    chosen = [one for one in chosen if any((one, x) in filled for x in summary.xs)]
    xs = [x for x in summary.xs if any((one, x) in filled for one in chosen)]
    if not filled:
        return None
    names = {one: summary.label(one) for one in chosen}
    if summary.task.axis != "n" and len(chosen) < len(xs):
        rows = [[x, *(cells[one, x] for one in chosen)] for x in xs]
        return Table(title, [summary.task.axis, *names.values()], rows, note)
    rows = [[names[one], *(cells[one, x] for x in xs)] for one in chosen]
    return Table(title, [*heads(summary.task, xs)], rows, note)


def heads(task: Any, xs: Iterable[Any]) -> list[str]:
    """The header of a table by eval length or condition."""
    if task.axis == "n":
        return ["variant", *(f"n = {x}" for x in xs)]
    return ["output layer", *xs]


def short_lengths(summary: Summary) -> list[tuple[int, str]]:
    """The lengths of a short table with their distance, such as (64, "4 ×"): all lengths if
    they are few, otherwise the train length, 4 and 16 times as much, and the longest."""
    train, longest = summary.train_length, summary.xs[-1]
    assert train is not None
    chosen = summary.xs
    if len(chosen) > MOST_LENGTHS:
        chosen = [x for x in chosen if x in (train, 4 * train, 16 * train, longest)]
    return [(x, "train" if x == train else f"{x / train:.4g} ×") for x in chosen]


def metric_table(
    summary: Summary,
    metric: Metric,
    title: str,
    spread: str = ERROR,
    name: str = "",
    note: str = "",
) -> Table | None:
    """The table of a metric, or of a difference of the score with this name; None if nothing has a
    value."""
    if not any(measured == (name or metric.name) for _, _, measured in summary.means):
        return None
    return by_x(summary, title, lambda s, x: entry(summary, s, x, metric, spread, name), note=note)


def ranked_rows(
    summary: Summary,
    metric: Metric,
    label: Callable[[Series], str],
    cell: Callable[[Series, Any], str],
    xs: Iterable[Any] | None = None,
) -> list[list[str]]:
    """The rows of a table, the best first: the label of a series, its cell at each x (default: all)
    and, if the metric has one, its effective length."""
    effective = has_effective(summary, metric)
    return [
        [label(series), *(cell(series, x) for x in xs or summary.xs),
         *[effective_text(summary, series, metric)] * effective]
        for series in summary.ranked(metric)
    ]  # fmt: skip


def score_table(summary: Summary, errors: bool = True) -> Table:
    """The scores of a task with standard errors, marks and effective lengths, the best first."""
    score, seeds, task = summary.task.score, summary.seeds, summary.task
    better = "lower" if score.lower_is_better else "higher"
    spread = ERROR if errors else BARE
    over = "1 seed"
    if seeds > 1:
        over = f"mean {'± standard error ' if errors else ''}of {seeds} seeds"
    title = (
        f"{summary.title}: {score.title} ({better} is better) by eval length n; train "
        f"length {summary.train_length}, chance {number(score, summary.chance or 0.0)}, {over}"
    )
    header = [*heads(task, summary.xs), *[EFFECTIVE] * has_effective(summary, score)]
    rows = ranked_rows(summary, score, summary.label,
                       lambda s, x: entry(summary, s, x, score, spread, marked=True))  # fmt: skip
    return Table(title, header, rows)


def tables_of_task(group: Group, summary: Summary) -> list[Table]:
    """All tables of a task, besides those of its heads."""
    score, several = group.task.score, summary.seeds > 1
    ranges = by_x(summary, f"{score.title}: 95 % interval over seeds",
                  lambda s, x: interval(summary.mean(s, x, score.name), score) or NONE)  # fmt: skip
    tables = [
        score_table(summary),
        ranges if several else None,
        published_table(summary),
        _difference_table(summary),
        *(metric_table(summary, metric, metric.title) for metric in group.metrics[1:]),
        settings_table(group),
        learned_table(group),
        cost_table(group),
    ]
    return [table for table in tables if table is not None]


def _difference_table(summary: Summary) -> Table | None:
    score, p = summary.task.score, summary.p

    def text(series: Series, x: Any) -> str:
        cell = entry(summary, series, x, score, name=difference(summary.task))
        return f"{cell} ({p_text(p[series, x])})" if (series, x) in p else cell

    title = f"{score.title}: difference from softmax, paired by seed"
    if p:
        title += f" (p of a paired t-test, Holm's correction for {len(p)} comparisons)"
    return by_x(summary, title, text)


def published_table(summary: Summary, code: str = "") -> Table | None:
    """The scores beside those that a paper published; None if no variant of the paper is here.

    code: a mark around the names of variants, such as that of Markdown.
    """
    published, score = summary.task.published, summary.task.score
    series = {one.variant: one for one in summary.lines}
    if published is None or not series.keys() & published.rows.keys():
        return None
    rows, xs = [], [x for x in summary.xs if x in published.lengths]
    for name, scores in published.rows.items():
        paper = dict(zip(published.lengths, scores, strict=True))
        if name in series:
            means = (summary.mean(series[name], x, score.name) for x in xs)
            rows.append([f"{code}{name}{code}, here", *(shown(mean, score) for mean in means)])
        cells = (f"{paper[x]}{'?' * (x in published.second_hand)}" for x in xs)
        rows.append([f"{code}{name}{code}, paper", *cells])
    return Table(published.title, heads(summary.task, xs), rows) if xs else None


def tables_of_experiment(summary: Summary, curve_of: str = "") -> list[Table]:
    """A table for each metric, of the gain over the condition to compare with, and the curve.

    curve_of: the only output layer whose curve is shown.
    """
    task, score = summary.task, summary.task.score
    chance = f"; chance {chance_text(score, summary.chance or 0.0)}"
    pairs = ", ".join(f"{name} − {other}" for name, other in task.versus.items())
    tables = [
        *(metric_table(summary, metric, metric.title + chance * (metric is score))
          for metric in task.metrics),
        metric_table(summary, score, f"{score.title}: difference paired by seed ({pairs})",
                     name=gain(task)),
        _curve_table(summary, curve_of),
    ]  # fmt: skip
    return [table for table in tables if table is not None]


def _curve_table(summary: Summary, curve_of: str) -> Table | None:
    """The curve: a line for each output layer and condition, a column for each x of the curve."""
    curves = {
        (series, x): [pair.split(":") for pair in line["curve"].split()]
        for (series, x), line in summary.cells.items()
        if line.get("curve") and series.variant in (curve_of, curve_of or series.variant)
    }
    if not curves:
        return None
    several = len({series for series, _ in curves}) > 1
    rows = [
        [f"{series.label}, {x}" if several else x, *(f"{100 * float(y):.1f}" for _, y in pairs)]
        for (series, x), pairs in curves.items()
    ]
    title = f"{summary.task.curve} ({curve_of})" if curve_of else summary.task.curve
    return Table(title, [summary.task.axis, *(x for x, _ in next(iter(curves.values())))], rows)


# ---- notes


def title_of(summary: Summary, metric: Metric) -> str:
    """The text above a table of a metric: task, metric, number of seeds, train length, chance."""
    task, seeds = summary.task, f"Mean of {summary.seeds} seeds"
    seeds = {0: "Mean over samples", 1: "One seed"}.get(summary.seeds, seeds)
    ranges = "" if summary.seeds == 1 else " (95 % interval)"
    more = []
    if summary.train_length is not None:
        more.append(f"Train length n = {summary.train_length}")
    if summary.chance is not None and metric is task.score:
        more.append(f"chance {chance_text(metric, summary.chance)}")
    end = f" {', '.join(more)[0].upper()}{', '.join(more)[1:]}." if more else ""
    over = "eval length n" if task.axis == "n" else task.axis
    return f"{summary.title}: {metric.title}, by {over}. {seeds}{ranges}.{end}"


def notes(summary: Summary, metric: Metric | None = None) -> list[str]:
    """The remarks of the task, an explanation of each mark (->, †, ‡, ⁺, ⁻, *) that occurs in the
    table of a metric (default: in any table)."""
    lines, seeds, score = list(summary.remarks), summary.seeds, summary.task.score
    series = summary.ranked(metric or score)
    untrained = [one for one in series if summary.lines[one].untrained]
    untuned = [one.label for one in series if not summary.lines[one].tuned]
    swept = len(untuned) < len(series)
    if any("->" in one.variant for one in series):
        lines.append("a->b: trained with variant a, evaluated with variant b")
    if any("=>" in one.variant for one in series):
        lines.append("a=>b: trained with variant a, and with b in the last part of the steps")
    if any("->" in one.detail for one in series):
        lines.append("rope->b: trained with rope, which b scales at lengths above the train length")
    if untrained:
        mark, count = ("1/1", "") if seeds == 1 else (f"k/{seeds}", f" in k of {seeds} seeds")
        lines.append(
            f"{UNTRAINED} {mark}: did not reach {100 * (summary.task.trained_score or 0):g} % at "
            f"the train length (n = {summary.train_length}){count}{_tuning(summary, series, swept)}"
        )
        if any("->" in one.variant for one in untrained):
            lines[-1] += ". For a->b, the substitution b may be the cause"
    if swept and untuned:
        lines.append(f"Trained with the settings of the preset, not tuned: {', '.join(untuned)}")
    if any(summary.lines[one].unstable for one in series):
        lines.append(
            f"{UNSTABLE} unstable: the seeds differ by more than {score.factor * SPREAD:g} points "
            "at the train length; another seed, or another rounding, can change the row"
        )
    if summary.p and metric in (None, score):
        lines.append(
            f"{BETTER} better, {WORSE} worse than {baseline_of(summary.task)} (p < {LEVEL:g}: "
            f"paired t-test over seeds, Holm's correction for the {len(summary.p)} comparisons of "
            "the table)"
        )
    if any(is_partial(summary, value) for (_, x, name), value in summary.means.items()
           if x in summary.xs and (metric is None or name == metric.name)):  # fmt: skip
        lines.append(f"{PARTIAL} some seeds failed or are missing; the mean leaves them out")
    return lines


def _tuning(summary: Summary, series: Sequence[Series], swept: bool) -> str:
    """Whether the untrained variants were tuned."""
    if not swept:
        return " with these settings, not tuned"
    text = ", with the best values of a sweep"
    if at_edge := [one.label for one in series if summary.lines[one].at_edge]:
        text += (
            f". For {', '.join(at_edge)} the best value was the smallest or largest of the sweep, "
            "so values beyond it may be better"
        )
    return text


def notes_of_experiment(summary: Summary) -> list[str]:
    """The explanations of the marks in the tables of an experiment."""
    seeds = summary.seeds
    texts = ["one seed" if seeds == 1 else f"mean ± standard error over {seeds} seeds"]
    texts.append(f"schedule: {summary.schedule}")
    if any(is_partial(summary, value) for value in summary.means.values()):
        texts.append(f"{PARTIAL} undefined or failed in some seeds; the mean leaves them out")
    if 1 < seeds < ENOUGH_FOR_ERRORS:
        texts.append(f"with only {seeds} seeds the standard errors are themselves uncertain")
    return texts


# ---- tables of a task from its rows


def settings_table(group: Group) -> Table | None:
    """The settings that differ between the variants, and the validation scores of the sweep; None
    if there are no such settings."""
    score, tuned = group.task.score, {series: group.tuned(series) for series in group.series}
    variant_settings = {series: group.variant_settings(series) for series in group.series}
    if not any([*(x["values"] for x in tuned.values()), *variant_settings.values()]):
        return None
    scores = {
        (series, values_text(candidate["values"])): validation(candidate)
        for series in group.series
        for candidate in tuned[series]["tried"]
    }
    tried = dict.fromkeys(name for _, name in scores)
    rows = []
    for series in group.series:
        means = [scores.get((series, name)) for name in tried]
        rows.append([
            series.label,
            ", ".join(f"{name} {x}" for name, x in variant_settings[series].items()) or NONE,
            values_text(tuned[series]["values"]) or "not tuned",
            *(NONE if mean is None else number(score, mean) for mean in means),
        ])  # fmt: skip
    title = "Settings of each variant, and mean validation score of each candidate of the sweep"
    return Table(title, ["variant", "own settings", "tuned", *tried], rows)


def learned_table(group: Group) -> Table | None:
    """The learned parameters of the variants, or None if there are none."""
    rows = []
    for series in group.series:
        values_by_name: dict[str, list[float]] = {}
        for row in {r["training"]: r for p in group.of(series) for r in p.rows}.values():
            for name, values in row["learned"].items():
                values_by_name.setdefault(name, []).extend(values)
        rows += [[series.label, name, _range(values, 3)] for name, values in values_by_name.items()]
    title = "Learned parameters: mean (range) over heads and seeds"
    return Table(title, ["variant", "parameter", "value"], rows) if rows else None


def _range(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return NONE
    mean = f"{sum(values) / len(values):.{digits}f}"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def cost_table(group: Group) -> Table:
    """CPU seconds of training and evaluation. A substitution shares the training of the variant
    that it replaces, so it has no training time of its own."""
    rows = []
    for series in group.series:
        by_seed: dict[int, list[Any]] = {}
        for row in (row for point in group.of(series) for row in point.rows):
            by_seed.setdefault(row["seed"], []).append(row)
        training = [max(row["train_cpu_seconds"] for row in rows) for rows in by_seed.values()]
        evaluation = [sum(row["cpu_seconds"] for row in rows) for rows in by_seed.values()]
        per_step = [1000 * seconds / group.settings["steps"] for seconds in training]
        costs = [_range(training), _range(per_step)]
        costs = ["shared"] * 2 if "->" in series.variant else costs
        rows.append([series.label, *costs, _range(evaluation)])
    title = "CPU time of a run: mean (range) over seeds"
    return Table(title, ["variant", "training, s", "per step, ms", "evaluation, s"], rows)
