"""softpick: rectified softmax, whose weights may be 0 and whose rows need not sum to 1.

Formula:
    w_ij = ReLU(exp(z_ij) − 1) / (Σ_j |exp(z_ij) − 1| + eps)

Effect: Keys with a negative logit have weight 0 but count in the normalizer, so a query whose
logits are all negative attends to nothing. No key is needed as a sink. As n grows, keys with logits
near 0 add little to the normalizer, and keys with large negative logits add up to 1 each.

Initial values: eps = 1e-8.

Source: Zuhri et al. 2025, arXiv:2504.20966, eq. 3.

Notes: At a logit of 0, where ReLU and the absolute value have no slope, the gradient is 0. Backends
compute both functions relative to M = max(0, row maximum): they divide numerator and normalizer by
exp(M), so eps is multiplied by exp(−M).
"""

import torch
from torch import Tensor

from attnzoo.core.activations import SOFTPICK
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, eps: float) -> Tensor:
    s = call.zero_hidden(call.scores(q, k) + call.bias)  # a score of 0 has weight 0
    if call.keys == 0:
        return s
    # exp(s − M) · (1 − exp(−s)) for s > 0 and exp(−M) · (exp(s) − 1) below: neither overflows.
    most = s.amax(-1, keepdim=True).clamp(min=0).detach()
    above, below = s.masked_fill(s <= 0, 0.0), s.masked_fill(s >= 0, 0.0)
    up = (above - most).exp() * -(-above).expm1()
    # The slope of expm1 is computed as expm1(s) + 1, which loses all digits for s << 0.
    down = (-most).exp() * torch.where(below > -1, -below.expm1(), 1 - below.exp())
    total = (up + down).sum(-1, keepdim=True) + eps * (-most).exp()
    return up / total.masked_fill(total == 0, 1.0)


def forms(call: Call, eps: float) -> tuple[Form, ...]:
    return (Pairwise(SOFTPICK, "sum", eps=eps),)


VARIANT = Variant(
    name="softpick",
    formula="ReLU(e^z − 1) / (Σ|e^z − 1| + ε)",
    use="Use for weights that can be 0 without a sink. Train from scratch.",
    paper="Zuhri et al. 2025, arXiv:2504.20966",
    aliases=("rectified softmax",),
    weights=weights,
    params=(
        Param(
            "eps",
            1e-8,
            kind="float",
            doc="added to the normalizer",
            check=lambda x: x >= 0,
            allowed="finite and at least 0",
        ),
    ),
    forms=forms,
    normalized=False,
)
