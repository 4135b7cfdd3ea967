"""sink: w_ij = exp(z_ij) / (exp(b_h) + Σ_j exp(z_ij)): one more key, of score b and value 0.

b = 0 is softmax-off-by-one (Miller 2023, "Attention is off by one"); a learned b per head stands in
gpt-oss (OpenAI 2025, arXiv:2508.10925). Equals softmax's output times σ(lse − b).

b = −100 is softmax to the last digit wherever lse is above −80. The gradient of b is the sink's
weight, so from there b does not move: b = −10 is nearly softmax, and learns.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, PerQuery, Variant


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
    paper="Miller 2023; OpenAI 2025 (gpt-oss), arXiv:2508.10925",
    weights=weights,
    params=(Param("b", 0.0, doc="score of the sink", init=0.0),),
    forms=forms,
    scores=scores,
    normalized=False,
    identity={"b": -100.0},
)
