"""Checks each implementation in a group, then times them in rounds of one call each.

All implementations in a group have the same shape and kind of inputs, so that ratios compare calls
from the same rounds. An error in one implementation becomes a note in its table row. The other
implementations are still timed.

A group can be measured in parts, so that its rows are written one after the other and a crash costs
one of them. The first part has the baselines and softmax. Each further part has one variant, and
times the implementations of the first part again in its rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from benchmarks.harness import baselines
from benchmarks.harness.cases import SOFTMAX, Attend, Case, Inputs, Setting, call
from benchmarks.harness.correctness import Check, Reference, plan_of
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
        of_softmax = baselines.of_softmax(setting, names) if case == SOFTMAX else {}
        makers = of_softmax | baselines.of_variant(case, setting, names)
        return [
            Implementation(name, case, inputs, make, "baseline") for name, make in makers.items()
        ]


# Pairs of a setting and a function that makes the inputs and implementations of its group.
Groups = Iterable[tuple[Setting, Callable[[], list[Implementation]]]]
# A function that returns a call's peak memory in bytes, or None if unknown. The memory of inputs is
# not counted.
Memory = Callable[[Implementation, Row], int | None]


@dataclass
class Bench:
    """Measures groups and writes their rows to a report.

    repeats, min_seconds, max_seconds: how long a group is timed in each direction; see
    `timing.interleave`. in_parts: whether a group is measured in parts. rate: computes figures such
    as TFLOP/s from a timed row.
    """

    suite: str
    timer: Timer
    directions: Sequence[str] = ("forward",)
    repeats: int = 10
    min_seconds: float = 0.05
    max_seconds: float = 20.0
    in_parts: bool = False
    time: bool = True
    memory: Memory | None = None
    rate: Callable[[Row], dict[str, float]] = lambda row: {}
    reference: tuple[str, Reference] | None = None  # the last one, by the spec of its case

    def measure(self, groups: Groups, report: Report) -> None:
        """Measures all groups. If the device fails, the report lists the remaining groups."""
        for setting, make in groups:
            label = f"{self.suite}: {setting.title}, B={setting.batch}, N={setting.length}"
            if report.device_lost:
                report.left_out.append(label)
                continue
            try:
                self.measure_parts(make(), setting, report)
            except DeviceLost as error:
                report.device_lost = True
                report.left_out.append(f"the rest of {label}: {error}")
            except Exception as error:  # for example, too little memory for the inputs
                report.left_out.append(f"{label}: {first_line(error)}")

    def measure_parts(
        self, implementations: Sequence[Implementation], setting: Setting, report: Report
    ) -> None:
        """Measures the parts of a group, and adds the rows of each part to the report.

        Raises:
            DeviceLost: the device failed. The rows of the part are in the report.
        """
        self.reference = None
        able: list[Implementation] = []
        timed_again: list[Implementation] = []
        parts = in_parts(implementations) if self.in_parts else [implementations]
        for part in filter(None, parts):
            rows: list[Row] = []
            report.begin(part[-1].case.spec)
            try:
                able = self.measure_part(part, setting, rows, timed_again)
            finally:
                report.add(sorted(rows, key=lambda row: self.directions.index(row.direction)))
            timed_again = timed_again or able
        self.reference = None
        self.timer.release()

    def measure_part(
        self, implementations: Sequence[Implementation], setting: Setting, rows: list[Row],
        timed_again: Sequence[Implementation] = (),
    ) -> list[Implementation]:  # fmt: skip
        """Appends the rows of all implementations to ``rows``. Returns those that can be timed.

        ``rows`` has them also if the device fails. ``timed_again``: implementations that take part
        in the rounds only for the ratios.

        Raises:
            DeviceLost: the device failed.
        """
        able: list[Implementation] = []
        self.progress(f"checking {len(implementations)} implementations", setting)
        for e in implementations:
            e.rows = {
                d: Row(self.suite, e.name, e.case, e.kind, d, setting) for d in self.directions
            }
            rows += e.rows.values()
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
        if self.time and able:
            for direction in self.directions:
                self.progress(f"timing {direction}", setting)
                self.time_direction(able, direction, timed_again)
        if self.memory is not None and able:
            self.progress("measuring memory", setting)
            for implementation in able:
                for row in (row for row in implementation.rows.values() if not row.note):
                    try:
                        row.peak_bytes = self.memory(implementation, row)
                    except Exception as error:
                        self.note_error(error, [row])
        return able

    def progress(self, stage: str, setting: Setting) -> None:
        # The rows of a group that is measured in parts appear part by part.
        if not self.in_parts:
            print(f"{self.suite}, N = {setting.length}: {stage}", file=sys.stderr, flush=True)

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
            error = self.reference_of(e, setting).relative_error(e.attend, without)
            for row in e.rows.values():
                row.error = error if abs(error) < float("inf") else None  # JSON has no NaN
            return
        for row in e.rows.values():
            inputs = without if row.direction == "forward" else e.inputs
            row.backend = plan_of(e.case, inputs, e.backend).chosen
            if row.backend is None:
                # This call raises the reason, before a reference is made.
                e.attend(inputs.q, inputs.k, inputs.v)
        # A variant may draw noise. Its error must not depend on what was timed before.
        torch.manual_seed(setting.seed)
        reference = self.reference_of(e, setting)
        checks: dict[bool, Check] = {}
        for row in e.rows.values():
            gradients = row.direction != "forward"
            if gradients not in checks:
                checks[gradients] = reference.check(e.backend, gradients)
            row.check = checks[gradients]

    def reference_of(self, e: Implementation, setting: Setting) -> Reference:
        """The reference of the implementation's case. Implementations of a case follow each other,
        so only the last reference is stored."""
        if self.reference is None or self.reference[0] != e.case.spec:
            self.reference = None  # frees its memory first
            inputs = e.inputs.detached() if [*e.rows] == ["forward"] else e.inputs
            self.reference = e.case.spec, Reference.of(e.case, inputs, setting.seed)
        return self.reference[1]

    def time_direction(
        self, implementations: list[Implementation], direction: str,
        timed_again: Sequence[Implementation] = (),
    ) -> None:  # fmt: skip
        """Times the implementations in one direction. An error becomes a note in their rows."""
        calls: dict[str, Callable[[], object]] = {}
        rows = {e.name: e.rows[direction] for e in implementations}
        cases = {e.name: e.case for e in (*timed_again, *implementations)}
        for e in (*timed_again, *implementations):
            if e.rows[direction].note:
                continue  # one of ``timed_again`` that has no time in this direction
            try:
                timed = call(e.attend, e.inputs, direction)
                timed()  # the first call may compile
                self.timer.synchronize()
                calls[e.name] = timed
            except Exception as error:
                self.note_error(error, [rows[e.name]] if e.name in rows else [])
        if not calls.keys() & rows.keys():
            return
        try:
            seconds = self.timer.rounds(calls, self.repeats, self.min_seconds, self.max_seconds)
        except Exception as error:  # for example, too little memory for all graphs together
            self.note_error(error, [rows[name] for name in calls if name in rows])
            return
        for name in calls.keys() & rows.keys():
            row, samples = rows[name], seconds[name]
            row.seconds = Spread.of(samples)
            row.figures = self.rate(row)
            row.ratios = {
                other: ratio(samples, other_samples)
                for other, other_samples in seconds.items()
                if other != name and cases[other] in (SOFTMAX, row.case)
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


def in_parts(implementations: Sequence[Implementation]) -> Iterator[list[Implementation]]:
    """The baselines of softmax and softmax, then each variant with the baselines of its case."""
    part = [e for e in implementations if e.case == SOFTMAX]
    if part:
        yield part
    others = [e for e in implementations if e.case != SOFTMAX]
    for spec in dict.fromkeys(e.case.spec for e in others):
        yield [e for e in others if e.case.spec == spec]
