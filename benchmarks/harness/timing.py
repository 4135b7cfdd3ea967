"""Times of calls that are compared with each other: by the wall clock, or by a GPU's events."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Calls = Mapping[str, Callable[[], object]]
# However long they take: fewer have no quartiles.
LEAST_ROUNDS = 3
# What a GPU is given to write before each timed call: some 0.3 ms of work on an H200.
LEAD_BYTES = 2**30


@dataclass(frozen=True)
class Spread:
    """The median of ``count`` numbers and their quartiles."""

    median: float
    lower: float
    upper: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return Spread(samples[0], samples[0], samples[0], len(samples))
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, lower, upper, len(samples))


def interleave(
    calls: Calls,
    repeats: int,
    min_seconds: float,
    warmup: int = 2,
    max_seconds: float = float("inf"),
) -> dict[str, list[float]]:
    """Seconds of each call, all of them in turn, round after round.

    In turn, because a machine's speed drifts: what slows one call down then slows its neighbours
    too, and the ratio within a round hardly notices. At least ``repeats`` rounds, and more while
    the rounds so far took less than ``min_seconds`` together: short calls need more samples. Fewer,
    but `LEAST_ROUNDS`, once they have taken ``max_seconds``.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent, rounds = 0.0, 0
    while (rounds < repeats or spent < min_seconds) and (
        rounds < LEAST_ROUNDS or spent < max_seconds
    ):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
            spent += seconds[name][-1]
        rounds += 1
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The spread of the ratios within each round."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


class WallClock:
    """For a CPU. Its memory is measured elsewhere, in fresh processes."""

    def rounds(
        self, calls: Calls, repeats: int, min_seconds: float, max_seconds: float = float("inf")
    ) -> dict[str, list[float]]:
        """Seconds of each call, one number per round; see `interleave`."""
        return interleave(calls, repeats, min_seconds, max_seconds=max_seconds)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """Memory at the peak of one call beyond what was allocated before, where that is known."""
        return None

    def settle(self) -> None:
        """Waits for the device; raises if it has failed."""

    def release(self) -> None:
        """Hands back memory that is kept for later."""


class CudaEvents:
    """For a GPU: events around each call, and nothing waits before the last round is queued.

    A call whose kernels are shorter than the Python that launches them would be timed with the
    latter. So each is preceded by ``leads`` writes to a large buffer, during which the host runs
    ahead. They also leave the same things in the cache, none, to every call.
    """

    def __init__(
        self, cuda: Any = torch.cuda, lead: Callable[[], object] | None = None, leads: int = 1
    ) -> None:
        self.cuda, self.leads = cuda, leads
        if lead is None:
            lead = torch.empty(LEAD_BYTES, dtype=torch.int8, device="cuda").zero_
        self.lead = lead

    def rounds(
        self, calls: Calls, repeats: int, min_seconds: float, max_seconds: float = float("inf")
    ) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        trial = self._queue(calls)
        self.cuda.synchronize()
        spent = sum(start.elapsed_time(end) / 1e3 for start, end in trial.values())
        count = repeats
        if spent > 0:
            count = max(repeats, math.ceil(min_seconds / spent))
            count = max(LEAST_ROUNDS, math.floor(min(count, max_seconds / spent)))
        queued = [self._queue(calls) for _ in range(count)]
        self.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) / 1e3 for start, end in (r[name] for r in queued)]
            for name in calls
        }

    def _queue(self, calls: Calls) -> dict[str, tuple[Any, Any]]:
        """One round: the events at the start and at the end of each call."""
        events = {}
        for name, call in calls.items():
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self.leads):
                self.lead()
            start.record()
            call()
            end.record()
            events[name] = (start, end)
        return events

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        call()
        self.cuda.synchronize()
        return self.cuda.max_memory_allocated() - before

    def settle(self) -> None:
        self.cuda.synchronize()

    def release(self) -> None:
        self.cuda.empty_cache()


Timer = WallClock | CudaEvents
