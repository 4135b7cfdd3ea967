"""adaptive_temperature: softmax with a gain computed from the entropy of the row.

Formula:
    w_i = softmax(β(H_i) · z_i),  H_i = entropy of softmax(z_i) in nats
    β(H) = max(−0.037 H⁴ + 0.481 H³ − 2.3 H² + 4.917 H − 1.791, 1) if H > 0.5, else 1

Effect: Rows of medium entropy become sharper: β exceeds 1 only for 0.85 < H < 5.945 and is at most
2.42, at H = 4.41. A row with more than e^5.945 = 382 equally likely keys gets plain softmax, so the
variant does not change such rows in long inputs.

Source: Veličković et al. 2024, arXiv:2410.01104, with the polynomial of Figure 5, which the authors
fitted on one task.

Differences: The entropy is taken over the visible keys, after float mask and ALiBi are added. There
is no 1e-9 inside the logarithm.

Notes: The variant is meant for inference-time substitution. By default no gradient flows through β;
with ``differentiable=True`` the gradient is exact.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, Pairwise, Statistics
from attnzoo.core.variant import Param, Variant

POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)  # highest power first
FLOOR = -1e4


def beta(entropy: Tensor) -> Tensor:
    value = torch.zeros_like(entropy)
    for coefficient in POLYNOMIAL:
        value = value * entropy + coefficient
    return torch.where(entropy > 0.5, value.clamp(min=1.0), torch.ones_like(entropy))


def entropy_of(s: Tensor, call: Call) -> Tensor:
    """Entropy of softmax(s) over the visible keys; 0 for a row without visible keys.

    With x = s − max s, Z = Σ e^x and T = Σ x e^x: H = log Z − T/Z. Without subtracting the maximum,
    H would be lost to rounding where all scores are far from 0.
    """
    if call.keys == 0:
        return s.sum(-1)
    x = s - call.hide(s).amax(-1, keepdim=True).detach()
    # e^FLOOR is 0 in fp32 and fp64, so clamped scores add nothing to either sum.
    x = call.hide(x, fill=FLOOR).clamp(min=FLOOR)
    e = x.exp()
    total = e.sum(-1)
    entropy = total.log() - (x * e).sum(-1) / total
    return entropy.masked_fill(~call.visible.any(-1), 0.0)


def scores(q: Tensor, k: Tensor, call: Call, differentiable: bool) -> Tensor:
    z = call.scores(q, k)
    entropy = entropy_of(z + call.bias, call)
    gain = beta(entropy if differentiable else entropy.detach())
    return gain[..., None] * z + call.bias


def forms(call: Call, differentiable: bool) -> tuple[Form, ...]:
    def gain(statistics: Statistics) -> Tensor:
        return beta(statistics.entropy)

    return (Pairwise(EXP, "sum", gain=FromStatistics(gain, differentiable)),)


VARIANT = Variant(
    name="adaptive_temperature",
    formula="softmax(β(H)·z), H = entropy of softmax(z)",
    use=(
        "Use to study inference-time sharpening. "
        "It raised one model's loss by 0.9 to 1.2 nats per token."
    ),
    paper="Veličković et al. 2024, arXiv:2410.01104",
    aliases=("adaptive softmax", "entropy temperature", "polynomial temperature"),
    params=(Param("differentiable", False, kind="bool", doc="whether gradients flow through β"),),
    forms=forms,
    scores=scores,
    inference_only=True,
)
