"""Times several calls for comparison, with the wall clock or with CUDA events."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Calls = Mapping[str, Callable[[], object]]
Clock = Callable[[], float]
# Quartiles need at least three numbers.
MIN_ROUNDS = 3
# Size of the buffer that is written before each timed call. An H200 needs about 0.3 ms for one
# write (estimated from its bandwidth).
FLUSH_BYTES = 2**30


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of ``count`` numbers."""

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
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call in each round; a round runs every call once.

    The calls alternate because the speed of a machine drifts. A slow moment then affects all calls
    of a round, and the ratios within the round change little.

    Args:
        repeats: the minimum number of rounds, unless max_seconds is exceeded.
        min_seconds: rounds continue until their total time reaches this value.
        max_seconds: no round starts after this time, except the first `MIN_ROUNDS` rounds.
        warmup: the number of rounds before timing starts.
        clock: the seconds now, such as `time.process_time` for the CPU time of this process.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent, rounds = 0.0, 0
    while (rounds < repeats or spent < min_seconds) and (
        rounds < MIN_ROUNDS or spent < max_seconds
    ):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
            spent += seconds[name][-1]
        rounds += 1
    return seconds


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The median and quartiles, over the rounds, of ours / theirs."""
    return Spread.of([a / b for a, b in zip(samples, baseline, strict=True)])


class WallClock:
    """Timer for a CPU. It does not measure memory; `memory.measure` does, in fresh processes.

    warmup: the number of rounds before timing starts. clock: see `interleave`.
    """

    def __init__(self, warmup: int = 2, clock: Clock = time.perf_counter) -> None:
        self.warmup, self.clock = warmup, clock

    def rounds(
        self, calls: Calls, repeats: int, min_seconds: float, max_seconds: float = float("inf")
    ) -> dict[str, list[float]]:
        """Seconds of each call, one number per round; see `interleave`."""
        return interleave(calls, repeats, min_seconds, self.warmup, max_seconds, self.clock)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """Peak bytes allocated during one call minus those allocated before; None if unknown."""
        return None

    def synchronize(self) -> None:
        """Waits until the device has finished its work. Raises an error if the device failed."""

    def release(self) -> None:
        """Returns cached memory to the device."""


class CudaEvents:
    """Timer for a GPU: events around each call, synchronized only after all rounds are queued.

    Each call is preceded by ``flushes`` writes to a large buffer. While they run, the host queues
    the call, so that the launch overhead of short kernels is not timed. The writes also flush the
    cache, so that every call starts with a cold cache.
    """

    def __init__(
        self, cuda: Any = torch.cuda, flush: Callable[[], object] | None = None, flushes: int = 1
    ) -> None:
        self.cuda, self.flushes = cuda, flushes
        if flush is None:
            flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_
        self.flush = flush

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
            count = max(MIN_ROUNDS, math.floor(min(count, max_seconds / spent)))
        queued = [self._queue(calls) for _ in range(count)]
        self.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) / 1e3 for start, end in (r[name] for r in queued)]
            for name in calls
        }

    def _queue(self, calls: Calls) -> dict[str, tuple[Any, Any]]:
        """Queues one round, and returns the events before and after each call."""
        events = {}
        for name, call in calls.items():
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self.flushes):
                self.flush()
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

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def release(self) -> None:
        self.cuda.empty_cache()


Timer = WallClock | CudaEvents
