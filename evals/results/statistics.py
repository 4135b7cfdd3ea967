"""Statistics over seeds: means with intervals, paired tests and Holm's correction.

A pair is one seed: the scores of two variants that were trained with the same data. Variants with
equal settings also have equal initial weights. The test asks whether the mean of their differences
is 0. It assumes that these differences are independent and normally distributed. Five seeds cannot
show whether they are, so a p value near 0.05 says little. A sign-flip test needs no normal
distribution, but with five seeds its smallest p value is 2/32 = 0.0625.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

LEAST = 3  # number of pairs below which there is no test
LEVEL = 0.05
CONFIDENCE = 0.95
_EXACT = 5  # up to this many seeds the bootstrap enumerates all resamples
_DRAWS = 10_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its standard error and its 95 % interval (both None for one seed)."""

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
    return Estimate(mean, math.sqrt(variance / count), count, bootstrap(values))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The percentile interval of the mean over resampled seeds.

    It uses all resamples for up to five seeds, otherwise 10 000 with a fixed random state.
    """
    means = np.asarray(values)[_resamples(len(values))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


@lru_cache(8)
def _resamples(count: int) -> np.ndarray:
    if count <= _EXACT:
        return np.array(list(itertools.product(range(count), repeat=count)))
    return np.random.Generator(np.random.Philox(count)).integers(count, size=(_DRAWS, count))


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


def coverage(count: int) -> float:
    """How often the 95 % percentile interval of the bootstrap covers the mean of a normal
    distribution, for this number of values.

    The interval is the mean ± 1.96 standard errors, with the variance of the sample itself.

    >>> round(coverage(5), 3), round(coverage(1000), 3)
    (0.846, 0.95)
    """
    from scipy.stats import t

    return 1 - 2 * float(t.sf(1.96 * math.sqrt((count - 1) / count), count - 1))


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
