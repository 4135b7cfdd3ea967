"""Measures cells of a GPU: each variant checked first, then timed in turn with its competitors.

All that has the same shape and the same inputs is one group, timed round by round: each ratio is
between calls of the same rounds. Forward is a call without gradients; backward is the gradients of
q, k and v alone, on a graph that is kept. What a device is timed with is handed in (`Timer`), so
that everything here runs on a CPU too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import DISCONTINUOUS, Case, Inputs, Setting
from benchmarks.harness.clusters import BLOCK, block_sparsity
from benchmarks.harness.correctness import Check, Pairs, check, relative_error
from benchmarks.harness.grid import DIRECTIONS, Budget, flops, label
from benchmarks.harness.timing import Spread, Timer, ratio
from benchmarks.suites import competitors
from benchmarks.suites.competitors import Attend, Factories

SOFTMAX = Case("softmax", "softmax")
# A ratio to each of these is given where it was timed in the same rounds.
YARDSTICKS = ("sdpa flash", "sdpa cudnn", "flex", "softmax")
GATE = "Each is compared with fp64 first, on 128 rows of the first and last batches and heads."
# The product of square matrices whose rate is taken for the device's peak.
PEAK_SIZE = 8192


class DeviceLost(RuntimeError):
    """The device answers no more: nothing after this can be measured by this process."""


@dataclass
class GpuRow:
    """One call in one direction. What was not measured is None; `note` says what went wrong.

    kind is "variant", "yardstick" (a softmax) or "rival" (another's implementation of a variant).
    `error` of a rival is relative to fp64; `ratios` are of the times, to those named, in the same
    rounds; `peak_bytes` in backward are those of a forward and a backward pass together.
    """

    name: str
    kind: str
    direction: str
    head_dim: int
    causal: bool
    length: int
    batch: int
    heads: int
    dtype: str
    inputs: str
    backend: str | None = None
    check: Check | None = None
    error: float | None = None
    seconds: Spread | None = None
    tflops: float | None = None
    peak_share: float | None = None
    ratios: dict[str, Spread] = field(default_factory=dict)
    peak_bytes: int | None = None
    block_sparsity: float | None = None
    note: str = ""

    def record(self) -> dict[str, Any]:
        """For JSON: the check is what was worst."""
        record = asdict(self)
        if self.check is not None:
            name, worst = self.check.worst
            record["check"] = {
                "ok": self.check.ok, "rows": self.check.rows, "pairs": self.check.pairs,
                "worst": name, "error": finite(worst.error), "share": finite(worst.share),
            }  # fmt: skip
        return record


def finite(x: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return x if abs(x) < float("inf") else None


@dataclass
class Entrant:
    """One that takes part in a group: its calls and rows by direction."""

    attend: Attend
    inputs: Inputs
    rows: dict[str, GpuRow]
    rivals: list[str] = field(default_factory=list)
    calls: dict[str, Callable[[], object]] = field(default_factory=dict)

    def prepare(self, direction: str) -> Tensor:
        """Runs once, which compiles; then the call is ready to be timed. Returns the output."""
        i, leaves = self.inputs, (self.inputs.q, self.inputs.k, self.inputs.v)
        if direction == "forward":
            self.calls[direction] = self.forward
            return self.forward()
        out = self.attend(*leaves)
        back = partial(torch.autograd.grad, out, leaves, i.do, retain_graph=True)
        back()
        self.calls[direction] = back
        return out.detach()

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend(self.inputs.q, self.inputs.k, self.inputs.v)

    def both(self) -> object:
        leaves = (self.inputs.q, self.inputs.k, self.inputs.v)
        return torch.autograd.grad(self.attend(*leaves), leaves, self.inputs.do)


def absent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("could not be made")


def ours(case: Case, backend: str | None, causal: bool) -> Attend:
    return partial(
        attnzoo.attention, variant=case.variant, backend=backend, is_causal=causal, **case.params
    )


@dataclass
class Bench:
    """What is measured in each group, and with what."""

    cases: list[Case]
    timer: Timer
    backend: str | None = "flash"
    directions: tuple[str, ...] = DIRECTIONS
    names: tuple[str, ...] = competitors.NAMES
    yardsticks: Callable[[Setting, tuple[str, ...]], Factories] = competitors.yardsticks
    rivals: Callable[[Case, Setting, tuple[str, ...]], Factories] = competitors.rivals
    budget: Budget = field(default_factory=Budget)
    peak: float | None = None  # FLOP/s
    repeats: int = 10
    min_seconds: float = 0.05
    max_seconds: float = 20.0  # for the rounds of a group in one direction
    time: bool = True
    memory: bool = True
    left_out: list[str] = field(default_factory=list)

    def rows(self, settings: list[Setting]) -> Iterator[list[GpuRow]]:
        """The rows of each group. After a failure of the device itself the rest is left out."""
        for number, setting in enumerate(settings):
            entrants: dict[str, Entrant] = {}
            lost = None
            try:
                self.group(setting, entrants)
            except DeviceLost as error:
                lost = str(error)
            rows = [row for entrant in entrants.values() for row in entrant.rows.values()]
            if rows:
                yield rows
            if lost is not None:
                rest = [label(s) for s in settings[number + 1 :] if self.suited(s)]
                self.left_out += [f"what is missing of {label(setting)}: {lost}", *rest]
                return

    def suited(self, setting: Setting) -> list[Case]:
        """Clustered inputs are for those with a threshold: the others skip nothing."""
        return [case for case in self.cases if case.has_threshold or not setting.clustered]

    def group(self, setting: Setting, entrants: dict[str, Entrant]) -> None:
        """Fills in who takes part, by name, with their rows."""
        cases = self.suited(setting)
        if not cases:
            return
        if self.budget.spent:
            self.left_out.append(label(setting))
            return
        if self.time and "flex" in self.names and setting.device != "cpu":
            competitors.forget_shapes()
        both = "both" if "backward" in self.directions else "forward"
        setting = replace(setting, direction=both)
        try:
            inputs = Inputs.make(SOFTMAX, setting)
        except Exception as error:
            self.left_out.append(f"{label(setting)}: {self.words(error, 'its inputs')}")
            return
        if self.time:
            factories = self.yardsticks(setting, self.names)
            if not any(case.spec == "softmax" for case in cases):
                factories["softmax"] = partial(ours, SOFTMAX, self.backend, setting.causal)
            for name, factory in factories.items():
                entrants[name] = Entrant(absent, inputs, self.blank(name, "yardstick", setting))
                self.enter(name, entrants[name], factory)
        for case in cases:
            if self.budget.spent:
                self.left_out.append(f"{case.spec} {label(setting)}")
            else:
                self.contest(case, inputs, setting, entrants)
        if self.time:
            for direction in self.directions:
                self.measure(entrants, direction, setting)
        for entrant in entrants.values():
            entrant.calls.clear()  # and the graphs that they hold
        self.survive("the group")
        self.timer.release()

    def contest(
        self, case: Case, inputs: Inputs, setting: Setting, entrants: dict[str, Entrant]
    ) -> None:
        """A variant, if its results are right, and those who compute the same."""
        if case.variant in DISCONTINUOUS:
            inputs = Inputs.make(case, setting)
        inputs = replace(inputs, params=case.params)
        pairs = Pairs.corners(setting.batch, setting.heads)
        rows = self.blank(case.spec, "variant", setting)
        attend = ours(case, self.backend, setting.causal)
        entrants[case.spec] = found = Entrant(attend, inputs, rows)

        def put(**facts: Any) -> None:
            for row in rows.values():
                for name, fact in facts.items():
                    setattr(row, name, fact)

        put(note="it took the device down")  # unless what follows is reached
        try:
            q, k, v = inputs.q, inputs.k, inputs.v
            plan = attnzoo.explain(
                q, k, v, case.variant, backend=self.backend, is_causal=setting.causal, **case.params
            )
            put(backend=plan.chosen)
            for direction, row in rows.items():
                # A call without gradients may take another path than one with them.
                given = inputs.detached() if direction == "forward" else inputs
                row.check = check(case, given, self.backend, setting.seed, pairs)
            if case.has_threshold:
                share = block_sparsity(q, k, case.variant, setting.causal, case.params)
                put(block_sparsity=share)
        except Exception as error:
            put(note=self.words(error, case.spec))
            return
        if not all(row.check is not None and row.check.ok for row in rows.values()):
            put(note="WRONG, not timed")
            return
        put(note="")
        if not self.time:
            return
        for direction in self.directions:
            self.prepare(case.spec, found, direction)
        for name, factory in self.rivals(case, setting, self.names).items():
            entrants[name] = rival = Entrant(absent, inputs, self.blank(name, "rival", setting))
            found.rivals.append(name)
            out = self.enter(name, rival, factory)
            if out is None:
                continue
            try:
                error = finite(relative_error(case, inputs, out, setting.seed, pairs))
            except Exception as failure:
                self.words(failure, name)
                error = None  # its times are good without
            for row in rival.rows.values():
                row.error = error

    def blank(self, name: str, kind: str, setting: Setting) -> dict[str, GpuRow]:
        s, inputs = setting, "clustered" if setting.clustered else "iid"
        return {
            d: GpuRow(name, kind, d, s.head_dim, s.causal, s.length, s.batch, s.heads, s.dtype,
                inputs)
            for d in self.directions
        }  # fmt: skip

    def enter(self, name: str, entrant: Entrant, factory: Callable[[], Attend]) -> Tensor | None:
        """Whatever a competitor raises is a note in its row, and the others go on."""
        try:
            entrant.attend = factory()
        except Exception as error:
            for row in entrant.rows.values():
                row.note = self.words(error, name)
            return None
        outs = [self.prepare(name, entrant, direction) for direction in self.directions]
        return outs[0]

    def prepare(self, name: str, entrant: Entrant, direction: str) -> Tensor | None:
        try:
            out = entrant.prepare(direction)
            self.timer.settle()
        except Exception as error:
            entrant.calls.pop(direction, None)
            entrant.rows[direction].note = self.words(error, name)
            return None
        return out

    def measure(self, entrants: dict[str, Entrant], direction: str, setting: Setting) -> None:
        """Times of all who can run, in turn; then the memory of each."""
        calls = {n: e.calls[direction] for n, e in entrants.items() if direction in e.calls}
        if not calls:
            return
        try:
            seconds = self.timer.rounds(calls, self.repeats, self.min_seconds, self.max_seconds)
        except Exception as error:
            words = self.words(error, f"the {direction} rounds")
            for name in calls:
                entrants[name].rows[direction].note = f"not timed: {words}"
            return
        for name in calls:
            row = entrants[name].rows[direction]
            row.seconds = Spread.of(seconds[name])
            row.tflops = flops(setting, direction) / row.seconds.median / 1e12
            row.peak_share = row.tflops * 1e12 / self.peak if self.peak else None
            others = [n for n in (*YARDSTICKS, *entrants[name].rivals) if n in seconds]
            row.ratios = {n: ratio(seconds[name], seconds[n]) for n in others if n != name}
            if self.memory:
                whole = entrants[name].both if direction == "backward" else calls[name]
                try:
                    row.peak_bytes = self.timer.peak_bytes(whole)
                except Exception as error:
                    row.note = f"memory not measured: {self.words(error, name)}"

    def words(self, error: Exception, who: str) -> str:
        """An error's first line. If the device went with it, that is the end."""
        self.survive(who, error)
        return first_line(error)

    def survive(self, who: str, cause: Exception | None = None) -> None:
        try:
            self.timer.settle()
        except Exception as error:
            raise DeviceLost(f"the device failed at {who}: {first_line(cause or error)}") from error


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def matrix_peak(timer: Timer, dtype: str, device: str, size: int = PEAK_SIZE) -> float:
    """FLOP/s of a large product of random matrices (on zeros it would be faster)."""
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    seconds = timer.rounds({"product": lambda: torch.mm(a, b, out=out)}, 20, 0.05)["product"]
    return 2.0 * size**3 / Spread.of(seconds).median


def unlisted(names: tuple[str, ...]) -> str:
    """What is not compared with because it is not there."""
    missing = "adasplash" in names and importlib.util.find_spec("adasplash") is None
    return "adasplash is not installed: entmax is not compared with it" if missing else ""


def targets(rows: list[GpuRow]) -> list[str]:
    """What a group is expected to show, measured."""
    found = []
    for row in rows:
        if row.name.startswith("adaptive_temperature") and "softmax" in row.ratios:
            times = row.ratios["softmax"]
            found.append(
                f"{row.name} {row.direction}: {times.median:.2f} × softmax's time (target: 1.6)"
            )
        if row.block_sparsity is not None and row.direction == "forward":
            share = f"{100 * row.block_sparsity:.0f} %"
            found.append(f"{row.name}: {share} of the {BLOCK} × {BLOCK} blocks are empty")
    return found
