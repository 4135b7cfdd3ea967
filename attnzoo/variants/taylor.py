"""taylor: w_ij = T(z_ij) / Σ_j T(z_ij), T(z) = Σ_{p ≤ order} z^p / p!, the Taylor series of exp.

Order 2: 1 + z + z²/2 ≥ ½, and linear in N through ψ(x) = [1, x, x_a²/√2, x_a x_b (a < b)], of size
1 + D + D(D+1)/2; used with small feature dims (16) by Based, Arora et al. 2024, arXiv:2402.18668.
An odd order is not positive and is refused. No shift of the scores is possible, none is needed.

The features have either sign, and for orthogonal q and k they cancel: with B the largest
scale·|q||k|, the linear form in fp32 errs by up to about 1e-7 · (1 + B + B²/2) / mean T(z), the
pairwise form by about 1e-7 · B. With q and k normalized (|x|² = D, so B = √D) that is nothing; at
B = 1000 it was 6e-3, at 10⁴ no digit is left. `attention` therefore sums these features in fp64 on
a CPU. The GPU kernels and the states of `linear_attention` and of caches are fp32: normalize q and
k there, or name ``backend="flash"`` or "tiled".

Differs: scale is that of the call, D^-½ by default; the features hold each product once (153 at
D = 16, where the full outer product has 273).
"""

from math import factorial

import torch
from torch import Tensor

from attnzoo.core.activations import TAYLOR
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear, NoForm, Pairwise, Param, Variant


def unsupported(call: Call, order: int) -> str | None:
    if call.has_bias:
        return (
            "taylor's weight does not vanish at −∞, so attn_mask must be bool (True = attend) "
            "and alibi None"
        )
    return None


def weights(q: Tensor, k: Tensor, call: Call, order: int) -> Tensor:
    z = call.scores(q, k)
    series = torch.ones_like(z)
    for p in range(1, order + 1):
        series = series + z**p / float(factorial(p))
    series = call.zero_hidden(series)
    total = series.sum(-1, keepdim=True)
    return series / total.masked_fill(total == 0, 1.0)


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
    paper="Arora et al. 2024 (Based), arXiv:2402.18668",
    weights=weights,
    params=(
        Param(
            "order",
            2,
            kind="int",
            doc="of the series",
            check=lambda x: x in TAYLOR,
            allowed="an even int from 2 to 170",
        ),
    ),
    forms=forms,
    unsupported=unsupported,
    has_state=lambda order: order == 2,
)
