"""asentmax: entmax with α = 1.5 and a gain that can grow with the logarithm of the number of keys.

Formula:
    w_i = entmax_1.5((δ + β (log n_i)^γ) · z_i),  n_i = number of keys visible to query i

Effect: Keys whose logit is 2/gain or more below the largest have weight exactly 0, and a key that
leads all others by that much has weight 1. With γ > 0 the gain grows with n, so a smaller lead is
enough; at the initial γ = 0 the gain is δ + β for every n > 1.

Initial values: β = log 2 and γ = 0, which the paper's projections give at W = 0. δ = 1 and is not
learned by default.

Source: Vasylenko et al. 2025, arXiv:2506.16640.

Differences: Rows with n_i ≤ 1 have gain δ, and β and γ get no gradient from them. In the paper
β = softplus(W_β x) and γ = 2 tanh(W_γ x) for every token; pass such tensors (B, H, Nq), or learn
one plain number per head, without softplus and tanh.
"""

import math

import torch
from torch import Tensor

from attnzoo.core.activations import ENTMAX15
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant
from attnzoo.variants.entmax import project15


def gain(log_n: Tensor, beta: PerQuery, gamma: PerQuery, delta: PerQuery) -> Tensor:
    many = log_n > 0  # n > 1
    # (log 1)^γ is 0, 1 or infinite, depending on γ. Rows with n = 1 therefore omit β (log n)^γ.
    power = torch.where(many, log_n, torch.ones_like(log_n)) ** gamma
    return delta + torch.where(many, beta * power, torch.zeros_like(power))


def weights(
    q: Tensor, k: Tensor, call: Call, beta: PerQuery, gamma: PerQuery, delta: PerQuery
) -> Tensor:
    s = gain(call.log_n[..., None], beta, gamma, delta) * call.scores(q, k) + call.bias
    return project15(s, call)


def forms(call: Call, beta: PerQuery, gamma: PerQuery, delta: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(ENTMAX15, "threshold", gain=gain(call.log_n, beta, gamma, delta)),)


VARIANT = Variant(
    name="asentmax",
    formula="entmax_1.5((δ + β(log n)^γ)·z)",
    use="Train from scratch. Weights can be exactly 0. The gain is learned and can grow with n.",
    paper="Vasylenko et al. 2025, arXiv:2506.16640",
    weights=weights,
    params=(
        Param(
            "beta",
            math.log(2),
            doc="β, factor of (log n)^γ; a number, one per head (H,), or (B, H, Nq)",
            init=math.log(2),
            per_token=True,
        ),
        Param(
            "gamma",
            0.0,
            doc="γ, exponent of log n; a number, one per head (H,), or (B, H, Nq)",
            init=0.0,
            per_token=True,
        ),
        Param(
            "delta",
            1.0,
            doc="δ, constant part of the gain; a number, one per head (H,), or (B, H, Nq)",
            per_token=True,
        ),
    ),
    forms=forms,
)
