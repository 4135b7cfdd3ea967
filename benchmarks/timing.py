"""Wall-clock times of calls that are compared with each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


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
    calls: Mapping[str, Callable[[], object]], repeats: int, min_seconds: float, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, all of them in turn, round after round.

    In turn, because a machine's speed drifts: what slows one call down then slows its neighbours
    too, and the ratio within a round hardly notices. At least ``repeats`` rounds, and more while
    the rounds so far took less than ``min_seconds`` together: short calls need more samples.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent, rounds = 0.0, 0
    while rounds < repeats or spent < min_seconds:
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
