"""adaptive_temperature: w_i = softmax(β(H_i) · z_i), H_i the entropy of softmax(z_i) in nats.

β(H) = max(−0.037 H⁴ + 0.481 H³ − 2.3 H² + 4.917 H − 1.791, 1) where H > 0.5, else 1.
Veličković et al. 2024, arXiv:2410.01104 (the polynomial of their Figure 5). Made for inference and
fitted on one task: β exceeds 1 only for 0.85 < H < 5.95, with a peak of 2.42 at H = 4.41, so
beyond e^5.95 = 384 equally likely keys it does nothing.

By default no gradient flows through β. With ``differentiable=True`` it is exact.

Differs: the entropy is that of the visible keys, float mask and ALiBi included, and has no 1e-9
inside the logarithm.
"""

import torch
from torch import Tensor

from attnzoo.activations import EXP
from attnzoo.call import Call
from attnzoo.forms import Form, FromStatistics, Pairwise, Param, Statistics, Variant

POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)  # highest power first


def beta(entropy: Tensor) -> Tensor:
    value = torch.zeros_like(entropy)
    for coefficient in POLYNOMIAL:
        value = value * entropy + coefficient
    return torch.where(entropy > 0.5, value.clamp(min=1.0), torch.ones_like(entropy))


def scores(q: Tensor, k: Tensor, call: Call, differentiable: bool) -> Tensor:
    z = call.scores(q, k)
    biased = z + call.bias
    p = call.softmax(biased)
    lse = call.logsumexp(biased)
    # H = lse − Σ p z; a row without keys has lse = −inf and needs no temperature.
    entropy = lse.masked_fill(lse == float("-inf"), 0.0) - (p * biased).sum(-1)
    gain = beta(entropy if differentiable else entropy.detach())
    return gain[..., None] * z + call.bias


def weights(q: Tensor, k: Tensor, call: Call, differentiable: bool) -> Tensor:
    return call.softmax(scores(q, k, call, differentiable))


def forms(call: Call, differentiable: bool) -> tuple[Form, ...]:
    def gain(statistics: Statistics) -> Tensor:
        return beta(statistics.entropy)

    return (Pairwise(EXP, "sum", gain=FromStatistics(gain, differentiable)),)


VARIANT = Variant(
    name="adaptive_temperature",
    formula="softmax(β(H)·z), H = entropy of softmax(z)",
    paper="Veličković et al. 2024, arXiv:2410.01104",
    weights=weights,
    params=(Param("differentiable", False, kind="bool", doc="let gradients flow through β"),),
    forms=forms,
    scores=scores,
)
