"""The command ``compare``: the gain in score from results A to B, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commandline.errors import UsageError
from commandline.table import Table
from evals.results.store import read_rows
from evals.results.summary import SPREAD, Estimate, Group, Point, Series, estimate, groups
from evals.results.trials import of_tasks
from evals.task import Metric


@dataclass(frozen=True)
class Change:
    """The scores of one variant with its position encoding at one eval length, in A and in B.

    steady: whether no seed's score changed by more than `SPREAD`, or the task has no such limit.
    gain: positive if B is better; None if B lacks a seed of A. problem: why gain is None.
    """

    task: str
    series: Series
    length: int
    metric: Metric
    before: Estimate | None
    after: Estimate | None
    gain: Estimate | None
    problem: str = ""
    steady: bool = True

    def fails(self, below: float) -> bool:
        """True if the gain is missing or less than ``below``, in the unit of the tables."""
        return self.gain is None or not self.metric.factor * self.gain.mean >= below


def changes(before: Sequence[Group], after: Sequence[Group]) -> list[Change]:
    """Compare A with B: one `Change` for each variant, position encoding and length scored in A.

    Raises:
        UsageError: A or B has several groups of results of a task.
    """
    for side, side_groups in (("A", before), ("B", after)):
        names = [group.task.name for group in side_groups]
        for name in set(names):
            if names.count(name) > 1:
                raise UsageError(
                    f"{side} must have results of {name} with equal settings, data and numbers of "
                    f"test sequences, got {names.count(name)} groups"
                )
    after_by_task = {group.task.name: group for group in after}
    return [
        change
        for group in before
        for change in _of_group(group, after_by_task.get(group.task.name))
    ]


def _of_group(group: Group, other: Group | None) -> list[Change]:
    metric, changes = group.task.score, []
    sign = -1.0 if metric.lower_is_better else 1.0
    for (series, length), point in group.points.items():
        if metric.name not in point.metrics:
            continue
        other_point = other.points.get((series, length)) if other else None
        before, after = (
            {row["seed"]: row["metrics"][metric.name] for row in rows if row["status"] == "ok"}
            for rows in (point.rows, other_point.rows if other_point else [])
        )
        paired = [sign * (after[seed] - before[seed]) for seed in before if seed in after]
        problem = ""
        if missing := sorted(set(before) - set(after)):
            failed = "+".join(other_point.failures) if other_point else "missing"
            problem = f"B has no seed {', '.join(map(str, missing))} ({failed or 'missing'})"
        changes.append(
            Change(
                group.task.name, series, length, metric, point.metrics[metric.name],
                other_point.metrics.get(metric.name) if other_point else None,
                None if problem else estimate(paired), problem,
                group.task.trained_score is None or all(abs(x) <= SPREAD for x in paired),
            )
        )  # fmt: skip
    return changes


def table(task: str, changes: Sequence[Change]) -> Table:
    """A table of one task's scores in A and B and the gain, with one row for each `Change`."""
    rows = []
    for change in changes:
        metric = change.metric
        cells = [
            "—" if side is None else side.text(metric.factor, metric.digits)
            for side in (change.before, change.after)
        ]
        gain = change.gain
        cells.append(
            change.problem if gain is None else gain.text(metric.factor, metric.digits, sign=True)
        )
        rows.append([change.series.label, str(change.length), *cells])
    title = f"{task}: {changes[0].metric.title} (gain: positive if B is better; paired by seed)"
    return Table(title, ["variant", "n", "A", "B", "gain"], rows)


def holds(change: Change) -> bool:
    """Whether the 95 % intervals of A and B overlap, and no seed's score changed by much.

    False if B lacks a seed of A. A single seed's interval is its score. The intervals of seeds that
    fail now and then are wide.
    """
    if change.problem or change.before is None or change.after is None or not change.steady:
        return False
    (low, high), (least, most) = (
        side.interval or (side.mean, side.mean) for side in (change.before, change.after)
    )
    return low <= most and least <= high


def holding(changes: Sequence[Change]) -> list[str]:
    """Lines that name the rows of A that hold in B, and those that do not, with the lengths."""
    rows: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        rows.setdefault((change.task, change.series.label), []).append(change)
    lines, held = [], 0
    for (task, label), row_changes in rows.items():
        broken = [change for change in row_changes if not holds(change)]
        held += not broken
        at = ", ".join(
            f"n = {change.length} ({change.problem or _means(change)})" for change in broken
        )
        lines.append(f"{task}, {label}: {f'does not hold at {at}' if broken else 'holds'}")
    lines.append(
        f"{held} of {len(rows)} rows hold: at every length their 95 % intervals over seeds in A "
        f"and B overlap, and no seed's score in % differs by more than {100 * SPREAD:g} points"
    )
    return lines


def _means(change: Change) -> str:
    metric = change.metric
    sides = [
        "none" if side is None else f"{metric.factor * side.mean:.{metric.digits}f}"
        for side in (change.before, change.after)
    ]
    return f"{sides[0]} in A, {sides[1]} in B"


def _conditions(group: Group) -> dict[str, object]:
    """The values of a group's settings, data and versions, by name."""
    conditions: dict[str, object] = dict(group.settings)
    for name in ("data", "device", "torch", "attnzoo"):
        conditions[name] = ", ".join(sorted({str(row[name]) for row in group.rows}))
    conditions["test sequences"] = {row["length"]: row["sequences"] for row in group.rows}
    return conditions


def differing(before: Sequence[Group], after: Sequence[Group]) -> list[str]:
    """A line for each setting, kind of data or version that differs between A and B."""
    after_conditions = {group.task.name: _conditions(group) for group in after}
    return [
        f"note: {group.task.name} has {name} = {value} in A and {other[name]} in B"
        for group in before
        if (other := after_conditions.get(group.task.name)) is not None
        for name, value in _conditions(group).items()
        if name in other and other[name] != value
    ]


def _unshared_seeds(before: Sequence[Group], after: Sequence[Group]) -> list[str]:
    """A note for each task where B has seeds that A lacks: only column B includes them."""
    after_points = {group.task.name: group.points for group in after}
    return [
        f"note: {name} has seeds in B that A lacks: column B includes them, the gains do not"
        for group in before
        if (other := after_points.get(name := group.task.name)) is not None
        and any(
            _seeds(other[key]) - _seeds(point) and _seeds(other[key]) & _seeds(point)
            for key, point in group.points.items()
            if key in other
        )
    ]


def _seeds(point: Point) -> set[int]:
    return {row["seed"] for row in point.rows if row["status"] == "ok"}


def main(a: Path, b: Path, fail_below: float | None = None, hold: bool = False) -> int:
    """Print the gains and return the exit status.

    It is 1 if ``fail_below`` is given and a gain is missing or less than ``fail_below``, or if
    ``hold`` is true and a row of A does not hold in B.
    """
    if fail_below is not None and not math.isfinite(fail_below):
        raise UsageError(f"--fail-below must be a finite number, got {fail_below}")
    before, after = (groups(of_tasks(read_rows([side]), "compare")) for side in (a, b))
    all_changes = changes(before, after)
    if not all_changes:
        raise UsageError(f"A must have at least one score, got none in {a}")
    for name in dict.fromkeys(change.task for change in all_changes):
        print(f"{table(name, [c for c in all_changes if c.task == name]).text()}\n")
    for line in [*differing(before, after), *_unshared_seeds(before, after)]:
        print(line)
    if hold:
        print("\n".join(holding(all_changes)))
    broken = hold and not all(map(holds, all_changes))
    if fail_below is None:
        return 1 if broken else 0
    failed = [change for change in all_changes if change.fails(fail_below)]
    for change in failed:
        gain, metric = change.gain, change.metric
        shown = (
            change.problem if gain is None else f"{metric.factor * gain.mean:+.{metric.digits}f}"
        )
        print(f"below {fail_below:g}: {change.task}, {change.series.label}, n = {change.length}: "
              f"{shown}")  # fmt: skip
    print(
        f"{len(all_changes) - len(failed)} of {len(all_changes)} gains are at least {fail_below:g}"
    )
    return 1 if failed or broken else 0
