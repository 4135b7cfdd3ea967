"""The command ``compare``: the gain in score from results A to B, paired by seed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from commandline import arguments
from commandline.errors import UsageError
from commandline.table import Table
from evals.reporting.tables import ERROR, number, shown
from evals.results.rows import differing, distinct
from evals.results.statistics import Estimate, estimate, holds
from evals.results.store import read_rows
from evals.results.summary import (
    SPREAD,
    Group,
    Point,
    at,
    described_settings,
    groups,
    largest_change,
)

NAME = "compare"


@dataclass(frozen=True)
class Change:
    """One series at one x in A and in B. after: None if B lacks it."""

    before: Point
    after: Point | None

    @property
    def task(self) -> Any:
        return self.before.group.task

    @property
    def label(self) -> str:
        return self.before.series.label

    @property
    def place(self) -> str:
        return at(self.task, self.before.x)

    @cached_property
    def scores(self) -> tuple[dict[int, float], dict[int, float]]:
        """The scores in A and in B, by seed."""
        name = self.task.score.name
        return self.before.values(name), self.after.values(name) if self.after else {}

    @property
    def means(self) -> tuple[Estimate | None, Estimate | None]:
        """The mean scores in A and in B."""
        before, after = (estimate(list(scores.values())) for scores in self.scores)
        return before, after

    @property
    def gains(self) -> list[float]:
        """The gain of each seed, positive if B is better."""
        (before, after), sign = self.scores, -1.0 if self.task.score.lower_is_better else 1.0
        return [sign * (after[seed] - before[seed]) for seed in before if seed in after]

    @property
    def problem(self) -> str:
        """Why there is no gain; empty if B has all seeds of A."""
        if not (missing := sorted(self.scores[0].keys() - self.scores[1].keys())):
            return ""
        failed = "+".join(self.after.failures) if self.after else ""
        return f"B has no seed {', '.join(map(str, missing))} ({failed or 'missing'})"

    @property
    def gain(self) -> Estimate | None:
        return None if self.problem else estimate(self.gains)

    @property
    def gain_text(self) -> str:
        return self.problem or shown(self.gain, self.task.score, ERROR, sign=True)

    def fails(self, below: float) -> bool:
        """True if the gain is missing or less than ``below``, in the unit of the tables."""
        return self.gain is None or not self.task.score.factor * self.gain.mean >= below

    @property
    def holds(self) -> bool:
        """Whether A holds in B, see `evals.results.statistics.holds`."""
        return holds(*self.scores, largest_change(self.task))


def changes(before: Sequence[Group], after: Sequence[Group]) -> list[Change]:
    """Compare A with B: one `Change` for each series and x that is scored in A.

    Raises:
        UsageError: A or B has several groups of results of a task of A.
    """
    compared = {group.task.name for group in before}
    for side, side_groups in (("A", before), ("B", after)):
        for name in compared:
            of_task = [group for group in side_groups if group.task.name == name]
            if len(of_task) > 1:
                which = "; ".join(group.distinction for group in of_task)
                raise UsageError(
                    f"{side} must have results of {name} with equal settings, data and numbers of "
                    f"test sequences, got {len(of_task)} groups: {which}"
                )
    points = {group.task.name: group.points for group in after}
    every = [
        Change(point, points.get(group.task.name, {}).get(key))
        for group in before
        for key, point in group.points.items()
    ]
    return [change for change in every if change.scores[0]]


def check_seeds(*sides: Sequence[Group]) -> None:
    """Raise UsageError if intervals over seeds cannot show which rows hold."""
    for group in (group for side in sides for group in side):
        if len(group.seeds) < 2:
            raise UsageError(
                "--holds and --against need two or more seeds on both sides, got one of "
                f"{group.task.name}"
            )


def table(changes: Sequence[Change]) -> Table:
    """A table of one task's scores in A and B and the gain, with one row for each `Change`."""
    task = changes[0].task
    rows = [
        [
            change.label, str(change.before.x),
            *(shown(mean, task.score, ERROR) for mean in change.means), change.gain_text,
        ]
        for change in changes
    ]  # fmt: skip
    title = f"{task.name}: {task.score.title} (gain: positive if B is better; paired by seed)"
    return Table(title, ["variant", task.axis, "A", "B", "gain"], rows)


def holding(changes: Sequence[Change]) -> Iterator[str]:
    """Lines that name the rows of A that hold in B, and those that do not, and where."""
    rows: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        rows.setdefault((change.task.name, change.label), []).append(change)
    held = 0
    for (task, label), row_changes in rows.items():
        broken = [change for change in row_changes if not change.holds]
        held += not broken
        where = ", ".join(f"{change.place} ({_means(change)})" for change in broken)
        yield f"{task}, {label}: {f'does not hold at {where}' if broken else 'holds'}"
    yield (
        f"{held} of {len(rows)} rows hold: at every length their 95 % intervals over seeds in A "
        f"and B overlap, and no seed's score in % differs by more than {100 * SPREAD:g} points"
    )


def _means(change: Change) -> str:
    before, after = (number(change.task.score, x.mean) if x else "none" for x in change.means)
    return change.problem or f"{before} in A, {after} in B"


def notes(before: Sequence[Group], after: Sequence[Group]) -> Iterator[str]:
    """A line for each setting, kind of data or version that differs between A and B, and for seeds
    that only B has."""
    by_task = {group.task.name: group for group in after}
    for group in before:
        name, other = group.task.name, by_task.get(group.task.name)
        if other is None:
            continue
        values, others = both = [_conditions(group), _conditions(other)]
        for key in differing(both):
            yield f"note: {name} has {key} = {values.get(key)} in A and {others.get(key)} in B"
        seeds = [
            (set(point.scored), set(other.points[key].scored))
            for key, point in group.points.items()
            if key in other.points
        ]
        if any(more - fewer and more & fewer for fewer, more in seeds):
            yield (
                f"note: {name} has seeds in B that A lacks: column B includes them, the gains do "
                "not"
            )


def _conditions(group: Group) -> dict[str, Any]:
    """The values of a group's settings, data, test set sizes and versions, by name."""
    names = ("data", "device", "torch", "attnzoo")
    values = {name: ", ".join(distinct(group.rows, name)) for name in names}
    return {**described_settings(group), **values}


def add_parser(commands: Any) -> None:
    text = "Print the gain in score from results A to results B, paired by seed"
    parser = commands.add_parser(NAME, help=text, description=f"{text}.")
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="Read the first results from folder A")
    add("b", type=Path, metavar="B", help="Read the second results from folder B")
    text = "Exit with 1 if a gain is missing or below X (table units); -1 allows a drop of 1"
    add("--fail-below", type=arguments.number, metavar="X", help=text)
    text = (
        "Print which rows of A hold in B: intervals overlap and no seed differs by more than 10 "
        "points; exit with 1 if one does not"
    )
    add("--holds", action="store_true", help=text)
    arguments.add_plugin(parser, " or tasks")


def main(args: argparse.Namespace) -> int:
    """Print the gains and return the exit status.

    It is 1 with ``--fail-below`` if a gain is missing or less, and with ``--holds`` if a row of A
    does not hold in B.
    """
    fail_below = args.fail_below
    if fail_below is not None and not math.isfinite(fail_below):
        raise UsageError(f"--fail-below must be a finite number, got {fail_below}")
    before, after = (groups(read_rows([side])) for side in (args.a, args.b))
    all_changes = changes(before, after)
    if args.holds:
        check_seeds(before, [x for x in after if x.task in [one.task for one in before]])
    if not all_changes:
        raise UsageError(f"A must have at least one score, got none in {args.a}")
    for _, of_task in groupby(all_changes, key=lambda change: change.task.name):
        print(f"{table(list(of_task)).text()}\n")
    for line in notes(before, after):
        print(line)
    if args.holds:
        print("\n".join(holding(all_changes)))
    broken = args.holds and not all(change.holds for change in all_changes)
    failed = []
    if fail_below is not None:
        failed = [change for change in all_changes if change.fails(fail_below)]
        for change in failed:
            print(f"below {fail_below:g}: {change.task.name}, {change.label}, "
                  f"{change.place}: {change.gain_text}")  # fmt: skip
        gains = f"{len(all_changes) - len(failed)} of {len(all_changes)} gains"
        print(f"{gains} are at least {fail_below:g}")
    return 1 if failed or broken else 0
