"""sparsemax: w_i = the point of the simplex nearest to z_i = [z_ij − τ_i]_+, Σ_j w_ij = 1.

Martins & Astudillo 2016, arXiv:1602.02068, Algorithm 1: τ from the sorted scores. A key that trails
the best by 1 or more has weight 0 and gets no gradient.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import SPARSEMAX
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Variant


def project(s: Tensor, call: Call) -> Tensor:
    """[s − τ]_+ with Σ = 1 over the visible keys."""
    if call.keys == 0:
        return s
    s = s - call.hide(s).amax(-1, keepdim=True).detach()  # leaves the result as it is
    # A key at −1 is outside any support already, and far below it the sums would overflow.
    s = call.hide(s, fill=-2.0).clamp(min=-2.0)
    with torch.no_grad():
        ranked = s.sort(dim=-1, descending=True).values
        rank = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
        size = (1 + rank * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True)
        support = s >= ranked.gather(-1, size.clamp(min=1) - 1)  # 0 in a row with NaN
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
    paper="Martins & Astudillo 2016, arXiv:1602.02068",
    weights=weights,
    forms=forms,
)
