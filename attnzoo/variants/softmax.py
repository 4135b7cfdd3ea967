"""softmax: the standard exponential normalizer, and the baseline.

Formula:
    w_ij = exp(z_ij) / Σ_j exp(z_ij),  z_ij = scale · q_i·k_j

Effect: Every visible key gets a positive weight. If all logits of a row lie in [m, M], each weight
lies between e^{−(M−m)}/n and e^{M−m}/n, so every weight tends to 0 as n grows.

Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
"""

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Variant


def scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    return call.scores(q, k) + call.bias


def forms(call: Call) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum"),)


VARIANT = Variant(
    name="softmax",
    formula="softmax(z)",
    use="The baseline: compare every other variant with it.",
    paper="Vaswani et al. 2017, arXiv:1706.03762",
    aliases=("scaled dot product", "sdpa", "vanilla"),
    forms=forms,
    scores=scores,
    identity={},
)
