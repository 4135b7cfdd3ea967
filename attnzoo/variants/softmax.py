"""softmax: w_ij = exp(z_ij) / Σ_j exp(z_ij), z = scale · q·k.

The baseline (Vaswani et al. 2017, arXiv:1706.03762, eq. 1). With logits in [m, M] and n keys every
weight lies within e^{±(M−m)}/n, so no key keeps its weight as n grows.
"""

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Variant


def scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    return call.scores(q, k) + call.bias


def weights(q: Tensor, k: Tensor, call: Call) -> Tensor:
    return call.softmax(scores(q, k, call))


def forms(call: Call) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum"),)


VARIANT = Variant(
    name="softmax",
    formula="softmax(z)",
    paper="Vaswani et al. 2017, arXiv:1706.03762",
    weights=weights,
    forms=forms,
    scores=scores,
    identity={},
)
