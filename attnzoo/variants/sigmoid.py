"""sigmoid: an elementwise sigmoid of every score, without a normalizer.

Formula:
    w_ij = σ(z_ij + b),  b = −log n_i by default, n_i = number of keys visible to query i

Effect: Each weight depends on its own logit and on n only, so the weights of a row do not sum to 1
and adding a constant to all logits changes them. With logits of 0 the weight sum is n/(1 + n). As n
grows, a key with logit Δ among keys with logit 0 has weight 1/(1 + n·e^{−Δ}), which tends to 0.

Initial values: b = −log n_i, which brings the weight sum near 1 at initialization, as in softmax.
The bias of an output layer starts at −log V for V classes: its loss is then near log V + 1, not
V·log 2.

Source: Ramapuram et al. 2024, arXiv:2409.04431.

Differences: The authors ship one constant, b = −log of the training length. Here the default counts
the visible keys of each query; ``bias=-math.log(n)`` gives the constant.

Notes: Do not put it into a trained softmax model: the weights of a query do not sum to 1. Train
with it from scratch.
"""

from math import log

from torch import Tensor

from attnzoo.core.activations import SIGMOID
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, bias: PerQuery | None) -> Tensor:
    bias = -call.log_n[..., None] if bias is None else bias
    s = call.scores(q, k) + call.bias + bias
    return call.zero_hidden(s.sigmoid())


def forms(call: Call, bias: PerQuery | None) -> tuple[Form, ...]:
    offset = call.log_n if bias is None else -call.per_query(bias)
    return (Pairwise(SIGMOID, "none", offset=offset),)


VARIANT = Variant(
    name="sigmoid",
    formula="σ(z + bias), bias = −log n",
    use="Use to let a query attend to no key, or fully to many keys. Train from scratch.",
    paper="Ramapuram et al. 2024, arXiv:2409.04431",
    weights=weights,
    params=(
        Param(
            "bias",
            None,
            doc="added to every score; a number, one per head (H,), or None for −log n_i",
        ),
    ),
    forms=forms,
    output_defaults={"bias": 0.0},
    output_bias=lambda classes: -log(classes),
    normalized=False,
)
