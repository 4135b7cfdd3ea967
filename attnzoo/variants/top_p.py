"""top_p: softmax over the smallest set of keys whose softmax weights reach p.

Formula:
    w_ij = exp(z_ij) / Σ_{l in P_i} exp(z_il) for j in P_i, else 0
    P_i = the shortest prefix of the keys, ordered by softmax weight, with a weight of at least p

Effect: A row keeps few keys if its softmax is sharp and many if it is flat. Only these get a
gradient. A weight grows by the factor 1/p at most. p = 1 is exactly softmax, on every
backend.

Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751, applied to attention weights.

Notes: Keys are ordered by (score descending, index ascending), so among equal scores the lowest
indices are kept. A key is kept if the weights before it sum to less than p. This sum is rounded, so
a key at the border of the set may be kept by one backend and dropped by another.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def scores(q: Tensor, k: Tensor, call: Call, p: float) -> Tensor:
    s = call.scores(q, k) + call.bias
    if p == 1:
        return s
    with torch.no_grad():
        ordered, order = call.hide(s).sort(stable=True, dim=-1, descending=True)
        weights = ordered.softmax(-1)
        before = torch.nn.functional.pad(weights.cumsum(-1), (1, 0))[..., :-1]
        over = before >= p
        over[..., :1] = False  # the first key stays, also if p is 0 in the dtype
        dropped = torch.zeros_like(s, dtype=torch.bool).scatter(-1, order, over)
        # Hidden keys are not dropped, because a row without visible keys would then be all −∞.
        dropped = call.zero_hidden(dropped)
    return s.masked_fill(dropped, float("-inf"))


def forms(call: Call, p: float) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum") if p == 1 else Pairwise(EXP, "select", mass=p),)


VARIANT = Variant(
    name="top_p",
    formula="softmax over the largest z with total weight p",
    use="Give each query as many keys as hold the share p of its softmax weight.",
    paper="Holtzman et al. 2020, arXiv:1904.09751 (nucleus)",
    aliases=("nucleus", "nucleus sampling"),
    params=(
        Param(
            "p",
            kind="float",
            doc="softmax weight that the kept keys reach",
            check=lambda x: 0 < x <= 1,
            allowed="above 0 and at most 1",
        ),
    ),
    forms=forms,
    scores=scores,
    example=lambda length: {"p": 0.9},
)
