"""topk: softmax over the top_k largest scores of each row.

Formula:
    w_ij = exp(z_ij) / Σ_{l in K_i} exp(z_il) for j in K_i, else 0
    K_i = the top_k visible keys of query i with the largest scores

Effect: At most top_k keys of a row have a nonzero weight, and only those get a gradient. The
largest score has a weight of at least 1/top_k at any n.

Source: Sun et al. 2021 (Sparse-softmax), arXiv:2112.12433.

Notes: Keys are ordered by (score descending, index ascending), so among equal scores the lowest
indices are kept. A row with fewer than top_k visible keys keeps all of them.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def scores(q: Tensor, k: Tensor, call: Call, top_k: int) -> Tensor:
    s = call.scores(q, k) + call.bias
    with torch.no_grad():
        order = call.hide(s).sort(stable=True, dim=-1, descending=True).indices
        later = torch.arange(call.keys, device=s.device) >= top_k
        dropped = torch.empty_like(s, dtype=torch.bool).scatter(-1, order, later.expand_as(s))
        # Hidden keys are not dropped, because a row without visible keys would then be all −∞.
        dropped = call.zero_hidden(dropped)
    return s.masked_fill(dropped, float("-inf"))


def forms(call: Call, top_k: int) -> tuple[Form, ...]:
    return (Pairwise(EXP, "select", keep=top_k),)


VARIANT = Variant(
    name="topk",
    formula="softmax over the k largest z",
    use="Limit each query to top_k keys; all other weights are exactly 0.",
    paper="Sun et al. 2021, arXiv:2112.12433",
    aliases=("sparse softmax", "top-k attention"),
    params=(
        Param(
            "top_k",
            kind="int",
            doc="number of keys that each query keeps",
            check=lambda x: x >= 1,
            allowed="an int of at least 1",
        ),
    ),
    forms=forms,
    scores=scores,
    example=lambda length: {"top_k": 8},
)
