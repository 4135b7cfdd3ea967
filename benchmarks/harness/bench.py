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
from benchmarks.harness.correctness import Reference, plan_of
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
    figures: Callable[[], dict[str, float]] = dict  # what else is to be said of it

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
Memory = Callable[[Entrant, Setting, str, Attend], int | None]


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
        attends: dict[str, Attend] = {}
        of: dict[tuple[str, str], Row] = {}
        for e in entrants:
            own = [Row(self.suite, e.name, e.case, e.kind, d, setting) for d in self.directions]
            rows += own
            of |= {(e.name, row.direction): row for row in own}
            if self.budget.spent:  # those before are timed all the same
                for row in own:
                    row.note = "left out: no time"
                continue
            try:
                attend = e.make()
                self.check(e, attend, own, setting)
                figures = e.figures()
            except Exception as error:
                self.failed(error, own)
                continue
            for row in own:
                row.figures |= figures
            if any(row.wrong for row in own):
                for row in own:
                    row.note = WRONG
            else:
                attends[e.name] = attend
        if self.time:
            for direction in self.directions:
                able = [e for e in entrants if e.name in attends]
                self.times(able, attends, {e.name: of[e.name, direction] for e in able}, direction)
        for e in entrants:
            for direction in self.directions:
                row = of[e.name, direction]
                if self.memory is not None and e.name in attends and not row.note:
                    try:
                        row.peak_bytes = self.memory(e, setting, direction, attends[e.name])
                    except Exception as error:
                        self.failed(error, [row])
        self.timer.release()

    def check(self, e: Entrant, attend: Attend, rows: list[Row], setting: Setting) -> None:
        """Fills in errors. A call without gradients may take another path than one with them."""
        if e.kind == "state":
            rows[0].backend = "state"
            return
        if e.kind == "baseline":
            error = Reference.of(e.case, e.inputs.detached(), setting.seed).relative_error(attend)
            for row in rows:
                row.error = error if abs(error) < float("inf") else None  # JSON has no NaN
            return
        grads = {row.direction: row.direction != "forward" for row in rows}
        for row in rows:
            given = e.inputs if grads[row.direction] else e.inputs.detached()
            row.backend = plan_of(e.case, given, e.backend).chosen
        inputs = e.inputs if any(grads.values()) else e.inputs.detached()
        reference = Reference.of(e.case, inputs, setting.seed)
        found = {with_: reference.check(e.backend, with_) for with_ in sorted(set(grads.values()))}
        for row in rows:
            row.check = found[grads[row.direction]]

    def times(
        self, entrants: list[Entrant], attends: dict[str, Attend], rows: dict[str, Row],
        direction: str,
    ) -> None:  # fmt: skip
        """Of all that can run this way, in turn."""
        calls: dict[str, Callable[[], object]] = {}
        for e in entrants:
            try:
                once = call(attends[e.name], e.inputs, direction)
                once()  # compiles
                self.timer.settle()
                calls[e.name] = once
            except Exception as error:
                self.failed(error, [rows[e.name]])
        try:
            seconds = (
                self.timer.rounds(calls, self.repeats, self.min_seconds, self.max_seconds)
                if calls else {}
            )  # fmt: skip
        except Exception as error:  # for all of them together there may be too little memory
            self.failed(error, [rows[name] for name in calls])
            return
        for name, samples in seconds.items():
            row = rows[name]
            row.seconds = Spread.of(samples)
            row.figures |= self.rate(row)
            like = (SOFTMAX, row.case)
            row.ratios = {
                other: ratio(samples, theirs)
                for other, theirs in seconds.items()
                if other != name and rows[other].case in like
            }

    def failed(self, error: Exception, rows: list[Row]) -> None:
        """A note in these rows. If the device went with it, that is the end."""
        for row in rows:
            row.note = first_line(error)
        try:
            self.timer.settle()
        except Exception as lost:
            raise DeviceLost(f"the device failed at {rows[0].name}: {first_line(error)}") from lost


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
