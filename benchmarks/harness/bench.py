"""Measures a group of calls: each checked first, then all timed in turn, round by round.

A group is all that has the same shape and the same kind of inputs, so each ratio is between calls
of the same rounds. Whatever one of them raises is a note in its row, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from benchmarks.harness import baselines
from benchmarks.harness.cases import SOFTMAX, Attend, Case, Inputs, Setting, call
from benchmarks.harness.correctness import Check, Reference, plan_of
from benchmarks.harness.grid import Budget
from benchmarks.harness.report import Report, Row
from benchmarks.harness.timing import Spread, Timer, ratio

DIRECTIONS = ("forward", "backward", "both")
WRONG = "WRONG, not timed"


class DeviceLost(RuntimeError):
    """The device answers no more: nothing after this can be measured by this process."""


@dataclass
class Entrant:
    """One that takes part in a group: what it computes, how it is made, and its inputs."""

    name: str
    case: Case
    inputs: Inputs
    make: Callable[[], Attend]
    kind: Literal["variant", "state", "baseline"] = "variant"
    backend: str | None = None
    attend: Attend = field(init=False)  # once it is made
    rows: dict[str, Row] = field(default_factory=dict)  # by direction

    def note(self, text: str) -> None:
        for row in self.rows.values():
            row.note = text

    @staticmethod
    def of(case: Case, inputs: Inputs, backend: str | None, name: str = "") -> Entrant:
        """attnzoo's own call of a variant."""
        make = partial(case.attend, inputs.params, backend, **inputs.options)
        return Entrant(name or case.spec, case, inputs, make, backend=backend)

    @staticmethod
    def baselines(
        case: Case, inputs: Inputs, setting: Setting, names: Sequence[str]
    ) -> list[Entrant]:
        """Of others that compute this variant; of softmax those that all are compared with."""
        of = baselines.of_softmax(setting, names) if case == SOFTMAX else {}
        made = of | baselines.of_variant(case, setting, names)
        return [Entrant(name, case, inputs, make, "baseline") for name, make in made.items()]


# Inputs, and who takes part; made when it is their turn.
Groups = Iterable[tuple[Setting, Callable[[], list[Entrant]]]]
# What a call takes beyond its inputs, where that is known.
Memory = Callable[[Entrant, Row], int | None]


@dataclass
class Bench:
    """How groups are measured."""

    suite: str
    timer: Timer
    directions: Sequence[str] = ("forward",)
    repeats: int = 10
    min_seconds: float = 0.05
    max_seconds: float = 20.0  # for the rounds of a group in one direction
    time: bool = True
    memory: Memory | None = None
    rate: Callable[[Row], dict[str, float]] = lambda row: {}  # figures of a row with a time
    budget: Budget = field(default_factory=Budget)

    def run(self, groups: Groups, report: Report) -> None:
        """All groups, or as many as are begun within the budget; what is left out is named."""
        for setting, make in groups:
            label = f"{self.suite}: {setting.title}, B={setting.batch}, N={setting.length}"
            if self.budget.spent:
                report.left_out.append(label)
                continue
            rows: list[Row] = []
            try:
                self.group(make(), setting, rows)
            except DeviceLost as error:
                self.budget.end_now()
                report.left_out.append(f"what is missing of {label}: {error}")
            except Exception as error:  # its inputs do not fit
                report.left_out.append(f"{label}: {first_line(error)}")
            report.add(sorted(rows, key=lambda row: self.directions.index(row.direction)))

    def group(self, entrants: Sequence[Entrant], setting: Setting, rows: list[Row]) -> None:
        """Adds their rows, which are there even where the device fails in between.

        Raises:
            DeviceLost: after which this process can measure nothing.
        """
        able: list[Entrant] = []
        for e in entrants:
            e.rows = {
                d: Row(self.suite, e.name, e.case, e.kind, d, setting) for d in self.directions
            }
            rows += e.rows.values()
            if self.budget.spent:  # those before are timed all the same
                e.note("left out: no time")
                continue
            try:
                e.attend = e.make()
                self.check(e, setting)
            except Exception as error:
                self.failed(error, e.rows.values())
                continue
            if any(row.wrong for row in e.rows.values()):
                e.note(WRONG)
            else:
                able.append(e)
        if self.time:
            for direction in self.directions:
                self.times(able, direction)
        if self.memory is not None:
            for entrant in able:
                for row in (row for row in entrant.rows.values() if not row.note):
                    try:
                        row.peak_bytes = self.memory(entrant, row)
                    except Exception as error:
                        self.failed(error, [row])
        self.timer.release()

    def check(self, e: Entrant, setting: Setting) -> None:
        """Fills in errors. A call without gradients may take another path than one with them."""
        if e.kind == "state":
            for row in e.rows.values():
                row.backend = "state"
            return
        without = e.inputs.detached()
        if e.kind == "baseline":
            error = Reference.of(e.case, without, setting.seed).relative_error(e.attend)
            for row in e.rows.values():
                row.error = error if abs(error) < float("inf") else None  # JSON has no NaN
            return
        inputs = without if [*e.rows] == ["forward"] else e.inputs
        reference = Reference.of(e.case, inputs, setting.seed)
        found: dict[bool, Check] = {}
        for row in e.rows.values():
            gradients = row.direction != "forward"
            given = inputs if gradients else without
            row.backend = plan_of(e.case, given, e.backend).chosen
            if gradients not in found:
                found[gradients] = reference.check(e.backend, gradients)
            row.check = found[gradients]

    def times(self, entrants: list[Entrant], direction: str) -> None:
        """Of all that can run this way, in turn."""
        calls: dict[str, Callable[[], object]] = {}
        rows = {e.name: e.rows[direction] for e in entrants}
        for e in entrants:
            try:
                once = call(e.attend, e.inputs, direction)
                once()  # compiles
                self.timer.settle()
                calls[e.name] = once
            except Exception as error:
                self.failed(error, [rows[e.name]])
        if not calls:
            return
        try:
            seconds = self.timer.rounds(calls, self.repeats, self.min_seconds, self.max_seconds)
        except Exception as error:  # for all of them together there may be too little memory
            self.failed(error, [rows[name] for name in calls])
            return
        for name, samples in seconds.items():
            row = rows[name]
            row.seconds = Spread.of(samples)
            row.figures = self.rate(row)
            row.ratios = {
                other: ratio(samples, theirs)
                for other, theirs in seconds.items()
                if other != name and rows[other].case in (SOFTMAX, row.case)
            }

    def failed(self, error: Exception, rows: Iterable[Row]) -> None:
        """A note in these rows. If the device went with it, that is the end."""
        name = ""
        for row in rows:
            row.note, name = first_line(error), row.name
        try:
            self.timer.settle()
        except Exception as lost:
            raise DeviceLost(f"the device failed at {name}: {first_line(error)}") from lost


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
