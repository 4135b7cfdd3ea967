"""Cross entropy with a target score that differs from the target's logit.

    L = log(Σ_{j≠y} exp(z_j) + exp(t)) − t = log(1 + exp(r − t)),  r = log Σ_{j≠y} exp(z_j)

r leaves out the target, so nothing cancels if t leads all other classes. Correcting the
log-sum-exp over all classes instead gives −∞ where exp(z_y) is most of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.losses.potentials import NEG_INF
from attnzoo.losses.tokens import Tokens


def rest_losses(z: Tensor, tokens: Tokens, wanted: list[str]) -> dict[str, Tensor]:
    """`chunks.Rule` of L. t is the vector ``sink``."""
    target = tokens.vectors.sink
    assert target is not None
    z.scatter_(1, tokens.target[:, None], NEG_INF)
    if tokens.hidden is not None:
        z.masked_fill_(tokens.hidden, NEG_INF)
    peak = z.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == NEG_INF, 0.0)  # no other class
    total = z.sub_(peak).exp_().sum(-1)
    lead = peak[:, 0] - target + total.log()  # log Σ would lose digits in a large sum
    result = {"loss": log1p_exp(lead)}
    if wanted:
        # ∂L/∂r; 0 if there is no other class, whose total is 0 too.
        share = tokens.factor * lead.sigmoid()
        z.mul_((share / total.where(total != 0, 1.0))[:, None])
        result["sink"] = -share
    return {name: x for name, x in result.items() if name == "loss" or name in wanted}


def log1p_exp(x: Tensor) -> Tensor:
    """log(1 + eˣ), with a small relative error for all x."""
    return torch.logaddexp(x, torch.zeros_like(x))
