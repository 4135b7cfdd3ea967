"""Statistics over seeds: means with intervals, paired tests and Holm's correction.

A pair is one seed: the scores of two variants that were trained with the same data. Variants with
equal settings also have equal initial weights. The test asks whether the mean of their differences
is 0. It assumes that these differences are independent and normally distributed. Five seeds cannot
show whether they are, so a p value near 0.05 says little. A sign-flip test needs no normal
distribution, but with five seeds its smallest p value is 2/32 = 0.0625.

Intervals make the same assumption: mean ± t · standard error, with the quantile t of Student's
distribution. A bootstrap of five seeds would cover the mean in 85 % of cases only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

LEAST = 3  # number of pairs below which there is no test
LEVEL = 0.05
CONFIDENCE = 0.95

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error and its 95 % t interval (both None for one seed)."""

    mean: float
    error: float | None
    count: int
    interval: tuple[float, float] | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """The estimate from one value per seed; None if there are no values."""
    return _estimate(tuple(values))


@lru_cache(4096)
def _estimate(values: tuple[float, ...]) -> Estimate | None:
    if not values:
        return None
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return Estimate(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    error = math.sqrt(variance / count)
    half = t_quantile(count) * error
    return Estimate(mean, error, count, (mean - half, mean + half))


@lru_cache
def t_quantile(count: int) -> float:
    """The half width of the 95 % interval of a mean of ``count`` values, in standard errors.

    >>> round(t_quantile(5), 3), round(t_quantile(10), 3)
    (2.776, 2.262)
    """
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


def holds(before: Mapping[Key, float], after: Mapping[Key, float], most: float) -> bool:
    """Whether the scores of a run hold in a second one, both by seed.

    They hold if the second run has all seeds of the first, no seed's score differs by more than
    ``most``, and the 95 % intervals overlap. With a score of one seed there is no interval to test.
    The intervals of seeds that fail now and then are wide, so that they test little.

    >>> holds({0: 0.97, 1: 0.98}, {0: 0.96, 1: 0.98}, most=0.1)
    True
    """
    if any(seed not in after or abs(after[seed] - before[seed]) > most for seed in before):
        return False
    ends = [x.interval for values in (before, after) if (x := estimate(list(values.values())))]
    first, second = ends if len(ends) == 2 else (None, None)
    return first is None or second is None or (first[0] <= second[1] and second[0] <= first[1])


def t_test(differences: Sequence[float]) -> float | None:
    """The two-sided p value of the paired t-test; None for fewer than `LEAST` pairs.

    If all differences are 0, p is 1. If all are equal but not 0, t is infinite and p is 0.

    >>> round(t_test([0.1, 0.3, 0.2, 0.4, 0.3]), 4)
    0.007
    """
    if len(differences) < LEAST:
        return None
    # Scores are means over sequences: below this, a spread is rounding.
    if np.std(differences, ddof=1) <= 1e-12 * np.abs(differences).max():
        return 0.0 if any(differences) else 1.0
    from scipy.stats import ttest_1samp

    _, p = ttest_1samp(differences, 0)
    return float(p)  # type: ignore[arg-type]


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's adjusted p values: the k-th smallest of m is multiplied by m − k + 1, and none is
    smaller than one before it. Comparing them with 0.05 keeps the probability of any false claim
    below 0.05.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[Key, float] = {}
    largest = 0.0
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[key] = largest
    return adjusted
