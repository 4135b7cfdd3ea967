"""taylor: the exponential of softmax replaced by its Taylor series of even order.

Formula:
    w_ij = T(z_ij) / Σ_j T(z_ij),  T(z) = Σ_{p ≤ order} z^p / p!
    order 2: T(z) = 1 + z + z²/2 ≥ ½

Effect: Weights are positive and grow like z^order for large |z|, also for negative z. With order 2
they fall as z falls to −1 and rise again below it. As n grows, a key with logit z among n − 1 keys
with logit 0 has weight T(z)/(T(z) + n − 1), which tends to 0.

Initial values: order = 2, the only order with a linear form.

Source: Arora et al. 2024 (Based), arXiv:2402.18668, which uses order 2 with a feature dimension of
16.

Differences: The logits use the argument ``scale``, D^-½ by default. The linear form uses
ψ(x) = [1, x, x_a²/√2, x_a x_b (a < b)] with 1 + D + D(D+1)/2 features: 153 at D = 16, where the
full outer product has 273.

Notes: Features can be negative, so the terms of ψ(q)·ψ(k) cancel for nearly orthogonal q and k. Let
B be the largest scale·|q||k|. The fp32 error of the linear form is up to about
1e-7 · (1 + B + B²/2) / mean T(z), that of the pairwise form about 1e-7 · B. For normalized q and k
(|x|² = D, B = √D) this is negligible. At B = 1000 the error of the linear form was 6e-3, at B = 10⁴
no digit was correct. `attention` therefore sums features in fp64 on a CPU. The GPU kernels, and the
states of `linear_attention` and of caches, use fp32: normalize q and k there, or pass
``backend="flash"`` or ``backend="tiled"``.
"""

from math import factorial

import torch
from torch import Tensor

from attnzoo.core.activations import TAYLOR
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear, NoForm, Pairwise
from attnzoo.core.variant import Param, Variant


def unsupported(call: Call, order: int) -> str | None:
    if call.has_bias:
        return (
            "taylor supports no bias of the scores, because a score of −∞ would get a positive "
            "weight: attn_mask must be bool (True = attend), alibi None and relative_bias None"
        )
    return None


def weights(q: Tensor, k: Tensor, call: Call, order: int) -> Tensor:
    z = call.scores(q, k)
    series = torch.ones_like(z)
    for p in range(1, order + 1):
        series = series + z**p / float(factorial(p))
    return call.normalized(series)


def features(x: Tensor, positions: Tensor) -> Tensor:
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], offset=1, device=x.device)
    one = torch.ones_like(x[..., :1])
    return torch.cat([one, x, x * x * 0.5**0.5, x[..., a] * x[..., b]], dim=-1)


def forms(call: Call, order: int) -> tuple[Form, ...]:
    pairwise = Pairwise(TAYLOR[order], "sum")
    if order != 2:
        return pairwise, NoForm("linear", "only order 2 has a linear form")
    return pairwise, Linear(features, size=lambda d: 1 + d + d * (d + 1) // 2, cancels=True)


VARIANT = Variant(
    name="taylor",
    formula="(1 + z + z²/2) / Σ",
    use=(
        "Use for constant cost per decoded token at small head dimensions. "
        "It is less sharp than softmax."
    ),
    paper="Arora et al. 2024 (Based), arXiv:2402.18668",
    aliases=("based", "taylor softmax"),
    weights=weights,
    params=(
        Param(
            "order",
            2,
            kind="int",
            doc="highest power of the Taylor series; 2 has a linear form",
            check=lambda x: x in TAYLOR,
            allowed="an even int from 2 to 170",
        ),
    ),
    forms=forms,
    unsupported=unsupported,
    has_state=lambda order: order == 2,
)
