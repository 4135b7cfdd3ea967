"""ssmax: Scalable-Softmax, softmax with a gain that grows with the logarithm of the number of keys.

Formula:
    w_i = softmax((s_h · log n_i + b_h) · z_i),  n_i = number of keys visible to query i

Effect: The gain replaces e^z by n^{s·z}. As n grows, a key that leads all others by more than 1/s
tends to weight 1. If its lead is smaller than 1/s and all others are equal, its weight tends to 0.
A row with one visible key has gain b and weight 1.

Initial values: s = 0.168 = 1 / mean(log n) over n = 1 … 1024, so that the gain is 1 on average
(from the paper). b = 0 and is not learned by default: learning it helps training and can hurt
length generalization.

Source: Nakanishi 2025, arXiv:2501.19399.

Differences: n_i is counted per query after mask, causality and window. If all causal rows used the
same n, the gain would be the same in all rows.

Notes: s = 0, b = 1 is exactly softmax, so a trained softmax model can start from there. Mistral
Large 4 (2026) has this gain with s and b learned per head, and log(p_i + 1) of the position p_i as
log n_i. Such a Hugging Face model cannot be converted to ssmax, which would add a second gain. With
one s per token, s may come from a projection of the query, as in QASSMax (TabICLv2, 2026).
"""

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def gain(log_n: Tensor, s: PerQuery, b: PerQuery) -> Tensor:
    return s * log_n + b


def scores(q: Tensor, k: Tensor, call: Call, s: PerQuery, b: PerQuery) -> Tensor:
    return gain(call.log_n[..., None], s, b) * call.scores(q, k) + call.bias


def forms(call: Call, s: PerQuery, b: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=gain(call.log_n, s, b)),)


VARIANT = Variant(
    name="ssmax",
    formula="softmax((s·log n + b)·z)",
    use="Train from scratch for longer contexts. It beat softmax in some tasks here, not in all.",
    paper="Nakanishi 2025, arXiv:2501.19399",
    aliases=("scalable softmax",),
    params=(
        Param(
            "s",
            0.168,
            doc="factor of log n; a number, one per head (H,), or one per token (B, H, Nq)",
            init=0.168,
            per_token=True,
        ),
        Param(
            "b",
            0.0,
            doc="constant part of the gain; a number, one per head (H,), or one per token "
            "(B, H, Nq)",
            per_token=True,
        ),
    ),
    forms=forms,
    scores=scores,
    length_gain=True,
    calibrate=lambda log_n: {"s": 1 / log_n},
    identity={"s": 0.0, "b": 1.0},
)
