"""lssa: length scaled softplus attention, with a gain that grows with the number of keys.

Formula:
    w_ij = softplus(log n_i · z_ij) / (Σ_j softplus(log n_i · z_ij) + eps)
    softplus(x) = log(1 + e^x),  n_i = number of keys visible to query i

Effect: Weights grow in proportion to large logits, not exponentially, so no logit overflows. As n
grows, a key with logit Δ among keys with logit 0 has, to leading order, weight Δ·log n / (n·log 2)
if Δ > 0, and n^(Δ−1) / log 2 if Δ < 0. Both tend to 0, as do all weights if all logits lie in an
interval of positive numbers. One key whose logit is the largest of negative logits has a weight
that tends to 1, as in ssmax.

Initial values: eps = 1e-30.

Source: Gao & Spratling 2025, arXiv:2501.13428 (LSSA, the first of two stages).

Differences: The paper's logits are log d · cos(q_i, k_j). Pass q and k as unit vectors, and
scale = log d. n_i is counted per query after mask, causality and window. The paper divides by the
sum only; without eps, a row of which all scores are below −100 would be 0/0 in fp32.

Notes: The weights of a row sum to Σ / (Σ + eps), which is below 1 if all scores are below −60. The
second stage of the paper (LSSAR) is not included: ReLU(n_i·w_ij − 1)^p, normalized again. It
compares each weight with the mean of its row, so its shape depends on a sum over the row through
which gradients flow, which no form has.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from attnzoo.core.activations import SOFTPLUS
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, eps: float) -> Tensor:
    s = call.log_n[..., None] * call.scores(q, k) + call.bias
    shares = call.zero_hidden(-logsigmoid(-s))  # torch's softplus is inexact above 20
    total = shares.sum(-1, keepdim=True) + eps
    return shares / total.masked_fill(total == 0, 1.0)


def forms(call: Call, eps: float) -> tuple[Form, ...]:
    return (Pairwise(SOFTPLUS, "sum", gain=call.log_n, eps=eps),)


VARIANT = Variant(
    name="lssa",
    formula="softplus(log n · z) / (Σ + ε)",
    use="Use to study weights that grow linearly with large logits. Train from scratch.",
    paper="Gao & Spratling 2025, arXiv:2501.13428",
    aliases=("length scaled softplus attention", "softplus attention"),
    weights=weights,
    normalized=False,
    params=(
        Param(
            "eps",
            1e-30,
            kind="float",
            doc="added to the normalizer",
            check=lambda x: x >= 0,
            allowed="finite and at least 0",
        ),
    ),
    forms=forms,
    length_gain=True,
)
