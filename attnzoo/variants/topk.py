"""topk: softmax over the top_k largest scores of each row, 0 elsewhere.

Sparse Softmax (Su; Zhao et al. 2021, arXiv:2112.12433). Keys are ordered by (score descending,
index ascending), so ties at the k-th keep the lowest indices; only visible keys compete, and all
are kept where there are fewer than k. No gradient reaches a key that is not kept.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, Variant


def scores(q: Tensor, k: Tensor, call: Call, top_k: int) -> Tensor:
    s = call.scores(q, k) + call.bias
    with torch.no_grad():
        order = call.hide(s).sort(stable=True, dim=-1, descending=True).indices[..., :top_k]
        dropped = torch.ones_like(s, dtype=torch.bool).scatter(-1, order, False)
        # An empty row keeps its scores: its weights are zeroed by the softmax over visible keys.
        dropped = call.zero_hidden(dropped)
    return s.masked_fill(dropped, float("-inf"))


def weights(q: Tensor, k: Tensor, call: Call, top_k: int) -> Tensor:
    return call.softmax(scores(q, k, call, top_k))


def forms(call: Call, top_k: int) -> tuple[Form, ...]:
    return (Pairwise(EXP, "select", keep=top_k),)


VARIANT = Variant(
    name="topk",
    formula="softmax over the k largest z",
    paper="Zhao et al. 2021, arXiv:2112.12433",
    weights=weights,
    params=(
        Param(
            "top_k",
            kind="int",
            doc="keys kept per row",
            check=lambda x: x >= 1,
            allowed="an int of at least 1",
        ),
    ),
    forms=forms,
    scores=scores,
    example=lambda length: {"top_k": 8},
)
