"""Checks each implementation in a group, then times them in rounds of one call each.

All implementations in a group have the same shape and kind of inputs, so that ratios compare calls
from the same rounds. An error in one implementation becomes a note in its table row. The other
implementations are still timed.
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
    """The device failed. This process cannot measure anything else."""


@dataclass
class Implementation:
    """One implementation in a group: its case, its inputs, and a factory for its function.

    ``kind`` is "variant" (`attnzoo.attention`), "state" (`attnzoo.linear_attention` on one token)
    or "baseline" (code outside attnzoo).
    """

    name: str
    case: Case
    inputs: Inputs
    make: Callable[[], Attend]
    kind: Literal["variant", "state", "baseline"] = "variant"
    backend: str | None = None
    attend: Attend = field(init=False)  # the function that make() returns
    rows: dict[str, Row] = field(default_factory=dict)  # by direction

    def note(self, text: str) -> None:
        for row in self.rows.values():
            row.note = text

    @staticmethod
    def of(case: Case, inputs: Inputs, backend: str | None, name: str = "") -> Implementation:
        """An implementation that calls `attnzoo.attention`."""
        make = partial(case.attend, inputs.params, backend, **inputs.options)
        return Implementation(name or case.spec, case, inputs, make, backend=backend)

    @staticmethod
    def baselines(
        case: Case, inputs: Inputs, setting: Setting, names: Sequence[str]
    ) -> list[Implementation]:
        """The baselines that compute the same function as the case."""
        of = baselines.of_softmax(setting, names) if case == SOFTMAX else {}
        made = of | baselines.of_variant(case, setting, names)
        return [Implementation(name, case, inputs, make, "baseline") for name, make in made.items()]


# Pairs of a setting and a function that makes the inputs and implementations of its group.
Groups = Iterable[tuple[Setting, Callable[[], list[Implementation]]]]
# A function that returns a call's peak memory in bytes, or None if unknown. The memory of inputs is
# not counted.
Memory = Callable[[Implementation, Row], int | None]


@dataclass
class Bench:
    """Measures groups and writes their rows to a report.

    repeats, min_seconds, max_seconds: how long a group is timed in each direction; see
    `timing.interleave`. rate: computes figures such as TFLOP/s from a timed row. budget: time limit
    for all groups together.
    """

    suite: str
    timer: Timer
    directions: Sequence[str] = ("forward",)
    repeats: int = 10
    min_seconds: float = 0.05
    max_seconds: float = 20.0
    time: bool = True
    memory: Memory | None = None
    rate: Callable[[Row], dict[str, float]] = lambda row: {}
    budget: Budget = field(default_factory=Budget)

    def run(self, groups: Groups, report: Report) -> None:
        """Measures groups until the time budget is spent. The report lists the remaining groups."""
        for setting, make in groups:
            label = f"{self.suite}: {setting.title}, B={setting.batch}, N={setting.length}"
            if self.budget.spent:
                report.left_out.append(label)
                continue
            rows: list[Row] = []
            try:
                self.measure_group(make(), setting, rows)
            except DeviceLost as error:
                self.budget.end_now()
                report.left_out.append(f"the rest of {label}: {error}")
            except Exception as error:  # for example, too little memory for the inputs
                report.left_out.append(f"{label}: {first_line(error)}")
            report.add(sorted(rows, key=lambda row: self.directions.index(row.direction)))

    def measure_group(
        self, implementations: Sequence[Implementation], setting: Setting, rows: list[Row]
    ) -> None:
        """Appends the group's rows to ``rows``, so that the rows are kept if the device fails.

        Raises:
            DeviceLost: the device failed.
        """
        able: list[Implementation] = []
        for e in implementations:
            e.rows = {
                d: Row(self.suite, e.name, e.case, e.kind, d, setting) for d in self.directions
            }
            rows += e.rows.values()
            if self.budget.spent:  # implementations already checked are still timed
                e.note("left out: time budget used up")
                continue
            try:
                e.attend = e.make()
                self.check(e, setting)
            except Exception as error:
                self.note_error(error, e.rows.values())
                continue
            if any(row.wrong for row in e.rows.values()):
                e.note(WRONG)
            else:
                able.append(e)
        if self.time:
            for direction in self.directions:
                self.time_direction(able, direction)
        if self.memory is not None:
            for implementation in able:
                for row in (row for row in implementation.rows.values() if not row.note):
                    try:
                        row.peak_bytes = self.memory(implementation, row)
                    except Exception as error:
                        self.note_error(error, [row])
        self.timer.release()

    def check(self, e: Implementation, setting: Setting) -> None:
        """Compares the implementation with fp64 and records the errors in its rows.

        Calls with gradients may run different code than calls without, so both are checked.
        """
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

    def time_direction(self, implementations: list[Implementation], direction: str) -> None:
        """Times the implementations in one direction. An error becomes a note in their rows."""
        calls: dict[str, Callable[[], object]] = {}
        rows = {e.name: e.rows[direction] for e in implementations}
        for e in implementations:
            try:
                timed = call(e.attend, e.inputs, direction)
                timed()  # the first call may compile
                self.timer.synchronize()
                calls[e.name] = timed
            except Exception as error:
                self.note_error(error, [rows[e.name]])
        if not calls:
            return
        try:
            seconds = self.timer.rounds(calls, self.repeats, self.min_seconds, self.max_seconds)
        except Exception as error:  # for example, too little memory for all graphs together
            self.note_error(error, [rows[name] for name in calls])
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

    def note_error(self, error: Exception, rows: Iterable[Row]) -> None:
        """Writes the error into the notes of the rows.

        Raises:
            DeviceLost: the error made the device unusable.
        """
        name = ""
        for row in rows:
            row.note, name = first_line(error), row.name
        try:
            self.timer.synchronize()
        except Exception as lost:
            raise DeviceLost(f"the device failed at {name}: {first_line(error)}") from lost


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
