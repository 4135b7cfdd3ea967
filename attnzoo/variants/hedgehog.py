"""hedgehog: linear attention with learned feature maps that imitate softmax.

Formula:
    w_ij = a_ij / Σ_j a_ij,  a_ij = ψ(W_q·scale·q_i)·ψ(W_k·k_j)
    ψ(x) = [softmax(x), softmax(−x)], over the D entries of x

Effect: All weights are positive. a_ij is between 0 and 2. A key gets much more weight than others
if its features and those of the query have their large entries at the same places.

Initial values: W_q and W_k are the identity, one matrix per head, and are learned.

Source: Zhang et al. 2024 (Hedgehog), arXiv:2402.04347, Section 4.2.

Differences: The maps have no bias. q is multiplied by the argument ``scale`` before the map, D^-½
by default. The paper has no scale: pass ``scale=1.0``. Entries of a softmax are at least e^−40
times the largest, so that products are not 0 in fp32. The paper first trains the maps
to give the weights of a trained softmax model; here they are trained with the model only.

Notes: ψ is not linear, so RoPE before it does not make weights depend on distances only. x is a
row, so ``query_map`` and ``key_map`` are the transposed matrices: x·map. With fewer heads of keys
than of queries, each query head has its own map of its keys.
"""

import torch
from torch import Tensor

from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear
from attnzoo.core.variant import Param, Variant

LOWEST = -40.0  # e^−80, the smallest product of features before normalization, is normal in fp32


def psi(x: Tensor, matrix: Tensor | None) -> Tensor:
    x = x if matrix is None else x @ matrix
    above = (x - x.amax(-1, keepdim=True)).clamp(min=LOWEST)
    below = (x.amin(-1, keepdim=True) - x).clamp(min=LOWEST)
    return torch.cat([above.softmax(-1), below.softmax(-1)], dim=-1)


def weights(
    q: Tensor, k: Tensor, call: Call, query_map: Tensor | None, key_map: Tensor | None
) -> Tensor:
    keys = k.to(call.dtype).repeat_interleave(call.group, dim=1)
    products = psi(call.scale * q.to(call.dtype), query_map) @ psi(keys, key_map).mT
    return call.normalized(products)


def forms(call: Call, query_map: Tensor | None, key_map: Tensor | None) -> tuple[Form, ...]:
    return (
        Linear(
            lambda x, positions: psi(x, key_map),
            size=lambda d: 2 * d,
            query_features=lambda x, positions: psi(x, query_map),
            per_query_head=key_map is not None,
        ),
    )


def matrix(name: str, rows: str) -> Param:
    return Param(
        name,
        None,
        "tensor",
        f"matrix by which {rows} are multiplied, (H, D, D); None is the identity",
        init=lambda d: torch.eye(d),
        size=lambda d: (d, d),
    )


VARIANT = Variant(
    name="hedgehog",
    formula="ψ(W_q q)·ψ(W_k k) / Σ, ψ(x) = [softmax(x), softmax(−x)]",
    use="Use for constant cost per decoded token, with 2·D features, in a model that you train.",
    paper="Zhang et al. 2024, arXiv:2402.04347",
    aliases=("learned feature map",),
    weights=weights,
    forms=forms,
    params=(matrix("query_map", "queries"), matrix("key_map", "keys")),
    has_logits=False,
    has_state=lambda query_map, key_map: True,
)
