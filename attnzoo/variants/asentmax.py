"""asentmax: entmax with α = 1.5 and a gain that can grow with the logarithm of the number of keys.

Formula:
    w_i = entmax_1.5(g_i · z_i),  g_i = c·(δ + β (log(n_i + extra))^γ) + 1 − c
    n_i = number of keys visible to query i, c = scaled

Effect: Keys whose logit is 2/gain or more below the largest have weight exactly 0, and a key that
leads all others by that much has weight 1. With γ > 0 the gain grows with n, so a smaller lead is
enough; at the initial γ = 0 the gain is δ + β for every n > 1.

Initial values: β = log 2 and γ = 0, which the paper's projections give at W = 0. One β and one γ
per head are learned. δ = 1 and is not learned by default. c = 1, so all heads are scaled.

Source: Vasylenko et al. 2025, arXiv:2506.16640.

Differences: Rows with n_i + extra ≤ 1 have gain δ, and β and γ get no gradient from them. In the
paper β = softplus(W_β x + b_β) and γ = 2 tanh(W_γ x + b_γ) for every token. Layers that see the
hidden states do this with ``beta="projected"`` and ``gamma="projected"``; W and b are 0 initially.

Notes: The commands of the authors, github.com/deep-spin/asentmax, use these projections, the
position encoding `nape`, a gain only in the heads without positions, and log(n + 1). For the same,
pass ``extra=1`` and ``scaled`` = 1 in the first half of the heads and 0 in the second. Their option
"learn" has one β and one γ per head, drawn from U(0.1, 1) and N(0, 0.1): pass such tensors (H,).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnzoo.core.activations import ENTMAX15
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Projection, Variant
from attnzoo.variants.entmax import project15


def log_count(call: Call, extra: int) -> Tensor:
    return (call.counts + extra).clamp(min=1).log() if extra else call.log_n


def gain(
    log_n: Tensor, beta: PerQuery, gamma: PerQuery, delta: PerQuery, scaled: PerQuery
) -> Tensor:
    many = log_n > 0  # n > 1
    # (log 1)^γ is 0, 1 or infinite, depending on γ. Rows with n = 1 therefore omit β (log n)^γ.
    power = torch.where(many, log_n, torch.ones_like(log_n)) ** gamma
    grown = delta + torch.where(many, beta * power, torch.zeros_like(power))
    if not isinstance(scaled, Tensor) and scaled == 1:
        return grown
    return scaled * grown + (1 - scaled)


def weights(q: Tensor, k: Tensor, call: Call, extra: int, **params: Any) -> Tensor:
    gains = gain(log_count(call, extra)[..., None], **params)
    return project15(gains * call.scores(q, k) + call.bias, call)


def forms(call: Call, extra: int, **params: Any) -> tuple[Form, ...]:
    gains = gain(log_count(call, extra), **params)
    return (Pairwise(ENTMAX15, "threshold", gain=gains),)


VARIANT = Variant(
    name="asentmax",
    formula="entmax_1.5((δ + β(log n)^γ)·z)",
    use="Train from scratch. Weights can be exactly 0. The gain is learned and can grow with n.",
    paper="Vasylenko et al. 2025, arXiv:2506.16640",
    aliases=("adaptive scalable entmax", "as-entmax"),
    weights=weights,
    params=(
        Param(
            "beta",
            math.log(2),
            doc="β, factor of (log n)^γ; a number, one per head (H,), or (B, H, Nq)",
            init=math.log(2),
            per_token=True,
            projection=Projection(softplus),
        ),
        Param(
            "gamma",
            0.0,
            doc="γ, exponent of log n; a number, one per head (H,), or (B, H, Nq)",
            init=0.0,
            per_token=True,
            projection=Projection(lambda x: 2 * x.tanh()),
        ),
        Param(
            "delta",
            1.0,
            doc="δ, constant part of the gain; a number, one per head (H,), or (B, H, Nq)",
            per_token=True,
        ),
        Param(
            "extra",
            0,
            kind="int",
            doc="added to the number of keys before the logarithm",
            check=lambda x: x >= 0,
            allowed="at least 0",
        ),
        Param(
            "scaled",
            1.0,
            doc="share of the gain, 0 for a gain of 1; a number, one per head (H,), or (B, H, Nq)",
            per_token=True,
        ),
    ),
    forms=forms,
    length_gain=True,
)
