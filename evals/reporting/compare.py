"""The command ``compare``: the gain in score from results A to B, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.table import Table
from evals.reporting.tables import ERROR, number, shown
from evals.results.statistics import Estimate, estimate
from evals.results.store import read_rows
from evals.results.summary import SPREAD, Group, Point, Series, at, described_settings, groups


@dataclass(frozen=True)
class Change:
    """The scores of one series at one x, in A and in B.

    steady: whether no seed's score changed by more than `SPREAD`, or the task has no such limit.
    gain: positive if B is better; None if B lacks a seed of A. problem: why gain is None.
    """

    task: Any
    series: Series
    x: Any
    before: Estimate
    after: Estimate | None
    gain: Estimate | None
    problem: str = ""
    steady: bool = True

    @property
    def place(self) -> str:
        return at(self.task, self.x)

    @property
    def gain_text(self) -> str:
        return self.problem or shown(self.gain, self.task.score, ERROR, sign=True)

    def fails(self, below: float) -> bool:
        """True if the gain is missing or less than ``below``, in the unit of the tables."""
        return self.gain is None or not self.task.score.factor * self.gain.mean >= below


def changes(before: Sequence[Group], after: Sequence[Group]) -> list[Change]:
    """Compare A with B: one `Change` for each series and x that is scored in A.

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
    points = {group.task.name: group.points for group in after}
    return [
        change
        for group in before
        for key, point in group.points.items()
        if (change := _change(point, points.get(group.task.name, {}).get(key))) is not None
    ]


def _change(point: Point, other: Point | None) -> Change | None:
    task, name = point.group.task, point.group.task.score.name
    before, after = point.values(name), other.values(name) if other else {}
    if (mean := estimate(list(before.values()))) is None:
        return None
    sign = -1.0 if task.score.lower_is_better else 1.0
    paired = [sign * (after[seed] - before[seed]) for seed in before if seed in after]
    problem = ""
    if missing := sorted(set(before) - set(after)):
        failed = "+".join(other.failures) if other else ""
        problem = f"B has no seed {', '.join(map(str, missing))} ({failed or 'missing'})"
    return Change(
        task, point.series, point.x, mean, estimate(list(after.values())),
        None if problem else estimate(paired), problem,
        task.trained_score is None or all(abs(x) <= SPREAD for x in paired),
    )  # fmt: skip


def table(changes: Sequence[Change]) -> Table:
    """A table of one task's scores in A and B and the gain, with one row for each `Change`."""
    task = changes[0].task
    rows = [
        [
            change.series.label,
            str(change.x),
            *(shown(side, task.score, ERROR) for side in (change.before, change.after)),
            change.gain_text,
        ]
        for change in changes
    ]
    title = f"{task.name}: {task.score.title} (gain: positive if B is better; paired by seed)"
    return Table(title, ["variant", task.axis, "A", "B", "gain"], rows)


def holds(change: Change) -> bool:
    """Whether the 95 % intervals of A and B overlap, and no seed's score changed by much.

    False if B lacks a seed of A. A single seed's interval is its score. The intervals of seeds that
    fail now and then are wide.
    """
    if change.problem or change.after is None or not change.steady:
        return False
    (low, high), (least, most) = (
        side.interval or (side.mean, side.mean) for side in (change.before, change.after)
    )
    return low <= most and least <= high


def holding(changes: Sequence[Change]) -> Iterator[str]:
    """Lines that name the rows of A that hold in B, and those that do not, and where."""
    rows: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        rows.setdefault((change.task.name, change.series.label), []).append(change)
    held = 0
    for (task, label), row_changes in rows.items():
        broken = [change for change in row_changes if not holds(change)]
        held += not broken
        where = ", ".join(f"{change.place} ({_means(change)})" for change in broken)
        yield f"{task}, {label}: {f'does not hold at {where}' if broken else 'holds'}"
    yield (
        f"{held} of {len(rows)} rows hold: at every length their 95 % intervals over seeds in A "
        f"and B overlap, and no seed's score in % differs by more than {100 * SPREAD:g} points"
    )


def _means(change: Change) -> str:
    score, after = change.task.score, change.after
    other = "none" if after is None else number(score, after.mean)
    return change.problem or f"{number(score, change.before.mean)} in A, {other} in B"


def _pairs(before: Sequence[Group], after: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    after_by_task = {group.task.name: group for group in after}
    for group in before:
        if group.task.name in after_by_task:
            yield group, after_by_task[group.task.name]


def differing(before: Sequence[Group], after: Sequence[Group]) -> Iterator[str]:
    """A line for each setting, kind of data or version that differs between A and B, and for seeds
    that only B has."""
    for group, other in _pairs(before, after):
        name = group.task.name
        values, others = _conditions(group), _conditions(other)
        for key in dict.fromkeys([*values, *others]):
            if values.get(key) != others.get(key):
                yield f"note: {name} has {key} = {values.get(key)} in A and {others.get(key)} in B"
        both = [(point, other.points[k]) for k, point in group.points.items() if k in other.points]
        seeds = [(set(point.scored), set(other_point.scored)) for point, other_point in both]
        if any(more - fewer and more & fewer for fewer, more in seeds):
            yield (
                f"note: {name} has seeds in B that A lacks: column B includes them, the gains do "
                "not"
            )


def _conditions(group: Group) -> dict[str, Any]:
    """The values of a group's settings, data, test set sizes and versions, by name."""
    values = {
        name: ", ".join(sorted({str(row[name]) for row in group.rows}))
        for name in ("data", "device", "torch", "attnzoo")
    }
    return {**described_settings(group), **values}


def main(a: Path, b: Path, fail_below: float | None = None, hold: bool = False) -> int:
    """Print the gains and return the exit status.

    It is 1 if ``fail_below`` is given and a gain is missing or less than ``fail_below``, or if
    ``hold`` is true and a row of A does not hold in B.
    """
    if fail_below is not None and not math.isfinite(fail_below):
        raise UsageError(f"--fail-below must be a finite number, got {fail_below}")
    before, after = (groups(read_rows([side])) for side in (a, b))
    all_changes = changes(before, after)
    if not all_changes:
        raise UsageError(f"A must have at least one score, got none in {a}")
    for _, of_task in groupby(all_changes, key=lambda change: change.task.name):
        print(f"{table(list(of_task)).text()}\n")
    for line in differing(before, after):
        print(line)
    if hold:
        print("\n".join(holding(all_changes)))
    broken = hold and not all(map(holds, all_changes))
    failed = []
    if fail_below is not None:
        failed = [change for change in all_changes if change.fails(fail_below)]
        for change in failed:
            print(f"below {fail_below:g}: {change.task.name}, {change.series.label}, "
                  f"{change.place}: {change.gain_text}")  # fmt: skip
        gains = f"{len(all_changes) - len(failed)} of {len(all_changes)} gains"
        print(f"{gains} are at least {fail_below:g}")
    return 1 if failed or broken else 0
