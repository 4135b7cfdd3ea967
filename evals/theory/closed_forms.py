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
        inside = ", ".join(f"{name}={value}" for name, value in self.params.items())
        return f"{self.variant}({inside})" if inside else self.variant


def softmax_fixed(n: int, gap: float) -> float:
    """1 / (1 + (n − 1) e^{−Δ}), which is about e^Δ / n for large n."""
    return 1 / (1 + (n - 1) * math.exp(-gap))


def softmax_shrinking(n: int, kappa: float) -> float:
    """κ / (n (1 − e^{−κ})), the leading term of the exact (1 − e^{−κ/n}) / (1 − e^{−κ})."""
    return kappa / (n * (1 - math.exp(-kappa)))


def with_log_gain(form: ClosedForm, s: float) -> ClosedForm:
    """A softmax law with the gain s log n, which multiplies Δ and κ.

    Fixed: 1 / (1 + (n − 1) n^{−sΔ}) → 1 iff sΔ > 1. Shrinking: sκ log n / (n (1 − n^{−sκ})).
    """
    return lambda n, size: form(n, s * math.log(n) * size)


def position_gain(n: int, beta: float, train_length: int) -> float:
    """The gain 1 + β log(1 + ⌊n / train_length⌋) of the last of n positions."""
    return 1 + beta * math.log(1 + n // train_length)


def with_position_gain(form: ClosedForm, beta: float, train_length: int) -> ClosedForm:
    """A softmax law with this gain, which multiplies Δ and κ. Fixed: → 1 iff βΔ > 1."""
    return lambda n, size: form(n, position_gain(n, beta, train_length) * size)


def sparsemax_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 1, else (1 + (n − 1)Δ) / n, with limit Δ."""
    return 1.0 if gap >= 1 else (1 + (n - 1) * gap) / n


def entmax15_fixed(n: int, gap: float) -> float:
    """1 if Δ ≥ 2, else (a + u)² with a = Δ/2, u = (−a + √(a² + n(1 − a²))) / n; limit Δ²/4."""
    a = gap / 2
    return 1.0 if a >= 1 else (a + (math.sqrt(a * a + n * (1 - a * a)) - a) / n) ** 2


def entmax_shrinking(alpha: float) -> ClosedForm:
    """p = (ακ/n)^{1/α}, because the weights sum to 1: n/κ ∫ ((α−1)x)^{1/(α−1)} dx = 1.

    x is the score above the threshold. p is the leading term of the largest weight for n → ∞. The
    integral counts only half of the top key. The next term is therefore −p/(2α) times p.
    """
    return lambda n, kappa: (alpha * kappa / n) ** (1 / alpha)


def entmax_support_below(alpha: float) -> Callable[[int, float], bool]:
    """A function of (n, κ), true if the law's support, n p^{α−1} / ((α−1)κ) keys, is below n."""

    def holds(n: int, kappa: float) -> bool:
        return entmax_shrinking(alpha)(n, kappa) ** (alpha - 1) < (alpha - 1) * kappa

    return holds


def top_p_fixed(p: float) -> ClosedForm:
    """s / (s + m r) with softmax weights s and r = (1 − s)/(n − 1), m = ⌈(p − s)/r⌉; 1 if s ≥ p.

    This is about e^Δ / (p n) for large n.
    """

    def form(n: int, gap: float) -> float:
        s = softmax_fixed(n, gap)
        other_weight = (1 - s) / (n - 1)
        return 1.0 if s >= p else s / (s + math.ceil((p - s) / other_weight) * other_weight)

    return form


def sigmoid_fixed(n: int, gap: float) -> float:
    """1 / (1 + n e^{−Δ}) with bias b = −log n, which is about e^Δ / n for large n."""
    return 1 / (1 + n * math.exp(-gap))


def entmax_uniform(alpha: float) -> Callable[[int], float]:
    """n^{α−2}, because J = diag(u) − uuᵀ/Σu = n^{α−2} (I − 11ᵀ/n) with u = p^{2−α} = n^{α−2}.

    This is 1/n for softmax (α = 1, where u = p and J = diag(p) − ppᵀ), n^{−1/2} for α = 1.5, and 1
    for sparsemax (α = 2).
    """
    return lambda n: n ** (alpha - 2.0)


def log_gain_uniform(s: float) -> Callable[[int], float]:
    """s log n / n: the norm of softmax, 1/n, times the gain."""
    return lambda n: s * math.log(n) / n


def silu_fixed(n: int, gap: float) -> float:
    """SiLU(Δ) / n: the keys with score 0 have weight 0."""
    return gap / (1 + math.exp(-gap)) / n


def lssa_fixed(n: int, gap: float) -> float:
    """φ(Δ log n) / (φ(Δ log n) + (n − 1) log 2), φ the softplus: about Δ log n / (n log 2)."""
    top = math.log1p(n**gap)
    return top / (top + (n - 1) * math.log(2))


def lssa_shrinking(n: int, kappa: float) -> float:
    """2 / n: for n → ∞, softplus(s) is s, and the mean of s is half of the largest."""
    return 2 / n


def sigmoid_uniform(n: int) -> float:
    """p(1 − p) with p = 1/(1 + n), because J is diagonal."""
    return n / (1 + n) ** 2


LAWS = (
    Law("softmax", {}, softmax_fixed, softmax_shrinking, uniform=entmax_uniform(1.0)),
    Law(
        "top_p",
        {"p": 0.75},
        top_p_fixed(0.75),
        lambda n, kappa: softmax_shrinking(n, kappa) / 0.75,
        uniform=lambda n: 1 / math.ceil(0.75 * n),
    ),
    Law(
        "ssmax",
        {"s": 0.43},
        with_log_gain(softmax_fixed, 0.43),
        with_log_gain(softmax_shrinking, 0.43),
        uniform=log_gain_uniform(0.43),
    ),
    Law(
        "log_n",
        {"train_length": 16},
        with_log_gain(softmax_fixed, 1 / math.log(16)),
        with_log_gain(softmax_shrinking, 1 / math.log(16)),
        uniform=log_gain_uniform(1 / math.log(16)),
    ),
    Law(
        "position_temperature",
        {"beta": 0.5, "train_length": 16},
        with_position_gain(softmax_fixed, 0.5, 16),
        with_position_gain(softmax_shrinking, 0.5, 16),
        uniform=lambda n: position_gain(n, 0.5, 16) / n,
    ),
    Law(
        "sparsemax",
        {},
        sparsemax_fixed,
        entmax_shrinking(2.0),
        entmax_support_below(2.0),
        entmax_uniform(2.0),
    ),
    Law(
        "entmax",
        {},
        entmax15_fixed,
        entmax_shrinking(1.5),
        entmax_support_below(1.5),
        entmax_uniform(1.5),
    ),
    Law(
        "entmax",
        {"alpha": 1.25},
        None,
        entmax_shrinking(1.25),
        entmax_support_below(1.25),
        entmax_uniform(1.25),
    ),
    Law("sigmoid", {}, sigmoid_fixed, uniform=sigmoid_uniform),
    Law(
        "lssa",
        {"eps": 0.0},
        lssa_fixed,
        lssa_shrinking,
        uniform=lambda n: math.log(n) / (2 * n * math.log(2)),
    ),
    # One weight does not depend on the other scores, and scores of 0 have weight 0.
    Law(
        "screening",
        {"r": 2.0},
        lambda n, gap: max(1 - 2 * (1 - gap), 0.0) ** 2,
        uniform=lambda n: 0.0,
    ),
    Law("silu", {}, silu_fixed, uniform=lambda n: 0.5 / n),  # SiLU'(0) = ½
)
