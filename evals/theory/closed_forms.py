"""Closed forms of a variant's largest weight, and of its Jacobian norm at equal scores.

There are three kinds of scores:

    fixed gap       one key at Δ, n − 1 keys at 0
    shrinking gap   z_j = κ(j + ½)/n for j = 0 … n − 1, which stands for n uniform draws
    uniform         n scores of 0

Sigmoid and SiLU need no law for the shrinking gap: a key's weight does not depend on the other
scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ClosedForm = Callable[[int, float], float]


@dataclass(frozen=True)
class Law:
    """A variant with its closed forms, each of which may be None.

    Attributes:
        variant: its name.
        params: its parameters.
        fixed: function of (n, Δ), the exact largest weight with a fixed gap.
        shrinking: function of (n, κ), the leading term for n → ∞ with a shrinking gap.
        holds: function of (n, κ), true if n is large enough for ``shrinking``.
        uniform: function of n ≥ 2, the exact ‖∂w/∂z‖₂ at n scores of 0.
    """

    variant: str
    params: dict[str, Any] = field(default_factory=dict)
    fixed: ClosedForm | None = None
    shrinking: ClosedForm | None = None
    holds: Callable[[int, float], bool] = lambda n, kappa: True
    uniform: Callable[[int], float] | None = None

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"{self.variant}({inside})" if inside else self.variant


def softmax_fixed(n: int, gap: float) -> float:
    """1 / (1 + (n − 1) e^{−Δ}), which is about e^Δ / n for large n."""
    return 1 / (1 + (n - 1) * math.exp(-gap))


def softmax_shrinking(n: int, kappa: float) -> float:
    """κ / (n (1 − e^{−κ})), the leading term of the exact (1 − e^{−κ/n}) / (1 − e^{−κ})."""
    return kappa / (n * (1 - math.exp(-kappa)))


def softmax_law(variant: str, params: dict[str, Any], gain: Callable[[int], float]) -> Law:
    """The law of softmax with a gain g(n), which multiplies Δ, κ and the Jacobian norm 1/n.

    With g = s log n, the fixed form is 1 / (1 + (n − 1) n^{−sΔ}) → 1 iff sΔ > 1. With a gain of
    1 + β log(1 + ⌊n / train_length⌋) it tends to 1 iff βΔ > 1.
    """
    return Law(
        variant,
        params,
        lambda n, gap: softmax_fixed(n, gain(n) * gap),
        lambda n, kappa: softmax_shrinking(n, gain(n) * kappa),
        uniform=lambda n: gain(n) / n,
    )


def sparsemax_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 1, else (1 + (n − 1)Δ) / n, with limit Δ."""
    return 1.0 if gap >= 1 else (1 + (n - 1) * gap) / n


def entmax15_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 2, else (a + u)² with a = Δ/2, u = (−a + √(a² + n(1 − a²))) / n; limit Δ²/4."""
    a = gap / 2
    return 1.0 if a >= 1 else (a + (math.sqrt(a * a + n * (1 - a * a)) - a) / n) ** 2


def entmax_law(
    variant: str, params: dict[str, Any], alpha: float, fixed: ClosedForm | None = None
) -> Law:
    """The law of α-entmax.

    Shrinking gap: p = (ακ/n)^{1/α}, because the weights sum to 1:
    n/κ ∫ ((α−1)x)^{1/(α−1)} dx = 1, where x is the score above the threshold. p is the leading term
    of the largest weight for n → ∞. The integral counts only half of the top key. The next term is
    therefore −p/(2α) times p. The law holds if its support, n p^{α−1} / ((α−1)κ) keys, is below n.

    Equal scores: J = diag(u) − uuᵀ/Σu = n^{α−2} (I − 11ᵀ/n) with u = p^{2−α}, so the norm is
    n^{α−2}. This is 1/n for softmax (α = 1), n^{−1/2} for α = 1.5, and 1 for sparsemax (α = 2).
    """

    def largest(n: int, kappa: float) -> float:
        return (alpha * kappa / n) ** (1 / alpha)

    def holds(n: int, kappa: float) -> bool:
        return largest(n, kappa) ** (alpha - 1) < (alpha - 1) * kappa

    return Law(variant, params, fixed, largest, holds, lambda n: n ** (alpha - 2.0))


def top_p_fixed(n: int, gap: float, p: float = 0.75) -> float:
    """s / (s + m r) with softmax weights s and r = (1 − s)/(n − 1), m = ⌈(p − s)/r⌉; 1 if s ≥ p.

    This is about e^Δ / (p n) for large n.
    """
    s = softmax_fixed(n, gap)
    other_weight = (1 - s) / (n - 1)
    return 1.0 if s >= p else s / (s + math.ceil((p - s) / other_weight) * other_weight)


def lssa_fixed(n: int, gap: float) -> float:
    """φ(Δ log n) / (φ(Δ log n) + (n − 1) log 2), φ the softplus: about Δ log n / (n log 2)."""
    top = math.log1p(n**gap)
    return top / (top + (n - 1) * math.log(2))


LAWS = (
    softmax_law("softmax", {}, lambda n: 1.0),
    Law(
        "top_p",
        {"p": 0.75},
        top_p_fixed,
        lambda n, kappa: softmax_shrinking(n, kappa) / 0.75,
        uniform=lambda n: 1 / math.ceil(0.75 * n),
    ),
    softmax_law("ssmax", {"s": 0.43}, lambda n: 0.43 * math.log(n)),
    softmax_law("log_n", {"train_length": 16}, lambda n: 1 / math.log(16) * math.log(n)),
    softmax_law(
        "position_temperature",
        {"beta": 0.5, "train_length": 16},
        lambda n: 1 + 0.5 * math.log(1 + n // 16),
    ),
    entmax_law("sparsemax", {}, 2.0, sparsemax_fixed),
    entmax_law("entmax", {}, 1.5, entmax15_fixed),
    entmax_law("entmax", {"alpha": 1.25}, 1.25),
    # With bias b = −log n, the weight is about e^Δ / n for large n. J is diagonal, with entries
    # p(1 − p) for p = 1/(1 + n).
    Law(
        "sigmoid",
        {},
        lambda n, gap: 1 / (1 + n * math.exp(-gap)),
        uniform=lambda n: n / (1 + n) ** 2,
    ),
    # Shrinking gap: for n → ∞, softplus(s) is s, and the mean of s is half of the largest.
    Law(
        "lssa",
        {"eps": 0.0},
        lssa_fixed,
        lambda n, kappa: 2 / n,
        uniform=lambda n: math.log(n) / (2 * n * math.log(2)),
    ),
    # One weight does not depend on the other scores, and scores of 0 have weight 0.
    Law(
        "screening",
        {"r": 2.0},
        lambda n, gap: max(1 - 2 * (1 - gap), 0.0) ** 2,
        uniform=lambda n: 0.0,
    ),
    # SiLU(Δ) / n: the keys with score 0 have weight 0. SiLU'(0) = ½.
    Law("silu", {}, lambda n, gap: gap / (1 + math.exp(-gap)) / n, uniform=lambda n: 0.5 / n),
)
