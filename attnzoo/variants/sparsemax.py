"""sparsemax: the Euclidean projection of the logits onto the probability simplex.

Formula:
    w_ij = [z_ij − τ_i]_+,  τ_i such that Σ_j w_ij = 1

Effect: Keys whose logit is 1 or more below the largest have weight exactly 0 and get no gradient.
At any n, a key that leads all others by 1 or more has weight 1. If its lead is Δ < 1 and all others
are equal, its weight tends to Δ as n grows.

Source: Martins & Astudillo 2016, arXiv:1602.02068, Algorithm 1 (τ from the sorted scores).
"""

import torch
from torch import Tensor

from attnzoo.core.activations import SPARSEMAX
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Variant


def project(s: Tensor, call: Call) -> Tensor:
    """[s − τ]_+ with sum 1 over the visible keys."""
    if call.keys == 0:
        return s
    s = s - call.hide(s).amax(-1, keepdim=True).detach()  # a shift does not change the weights
    # A key at −1 has weight 0 already; sums of much lower scores would overflow.
    s = call.hide(s, fill=-2.0).clamp(min=-2.0)
    with torch.no_grad():
        ranked = s.sort(dim=-1, descending=True).values
        rank = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
        size = (1 + rank * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True)
        # In a row that contains NaN, all entries of ``support`` are False.
        support = s >= ranked.gather(-1, size.clamp(min=1) - 1)
        support = support.to(s.dtype)
    tau = ((s * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return call.zero_hidden((s - tau).relu())


def weights(q: Tensor, k: Tensor, call: Call) -> Tensor:
    return project(call.scores(q, k) + call.bias, call)


def forms(call: Call) -> tuple[Form, ...]:
    return (Pairwise(SPARSEMAX, "threshold"),)


VARIANT = Variant(
    name="sparsemax",
    formula="[z − τ]_+, Σ = 1",
    use="Train from scratch for fewer nonzero weights than with entmax at its default α = 1.5.",
    paper="Martins & Astudillo 2016, arXiv:1602.02068",
    aliases=("simplex projection",),
    weights=weights,
    forms=forms,
)
