"""Sample parameters and a hand-computed example for each variant.

To add a variant, add a file to ``attnzoo/variants`` and an entry to `CASES`. The contract, backend
and paper tests then cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from helpers.definition_budget import PerturbMaxWeights, StickBreakingWeights
from helpers.row_formulas import (
    adaptive_row,
    asentmax_row,
    bisected,
    log_n,
    log_n_row,
    lssa_row,
    perturbed_row,
    taylor_row,
    top_k_softmax,
    top_p_row,
)


@dataclass(frozen=True)
class Paper:
    """The scores and weights of one query, computed by hand or taken from the paper."""

    scores: tuple[float, ...]
    weights: tuple[float, ...]
    params: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    accuracy: float = 1e-6


@dataclass(frozen=True)
class Case:
    """The hand-computed example and sample parameters of a variant, and the backends it runs on.

    rejects: for each backend that rejects a plain call, a text that its error contains. eager and
    tiled run every variant. decode supports what flash does if it is not named, flash_linear what
    linear does.
    shares: whether there is a form `Shares`, the only one that flash_shares supports.
    params: values that replace the example parameters of the variant; see `params_of`. learned: the
    range of each learnable parameter. Tests draw tensors (H,) from this range, and gradcheck must
    pass there. per_token: whether learnable parameters may also be (B, H, Nq). settings: more fixed
    parameters to test. row: the weights of one row of visible scores (n,), written from the
    formula, given the parameters by name; only for variants with `has_rows`. smooth: whether the
    variant is twice differentiable everywhere. least: a lower bound of the weights. weights: the
    error analysis of a variant without a pairwise or linear form. expensive: whether a call costs
    so much that larger tests are slow.
    """

    paper: Paper
    rejects: dict[str, str]
    shares: bool = field(default=False, kw_only=True)
    params: dict[str, Any] = field(default_factory=dict)
    learned: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_token: bool = False
    settings: tuple[dict[str, Any], ...] = ()
    row: Callable[[Tensor, dict[str, Any]], Tensor] | None = None
    smooth: bool = True
    least: float = 0.0
    weights: Any = None
    expensive: bool = False


NO_LINEAR = {"linear": "no linear form"}
NO_PAIRWISE = {"sdpa": "no pairwise form", "flash": "no pairwise form"}
NOT_SOFTMAX = {"sdpa": "supports only softmax with an optional gain per query"}

# What a variant rejects if it is a softmax with a gain, another pairwise form, one that selects
# keys, a linear form, or a definition without forms.
SOFTMAX = NO_LINEAR
PAIRWISE = NOT_SOFTMAX | NO_LINEAR
SELECTION = PAIRWISE | {"decode": "does not support a selection of keys"}
LINEAR = NO_PAIRWISE
DEFINITION = NO_PAIRWISE | NO_LINEAR

CASES = {
    "softmax": Case(
        Paper((0.0, math.log(2), math.log(5)), (1 / 8, 2 / 8, 5 / 8)),
        SOFTMAX,
        row=lambda z, p: z.softmax(-1),
    ),
    "ssmax": Case(
        Paper((1.0, 2.0), (1 / 3, 2 / 3), {"s": 1.0}, "weights ∝ n^z with n = 2"),
        SOFTMAX,
        learned={"s": (0.2, 0.6), "b": (-0.3, 0.3)},
        per_token=True,
        settings=({"s": 0.43, "b": 0.5},),
        row=lambda z, p: ((p.get("s", 0.168) * log_n(z) + p.get("b", 0.0)) * z).softmax(-1),
    ),
    "log_n": Case(
        Paper(
            (0.0, 0.0, 0.0, math.log(3) / 2),
            (1 / 6, 1 / 6, 1 / 6, 3 / 6),
            {"train_length": 2},
            "log 4 / log 2 doubles the scores",
        ),
        SOFTMAX,
        settings=({"train_length": math.e}, {"train_length": 4, "clip": True}),
        row=log_n_row,
    ),
    "position_temperature": Case(
        Paper(
            (0.0, 0.0, math.log(3) / 2),
            (1 / 5, 1 / 5, 3 / 5),
            {"beta": 1 / math.log(4), "train_length": 1},
            "at the third position the gain is 1 + log 4 / log 4",
        ),
        SOFTMAX,
        params={"train_length": 1},
        learned={"beta": (0.1, 0.5)},
        settings=({"train_length": 3, "one_based": False},),
    ),
    "adaptive_temperature": Case(
        # One of 100 keys has weight ½: H = log 2 + ½ log 99 = 2.9907. The polynomial at this H is
        # β = 2.2487, computed by hand. The key's new weight is 1/(1 + 99^(1 − β)).
        Paper((0.0,) * 99 + (math.log(99),), (), {}, "see test_papers", 0.0),
        SOFTMAX,
        settings=({"differentiable": True},),
        row=adaptive_row,
    ),
    "sigmoid": Case(
        Paper((math.log(2), math.log(6)), (1 / 2, 3 / 4), {}, "σ(log 1), σ(log 3): b = −log 2"),
        PAIRWISE,
        learned={"bias": (-3.0, -1.0)},
        settings=({"bias": -1.5},),
        row=lambda z, p: 1 / (1 + torch.exp(-(z + p.get("bias", -log_n(z))))),
    ),
    "cosformer": Case(
        Paper(
            (2.0, -5.0, 1.0),
            (1 / 2, 0.0, 1 / 2),
            {"max_length": 3},
            "cos 60° = ½ for the first key; ReLU makes the negative score 0",
        ),
        LINEAR,
        settings=({"max_length": 1000}, {"max_length": 1000, "features": "elu"}),
    ),
    "taylor": Case(
        Paper((0.0, 2.0, -2.0), (1 / 7, 5 / 7, 1 / 7), {}, "1 + z + z²/2"),
        NOT_SOFTMAX,
        settings=({"order": 4},),
        row=taylor_row,
    ),
    "sparsemax": Case(
        Paper((1.0, 0.5, -1.0), (0.75, 0.25, 0.0), {}, "τ = (1 + ½ − 1)/2 from the first two"),
        PAIRWISE,
        smooth=False,
        row=lambda z, p: bisected(z, 2.0),
    ),
    "entmax": Case(
        # With x = ½ and x' = 0, (x − τ)² + (x' − τ)² = 1 has the solution τ = (1 − √7)/4.
        Paper(
            (1.0, 0.0),
            ((1 + math.sqrt(7)) ** 2 / 16, (math.sqrt(7) - 1) ** 2 / 16),
            {"alpha": 1.5},
        ),
        PAIRWISE,
        learned={"alpha": (1.2, 1.9)},
        settings=({"alpha": 2.0},),
        smooth=False,
        row=lambda z, p: bisected(z, p.get("alpha", 1.5)),
    ),
    "asentmax": Case(
        # The gain is δ + β (log 2)^γ = 0 + 2 / (log 2)² · (log 2)² = 2. The scores are those of the
        # entmax example divided by 2, so the weights are the same.
        Paper(
            (0.5, 0.0),
            ((1 + math.sqrt(7)) ** 2 / 16, (math.sqrt(7) - 1) ** 2 / 16),
            {"beta": 2 / math.log(2) ** 2, "gamma": 2.0, "delta": 0.0},
        ),
        PAIRWISE,
        learned={"beta": (0.3, 0.9), "gamma": (-0.8, 0.8), "delta": (0.7, 1.2), "scaled": (0.2, 1)},
        per_token=True,
        settings=(
            {"beta": 0.5, "gamma": 2.0, "delta": 0.5},
            {"beta": 0.5, "gamma": 1.0, "extra": 1, "scaled": 0.25},
        ),
        smooth=False,
        row=asentmax_row,
    ),
    "sink": Case(
        Paper((0.0, math.log(3)), (1 / 6, 3 / 6), {"b": math.log(2)}, "1, 3 over e^b + 1 + 3"),
        NO_LINEAR | {"sdpa": "does not support a sink"},
        learned={"b": (-1.0, 1.0)},
        per_token=True,
        settings=({"b": 2.5},),
        row=lambda z, p: z.exp() / (math.exp(p.get("b", 0.0)) + z.exp().sum()),
    ),
    "softpick": Case(
        Paper(
            (math.log(3), -math.log(2), 0.0), (0.8, 0.0, 0.0), {}, "e^z − 1 is 2, −½ and 0: 2/2.5"
        ),
        PAIRWISE,
        settings=({"eps": 0.25},),
        smooth=False,
        row=lambda z, p: z.expm1().relu() / (z.expm1().abs().sum() + p.get("eps", 1e-8)),
    ),
    "scale_invariant": Case(
        Paper((0.0, 0.0, 0.0), (4 / 49, 9 / 49, 36 / 49), {"tau": 1.0}, "weights ∝ 1 / (1 + t)²"),
        NO_LINEAR | {"sdpa": "does not support distance"},
        learned={"tau": (2.0, 20.0)},
        settings=({"tau": 0.5},),
    ),
    "forgetting": Case(
        Paper(
            (0.0, 0.0, 0.0),
            (1 / 7, 2 / 7, 4 / 7),
            {"log_gates": -math.log(2)},
            "each later token halves the weight",
        ),
        NO_LINEAR | {"sdpa": "does not support key_bias, offset"},
        learned={"log_gates": (-0.3, -0.02)},
        settings=({"log_gates": -0.5},),
    ),
    "stick_breaking": Case(
        Paper(
            (0.0, 0.0, 5.0),
            (1 / 4, 1 / 2, 0.0),
            {},
            "the last key is the query's own; the one before takes ½, the first ½ of the rest",
        ),
        DEFINITION,
        shares=True,
        weights=StickBreakingWeights,
    ),
    "top_p": Case(
        Paper(
            (0.0, math.log(3), 0.0),
            (1 / 4, 3 / 4, 0.0),
            {"p": 0.7},
            "softmax is ⅕, ⅗, ⅕; ⅗ + ⅕ exceeds 0.7",
        ),
        SELECTION,
        params={"p": 0.877},  # which no sum of up to 999 equal weights is
        settings=({"p": 0.3}, {"p": 1.0}),
        smooth=False,
        row=top_p_row,
    ),
    "perturb_max": Case(
        Paper(
            (0.0, math.sqrt(2)),
            (0.158655, 0.841345),
            {},
            "the difference of two noises is normal with variance 2, and Φ(1) = 0.841345",
        ),
        DEFINITION,
        settings=({"noise": "gumbel", "std": 0.7}, {"std": 0.5}),
        row=perturbed_row,
        weights=PerturbMaxWeights,
        expensive=True,
    ),
    "noisy": Case(
        Paper((0.0, math.log(3)), (1 / 4, 3 / 4), {"std": 0.0}, "softmax without noise"),
        SOFTMAX,
        params={"std": 0.0},
        row=lambda z, p: z.softmax(-1),
    ),
    "elu": Case(
        Paper((0.0, 1.0, -math.log(2)), (2 / 7, 4 / 7, 1 / 7), {}, "ψ is 1, 2 and ½"),
        LINEAR,
        smooth=False,
    ),
    "hedgehog": Case(
        Paper((), (), {}, "features are constant with D = 1; see test_hedgehog"),
        LINEAR,
    ),
    "relu": Case(
        Paper((1.0, 2.0, -1.0), (1 / 3, 2 / 3, 0.0), {}, "ReLU(z) / 3"),
        PAIRWISE,
        learned={"power": (1.2, 2.5)},
        settings=({"power": 2.0},),
        smooth=False,
        row=lambda z, p: z.relu() ** p.get("power", 1.0) / max(len(z), 1),
    ),
    "relu2": Case(
        Paper((1.0, 2.0, -1.0), (1 / 5, 4 / 5, 0.0), {}, "ReLU(z)²: 1, 4, 0"),
        PAIRWISE,
        smooth=False,
        row=lambda z, p: z.relu() ** 2 / (z.relu() ** 2).sum().clamp(min=1e-300),
    ),
    "silu": Case(
        Paper(
            (math.log(3), 0.0, -math.log(3)),
            (math.log(3) / 4, 0.0, -math.log(3) / 12),
            {},
            "z·σ(z) / 3 with σ = ¾, ½ and ¼",
        ),
        PAIRWISE,
        settings=({"length": 5},),
        least=-0.2785,  # the minimum of z·σ(z)
        row=lambda z, p: z / (1 + (-z).exp()) / p.get("length", max(len(z), 1)),
    ),
    "lssa": Case(
        Paper(
            (0.0, math.log(3) / math.log(2)),
            (1 / 3, 2 / 3),
            {},
            "log(1 + 1) and log(1 + 3): the gain is log 2",
        ),
        PAIRWISE,
        settings=({"eps": 0.25},),
        row=lssa_row,
    ),
    "screening": Case(
        Paper((1.0, 0.75, 0.25), (1.0, 1 / 4, 0.0), {}, "1 − 2·(1 − z) is 1, ½ and −½"),
        PAIRWISE,
        learned={"r": (1.2, 3.0)},
        settings=({"r": 1.0},),
        smooth=False,
        row=lambda z, p: (1 - p.get("r", 2.0) * (1 - z)).relu() ** 2,
    ),
    "topk": Case(
        Paper(
            (0.0, math.log(3), 0.0, -1.0),
            (1 / 4, 3 / 4, 0.0, 0.0),
            {"top_k": 2},
            "two keys have score 0; the first is kept",
        ),
        SELECTION,
        params={"top_k": 5},  # many tests have fewer keys than the example's top_k
        settings=({"top_k": 1}, {"top_k": 100}),
        smooth=False,
        row=lambda z, p: top_k_softmax(z, int(p["top_k"])),
    ),
}

ALL_VARIANTS = attnzoo.list_variants()


def params_of(variant: str, length: int = 256) -> dict[str, Any]:
    """The variant's required parameters for calls with up to ``length`` keys, by name."""
    definition = attnzoo.get_variant(variant)
    required = [param.name for param in definition.params if param.default is attnzoo.REQUIRED]
    example = definition.example(length) if definition.example and required else {}
    case_params = CASES[variant].params if variant in CASES else {}
    return {**{name: example[name] for name in required}, **case_params}


def unprojected(variant: str, length: int = 256) -> dict[str, Any]:
    """The parameters of `params_of` that layers do not make from the hidden states."""
    specs = {param.name: param for param in attnzoo.get_variant(variant).params}
    return {n: x for n, x in params_of(variant, length).items() if specs[n].projection is None}


def has_rows(variant: str) -> bool:
    """Whether weights are a function of given scores of a row."""
    definition = attnzoo.get_variant(variant)
    return definition.has_logits and not definition.by_position


def unsupported(variant: str, **options: Any) -> str | None:
    """The reason why the variant does not support these options; None if it does."""
    q, k, v = torch.zeros(3, 1, 2, 4, 4).unbind()
    return attnzoo.explain(q, k, v, variant, **{**params_of(variant), **options}).reason


# Variants that support causal calls only. `VARIANTS`, which most tests use, are the others.
CAUSAL_ONLY = tuple(v for v in ALL_VARIANTS if unsupported(v) is not None)
VARIANTS = [v for v in ALL_VARIANTS if v not in CAUSAL_ONLY]


def mark_expensive(variants: Iterable[str]) -> list[Any]:
    """Test parameters for larger tests, with the mark slow for expensive variants."""
    return [pytest.param(v, marks=pytest.mark.slow) if CASES[v].expensive else v for v in variants]


MARKED = mark_expensive(VARIANTS)
# Variants with a pairwise or a linear form. The others are computed by their definition everywhere.
WITH_FORMS = [v for v in VARIANTS if CASES[v].rejects != DEFINITION]

# Variants without support for return_lse (NO_LSE), a float mask (NO_SCORE), scale < 0 (ONE_SIGN)
NO_LSE = tuple(v for v in ALL_VARIANTS if attnzoo.get_variant(v).scores is None)
NO_SCORE = tuple(v for v in VARIANTS if unsupported(v, attn_mask=torch.zeros(4, 4)) is not None)
ONE_SIGN = tuple(v for v in VARIANTS if unsupported(v, scale=-1.0) is not None)
NO_LOGITS = tuple(v for v in VARIANTS if unsupported(v, softcap=2.0) is not None)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def learned(
    variant: str, heads: int, seed: int = 0, token_shape: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Random fp32 parameters in the case's ranges: (H,), or (B, H, Nq) with token_shape (B, Nq)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (heads,) if token_shape is None else (token_shape[0], heads, token_shape[1])
    return {
        name: low + (high - low) * torch.rand(shape, generator=generator)
        for name, (low, high) in CASES[variant].learned.items()
    }
