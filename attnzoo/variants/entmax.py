"""entmax: a family of sparse normalizers between softmax and sparsemax, with exponent alpha.

Formula:
    w_ij = [(α−1) z_ij − τ_i]_+^{1/(α−1)},  τ_i such that Σ_j w_ij = 1,  1 < α ≤ 2

Effect: Keys whose logit is 1/(α−1) or more below the largest have weight exactly 0. For α = 1.5
this distance is 2. At any n, a key that leads all others by this distance has weight 1. If its lead
is a smaller Δ and all others are equal, its weight tends to ((α−1)Δ)^{1/(α−1)} as n grows.

Initial values: α = 1.5. α → 1 is softmax, α = 2 is sparsemax.

Source: Peters et al. 2019, arXiv:1905.05702; a learned α per head is from Correia et al. 2019,
arXiv:1909.00015, who use α = 1 + σ(a_h).

Differences: Computed in the units of the scores as w = φ(z − τ'), with the q-exponential
φ(x) = [1 + (α−1) x]_+^{1/(α−1)} and τ' = (τ + 1)/(α−1). The weights are the same, and τ' stays
finite as α → 1.

Notes: The definition finds τ by sorting if α is the number 1.5 or 2, and by bisection for other
values and for tensors. A tensor α gets a gradient.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import ENTMAX15, Q_EXP, SPARSEMAX
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant
from attnzoo.variants.sparsemax import project


def project15(s: Tensor, call: Call) -> Tensor:
    """[s/2 − τ]_+² with sum 1 over the visible keys; τ comes from the sorted scores."""
    if call.keys == 0:
        return s
    x = (s - call.hide(s).amax(-1, keepdim=True).detach()) / 2
    tiny = torch.finfo(x.dtype).tiny
    x = call.hide(x, fill=-2.0).clamp(min=-2.0)  # below −1 the weight is 0
    with torch.no_grad():
        ranked = x.sort(dim=-1, descending=True).values
        rank = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        mean = ranked.cumsum(-1) / rank
        spread = (ranked**2).cumsum(-1) - rank * mean**2
        # Clamped above 0, because on some CPUs a vectorized √0 is ten times slower.
        tau = mean - ((1 - spread) / rank).clamp(min=tiny).sqrt()
        size = (tau <= ranked).sum(-1, keepdim=True)
        # In a row that contains NaN, all entries of ``support`` are False.
        support = x >= ranked.gather(-1, size.clamp(min=1) - 1)
        support = support.to(x.dtype)
    # τ is the smaller root of Σ (x − τ)² = 1 over the support. It is recomputed with a gradient.
    count = support.sum(-1, keepdim=True)
    mean = (x * support).sum(-1, keepdim=True) / count
    spread = ((x - mean) ** 2 * support).sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / count).clamp(min=tiny).sqrt()
    return call.zero_hidden((x - tau).relu().square())


def q_exp(x: Tensor, alpha: PerQuery) -> Tensor:
    inside = ~(1 + (alpha - 1) * x <= 0)  # NaN stays NaN
    x = torch.where(inside, x, torch.zeros_like(x))
    return torch.exp(torch.log1p((alpha - 1) * x) / (alpha - 1)) * inside


def bisect(s: Tensor, call: Call, alpha: Tensor) -> Tensor:
    """φ(s − τ) with sum 1 over the visible keys; τ by bisection and two Newton steps.

    The Newton steps carry the gradient: two steps from a constant τ give the first and second
    derivatives of the root.
    """
    if call.keys == 0:
        return s
    s = s - call.hide(s).amax(-1, keepdim=True).detach()
    s = call.hide(s, fill=0.0)  # the sums below skip hidden keys
    s = torch.maximum(s, -2 / (alpha.detach() - 1))  # raises −∞ to a finite score of weight 0
    visible = call.visible

    def weight_sum(tau: Tensor) -> Tensor:
        return (q_exp(s - tau, alpha) * visible).sum(-1, keepdim=True)

    with torch.no_grad():
        low = torch.zeros_like(s[..., :1])  # the sum is >= 1, because φ(0) = 1
        # log_keys is a tensor, because torch.compile would recompile for each new Python int.
        log_keys = s.new_full((), call.keys).clamp(min=2).log()
        high = low - torch.expm1((1 - alpha) * log_keys) / (alpha - 1)
        for _ in range(80 if s.dtype == torch.float64 else 40):
            middle = (low + high) / 2
            above = weight_sum(middle) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        tau = low
    for _ in range(2):
        phi = q_exp(s - tau, alpha) * visible
        slope = torch.where(phi > 0, phi.clamp(min=torch.finfo(phi.dtype).tiny) ** (2 - alpha), 0)
        slope = slope.sum(-1, keepdim=True)
        tau = tau + (phi.sum(-1, keepdim=True) - 1) / slope.masked_fill(slope == 0, 1.0)
    return q_exp(s - tau, alpha) * visible


def weights(q: Tensor, k: Tensor, call: Call, alpha: PerQuery) -> Tensor:
    s = call.scores(q, k) + call.bias
    if isinstance(alpha, Tensor):
        return bisect(s, call, alpha)
    if alpha == 1.5:
        return project15(s, call)
    return project(s, call) if alpha == 2 else bisect(s, call, call.per_query(alpha))


def forms(call: Call, alpha: PerQuery) -> tuple[Form, ...]:
    exact = {1.5: ENTMAX15, 2.0: SPARSEMAX}
    if not isinstance(alpha, Tensor) and alpha in exact:
        return (Pairwise(exact[alpha], "threshold"),)
    return (Pairwise(Q_EXP, "threshold", shape=call.per_query(alpha)),)


VARIANT = Variant(
    name="entmax",
    formula="[(α−1)z − τ]_+^{1/(α−1)}, Σ = 1",
    use=(
        "Train from scratch for weights that are exactly 0. A threshold is computed for each query."
    ),
    paper="Peters et al. 2019, arXiv:1905.05702",
    aliases=("alpha entmax", "entmax15", "adaptively sparse transformer"),
    weights=weights,
    params=(
        Param(
            "alpha",
            1.5,
            doc="exponent; 2 is sparsemax, the limit 1 is softmax; a number, or one per head (H,)",
            check=lambda x: (x > 1 + 5e-7) & (x <= 2),
            allowed="in (1, 2], and at least 1e-6 above 1",
            between=(1.0, 2.0),
        ),
    ),
    forms=forms,
)
