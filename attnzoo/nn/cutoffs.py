"""Cutoffs of an adaptive softmax from class frequencies, by dynamic programming.

The classes are sorted by frequency. The time of a product is modelled as in `time_of`. With f_m(j)
the least time of the head and of m clusters that cover the classes 0 … j − 1,

    f_0(j) = g(J + j, B),    f_m(j) = min over i < j of f_{m−1}(i) + g(j − i, (P_j − P_i) B)

where P_j is the share of the tokens in the first j classes. The cost of a cluster satisfies the
quadrangle inequality: k·B does, being a product of two measures of the interval i … j, and so does
an increasing convex function of it. The best i therefore never decreases with j, and a search that
halves the range of j finds all minima of a stage in V log V steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from attnzoo.core.checks import check_sizes, is_number, plain, shown

Array = np.ndarray
MOST = 5  # largest number of clusters that is chosen


def chosen_cutoffs(
    counts: Any, clusters: int | None, tokens: int, overhead: float, smallest: float, most: int
) -> list[int]:
    """Check the arguments of `AdaptiveSoftmax.from_frequencies`; return the cutoffs.

    most: the largest number of clusters that have at least one feature.
    """
    frequencies = _frequencies(counts)
    if most < 1:
        raise ValueError("in_features // div_value must be at least 1")
    most = min(most, len(frequencies) - 1)
    check_sizes(optional=True, clusters=clusters)
    check_sizes(tokens=tokens)
    if clusters is not None and clusters > most:
        raise ValueError(
            f"clusters must be at most {most} for this number of classes, in_features and "
            f"div_value, got {clusters}"
        )
    for name, value in (("overhead", overhead), ("smallest", smallest)):
        if not is_number(plain(value)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number >= 0, got {shown(value)}")
    numbers = range(1, min(most, MOST) + 1) if clusters is None else [clusters]
    constants = float(tokens), float(overhead), float(smallest)
    every = (best_cutoffs(frequencies, number, *constants) for number in numbers)
    return min(every, key=lambda pair: pair[0])[1]


def _frequencies(counts: Any) -> Array:
    allowed = "numbers >= 0 in descending order, one per class and at least 2"
    if isinstance(counts, Tensor):
        counts = counts.detach().cpu().double()
    try:
        frequencies = np.asarray(counts)
        if frequencies.dtype.kind in "SU":  # numpy would read numbers in strings
            raise TypeError
        frequencies = frequencies.astype(np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"counts must be {allowed}, got {shown(counts)}") from None
    if frequencies.ndim != 1 or len(frequencies) < 2:
        raise ValueError(f"counts must be {allowed}, got the shape {frequencies.shape}")
    if not (np.isfinite(frequencies).all() and (frequencies >= 0).all() and frequencies.max() > 0):
        raise ValueError(f"counts must be finite {allowed}, with a sum above 0")
    if rising := np.flatnonzero(np.diff(frequencies) > 0).tolist():
        at = rising[0] + 1
        raise ValueError(
            f"counts must be in descending order, but class {at} is more frequent than class "
            f"{at - 1}: sort the classes by frequency"
        )
    return frequencies / frequencies.max()  # so that sums of large counts are finite


def time_of(columns: Array, rows: Array | float, overhead: float, smallest: float) -> Array:
    """g(k, B)/λ = c/λ + max(k_0 B_0, k B): the time of a product of B rows and k columns."""
    return overhead + np.maximum(smallest, columns * rows)


def best_cutoffs(
    counts: Array, clusters: int, tokens: float, overhead: float, smallest: float
) -> tuple[float, list[int]]:
    """The least time of a step with this number of clusters, and the cutoffs that give it.

    Args:
        counts: frequencies (V,) in descending order, fp64, with a sum above 0.
        clusters: number of clusters besides the head, J, from 1 to V − 1.
        tokens: rows of a step, B.
        overhead: c/λ.
        smallest: k_0 · B_0.
    """
    classes = len(counts)
    rows = tokens * np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])

    def cluster(first: Array, end: Array | int) -> Array:
        return time_of(end - first, rows[end] - rows[first], overhead, smallest)

    ends = np.arange(classes)
    times = time_of(clusters + ends, float(tokens), overhead, smallest)
    times[0] = np.inf  # the head holds at least one class
    stages = []
    for _ in range(clusters - 1):
        before = times

        def total(first: Array, end: Array, before: Array = before) -> Array:
            return np.where(first < end, before[first] + cluster(first, end), np.inf)

        chosen = _row_minima(total, classes)
        times = total(chosen, ends)
        stages.append(chosen)
    totals = times + cluster(ends, classes)
    # Of equal times, the last cutoffs give the most classes many features.
    cutoffs = [int(np.flatnonzero(totals == totals.min())[-1])]
    for chosen in reversed(stages):
        cutoffs.append(int(chosen[cutoffs[-1]]))
    return float(totals.min()), cutoffs[::-1]


def _row_minima(cost: Callable[[Array, Array], Array], size: int) -> Array:
    """The highest i with the least cost(i, j), for each j; it must not decrease with j.

    For j without a finite cost, the result is a lower bound for the following j.
    """
    best = np.zeros(size, dtype=np.int64)
    step = 1 << max(size - 1, 1).bit_length() - 1
    while step:
        ends = np.arange(step, size, 2 * step)
        low = best[ends - step]
        later = ends + step
        high = np.where(later < size, best[np.minimum(later, size - 1)], size - 1)
        high = np.maximum(low, np.minimum(high, ends - 1))
        lengths = high - low + 1
        starts = np.cumsum(lengths) - lengths
        firsts = np.arange(lengths.sum()) - np.repeat(starts - low, lengths)
        costs = cost(firsts, np.repeat(ends, lengths))
        least = np.minimum.reduceat(costs, starts)
        equal = costs == np.repeat(least, lengths)
        last = np.maximum.reduceat(np.where(equal, firsts, 0), starts)
        best[ends] = np.where(np.isinf(least), low, last)
        step //= 2
    return best
