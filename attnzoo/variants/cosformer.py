"""cosformer: linear attention with a cosine weight on the distance.

Formula:
    w_ij = a_ij / Σ_j a_ij,  a_ij = φ(q_i)·φ(k_j) · cos(π/2 · (i − j)/M),  M = max_length
    φ(x) = ReLU(x); with ``features="elu"``: φ(q) = elu(scale·q) + 1, φ(k) = elu(k) + 1

Effect: A weight grows in proportion to the product of the features, not exponentially, and falls
with the distance to the key. A product of 0 gives weight 0. If all n keys have products of similar
size, each weight is of order 1/n.

Source: Qin et al. 2022, arXiv:2202.08791; eq. 10 splits the cosine into a sum of products, which
gives the features ψ(x, i) = [φ(x) cos(πi/2M), φ(x) sin(πi/2M)] and a cost linear in N.

Differences: M is a fixed length and not the length of the current input, so appended tokens do not
change earlier outputs. The denominator is not clamped at 1e-6. The paper has ReLU only. A ReLU
feature that is 0 for all inputs gets no gradient. The features elu + 1, computed as in the variant
``elu``, are always positive.

Notes: With ReLU, every scale > 0 gives the same weights, because they do not change when q_i or all
keys are multiplied by a positive number. A row whose products are all 0 gives output 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear
from attnzoo.core.variant import Param, Variant
from attnzoo.variants.elu import psi

RELU, ELU = "relu", "elu"


def feature_map(features: str) -> Callable[[Tensor], Tensor]:
    return torch.relu if features == RELU else psi


def unsupported(call: Call, max_length: int, features: str) -> str | None:
    if features == RELU and call.scale <= 0:
        return f"cosformer: scale must be above 0, got {call.scale}; or set features='elu'"
    longest = max(
        call.queries, call.query_origin + call.queries, call.keys, call.key_origin + call.keys
    )
    if longest > max_length:
        return f"cosformer: max_length={max_length} is below the length {longest}"
    return None


def weights(q: Tensor, k: Tensor, call: Call, max_length: int, features: str) -> Tensor:
    phi = feature_map(features)
    reweighting = torch.cos(call.distance.to(call.dtype) * (math.pi / 2 / max_length))
    queries, keys = phi(call.scale * q.to(call.dtype)), phi(k.to(call.dtype))
    return call.normalized(call.by_group(queries, keys.mT) * reweighting)


def forms(call: Call, max_length: int, features: str) -> tuple[Form, ...]:
    phi = feature_map(features)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions.to(x.dtype) * (math.pi / 2 / max_length))[:, None]
        x = phi(x)
        return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)

    return (Linear(rotated, size=lambda d: 2 * d),)


VARIANT = Variant(
    name="cosformer",
    formula="ReLU(q)·ReLU(k)·cos(π(i−j)/2M) / Σ",
    use="Use for constant cost per decoded token. It lost to softmax in flip-flop (M = 128, 8192).",
    paper="Qin et al. 2022, arXiv:2202.08791",
    aliases=("cos reweighting",),
    weights=weights,
    normalized=False,
    params=(
        Param(
            "max_length",
            kind="int",
            doc="M in the cosine; at least the length of the longest sequence ever used",
            check=lambda x: x >= 1,
            allowed="an int of at least 1",
        ),
        Param(
            "features",
            RELU,
            kind="str",
            doc="φ: ReLU, or elu + 1",
            check=lambda x: x in (RELU, ELU),
            allowed="'relu' or 'elu'",
        ),
    ),
    forms=forms,
    unsupported=unsupported,
    has_logits=False,
    positional=True,
    has_state=lambda max_length, features: True,
    example=lambda length: {"max_length": length},
)
