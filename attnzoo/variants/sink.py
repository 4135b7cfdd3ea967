"""sink: softmax with one more key per head, which has a learned score and the value 0.

Formula:
    w_ij = exp(z_ij) / (exp(b) + Σ_j exp(z_ij)),  b per head, or per head and query

Effect: The weight sum of a row is σ(lse_i − b), below 1. A row whose logits all lie far below b
puts nearly all of its weight on the sink and has an output near 0. As n grows, weights behave as in
softmax and the sink's share falls.

Initial values: b = 0, which is softmax-off-by-one.

Source: Miller 2023, "Attention is off by one" (b = 0); OpenAI 2025 (gpt-oss), arXiv:2508.10925
(learned b per head).

Notes: The output is that of softmax times σ(lse − b). With b = −100, the fp32 output of a row with
lse > −80 equals that of softmax. The gradient of b is proportional to the sink's weight, so b is
not learned if it starts at −100. At b = −10 the output is nearly that of softmax, and b is learned.
With one b per token, b may come from a projection of the hidden states, as in Inkling 2.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def scores(q: Tensor, k: Tensor, call: Call, b: PerQuery) -> Tensor:
    return call.scores(q, k) + call.bias


def weights(q: Tensor, k: Tensor, call: Call, b: PerQuery) -> Tensor:
    s = call.hide(scores(q, k, call, b))
    extra = call.per_query(b).expand(*s.shape[:-1], 1)
    w = torch.cat([s, extra], dim=-1).softmax(-1)[..., :-1]
    return call.zero_hidden(w)


def forms(call: Call, b: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", sink=b),)


VARIANT = Variant(
    name="sink",
    formula="exp(z) / (e^b + Σ exp(z))",
    use="Use to let a query attend to nothing. Train from scratch, or from softmax with b = −10.",
    paper="Miller 2023; OpenAI 2025 (gpt-oss), arXiv:2508.10925",
    aliases=(
        "attention sink",
        "off by one",
        "softmax1",
        "softmax one",
        "quiet attention",
        "quiet softmax",
        "learned sink",
        "gpt-oss",
    ),
    weights=weights,
    params=(
        Param(
            "b",
            0.0,
            doc="score of the sink; a number, one per head (H,), or one per token (B, H, Nq)",
            init=0.0,
            per_token=True,
            host_sink=True,
        ),
    ),
    forms=forms,
    scores=scores,
    normalized=False,
    identity={"b": -100.0},
)
