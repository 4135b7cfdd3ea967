"""asentmax: w_i = entmax_1.5((δ + β (log n_i)^γ) · z_i).

Vasylenko et al. 2025, arXiv:2506.16640. β and γ may be a number per head, (H,), or per head and
token, (B, H, Nq), as in the paper: β = softplus(W_β x), γ = 2 tanh(W_γ x).

Initial values: β = log 2 and γ = 0, what the paper's projections give at W = 0.

Differs: rows with n_i ≤ 1 have gain δ, with no gradient to β and γ; learned per head, β and γ are
plain numbers, without softplus and tanh.
"""

import math

import torch
from torch import Tensor

from attnzoo.core.activations import ENTMAX15
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, PerQuery, Variant
from attnzoo.variants.entmax import project15


def gain(log_n: Tensor, beta: PerQuery, gamma: PerQuery, delta: PerQuery) -> Tensor:
    many = log_n > 0  # n > 1
    # (log 1)^γ is 0, 1 or infinite: such rows get the base 1 and no share of the term.
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
    paper="Vasylenko et al. 2025, arXiv:2506.16640",
    weights=weights,
    params=(
        Param("beta", math.log(2), doc="β", init=math.log(2), per_token=True),
        Param("gamma", 0.0, doc="γ", init=0.0, per_token=True),
        Param("delta", 1.0, doc="δ, the constant part of the gain", per_token=True),
    ),
    forms=forms,
)
