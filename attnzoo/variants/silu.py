"""silu: pointwise attention with SiLU, as in recommenders (HSTU), without a normalizer.

Formula:
    w_ij = SiLU(z_ij) / n_i,  SiLU(x) = x·σ(x),  n_i = number of keys visible to query i
    with length: w_ij = SiLU(z_ij) / length

Effect: Each weight depends on its own logit and on n only, so the weights of a row do not sum to
1. Keys with logit 0 have weight 0, and keys with a negative logit a negative weight, which is at
least −0.2785/n and tends to 0 far below 0. Large weights grow in proportion to their logits. As n
grows, a key with logit Δ among keys with logit 0 has weight SiLU(Δ)/n, which tends to 0. With a
constant ``length``, its weight does not depend on n.

Initial values: length = None, which divides by n_i.

Source: Zhai et al. 2024, arXiv:2402.17152, eq. 2 (pointwise aggregated attention of HSTU).

Differences: The paper's formula has no factor. Its authors' code divides by the maximal sequence
length N of the batch; ``length=N`` does so. A bias by relative position is the argument
``relative_bias`` of `attnzoo.attention`, a bias by time is a float mask, and a jagged batch is a
call of `attnzoo.varlen_attention`. The norm and the gate behind HSTU's attention are not included.

Notes: Weights can be negative, so `attnzoo.nn.Laser` does not support them.
"""

from torch import Tensor
from torch.nn.functional import silu

from attnzoo.core.activations import SILU
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def factor(call: Call, length: float | None) -> Tensor | float:
    return 1 / call.counts.clamp(min=1) if length is None else 1 / length


def weights(q: Tensor, k: Tensor, call: Call, length: float | None) -> Tensor:
    s = call.scores(q, k) + call.bias
    divided = silu(s) * call.per_query(factor(call, length))[..., None]
    return call.zero_hidden(divided)


def forms(call: Call, length: float | None) -> tuple[Form, ...]:
    return (Pairwise(SILU, "none", offset=0.0, factor=factor(call, length)),)


VARIANT = Variant(
    name="silu",
    formula="SiLU(z) / n",
    use="Use for recommenders as HSTU, and for weights that may be negative. Train from scratch.",
    paper="Zhai et al. 2024, arXiv:2402.17152",
    aliases=("hstu", "pointwise attention"),
    weights=weights,
    params=(
        Param(
            "length",
            None,
            kind="float",
            doc="what weights are divided by; a number, or None for n_i",
            check=lambda x: x >= 1,
            allowed="a number of at least 1",
        ),
    ),
    forms=forms,
    normalized=False,
    signed=True,
)
