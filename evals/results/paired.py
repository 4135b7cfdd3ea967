"""The paired t-test between a variant and the baseline, and Holm's correction.

A pair is one seed: the scores of two variants that were trained with the same data. Variants with
equal settings also have equal initial weights. The test asks whether the mean of their differences
is 0. It assumes that these differences are independent and normally distributed. Five seeds cannot
show whether they are, so a p value near 0.05 says little. A sign-flip test needs no normal
distribution, but with five seeds its smallest p value is 2/32 = 0.0625.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

LEAST = 3  # number of pairs below which there is no test
LEVEL = 0.05

Key = TypeVar("Key", bound=Hashable)


def t_test(differences: Sequence[float]) -> float | None:
    """The two-sided p value of the paired t-test; None for fewer than `LEAST` pairs.

    If all differences are 0, p is 1. If all are equal but not 0, t is infinite and p is 0.

    >>> round(t_test([0.1, 0.3, 0.2, 0.4, 0.3]), 4)
    0.007
    """
    count = len(differences)
    if count < LEAST:
        return None
    mean = math.fsum(differences) / count
    variance = math.fsum((x - mean) ** 2 for x in differences) / (count - 1)
    # Scores are means over sequences: below this, a spread is rounding.
    if variance <= (1e-12 * max(map(abs, differences))) ** 2:
        return 1.0 if mean == 0 else 0.0
    return two_sided(mean / math.sqrt(variance / count), count - 1)


def two_sided(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) for Student's t with an integer number of degrees of freedom.

    With θ = atan(|t|/√ν), 1 − p is a finite sum of powers of cos θ (Abramowitz and Stegun, 26.7.3
    and 26.7.4).
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cos, sin = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):  # ν odd: cos + 2/3 cos³ + …; ν even: 1 + 1/2 cos² + …
        total += term
        term *= cos * cos * k / (k + 1)
    inside = 2 / math.pi * (angle + sin * total) if odd else sin * total
    return min(1.0, max(0.0, 1 - inside))


def coverage(count: int) -> float:
    """How often the 95 % percentile interval of the bootstrap covers the mean of a normal
    distribution, for this number of values.

    The interval is the mean ± 1.96 standard errors, with the variance of the sample itself.

    >>> round(coverage(5), 3), round(coverage(1000), 3)
    (0.846, 0.95)
    """
    return 1 - two_sided(1.96 * math.sqrt((count - 1) / count), count - 1)


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
