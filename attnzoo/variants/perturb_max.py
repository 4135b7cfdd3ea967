"""perturb_max: the probability that a key has the largest score after noise is added.

Formula:
    w_ij = P(z_ij + σ ε_j > z_il + σ ε_l for all other keys l), ε_j independent

Effect: With Gumbel noise this is exactly softmax(z / σ). With normal noise a key that is clearly
behind gets less weight than with softmax, because normal noise is rarely large. With n − 1 equal
keys, the weight of a key that leads by Δ begins to fall when √(2 log n) reaches Δ / σ. With softmax
it begins when log n reaches Δ.

Source: Hazan & Jaakkola 2012, arXiv:1206.6410, for the model with Gumbel noise.

Differences: Weights are exact probabilities, not the frequencies of drawn samples. ALiBi and float
masks are added to z / σ.

Notes: Weights with normal noise are an integral over the largest value t,
w_j = ∫ φ(t − z_j) Π_{l ≠ j} Φ(t − z_l) dt for σ = 1. The points of the trapezoidal rule are placed
for each row. With 96 points in fp64 its error is below 1e-10 for up to 100,000 keys, and with 48
points in fp32 below 1e-9. On a CPU a call costs hundreds of times as much as softmax. Training
keeps about four tensors of the size of the scores per point; ``tiled`` bounds this memory. std
multiplies standard noise; standard Gumbel noise has the standard deviation π/√6.
`losses.perturb_max_loss` computes −log w of one class, also where w underflows.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.normal_distribution import LOG_ROOT, log_cdf
from attnzoo.core.variant import Param, Variant

# The integral is computed from the point where Π Φ is e^NEGLIGIBLE to LAST, relative to the largest
# score of a row. Π Φ rises in a shorter interval if many scores are large. Points at fixed places
# would miss it.
POINTS = {torch.float32: 48, torch.float64: 96}
FIRST, LAST, NEGLIGIBLE = -9.0, 8.5, -40.0
BISECTIONS = 8
# Scores so far below the largest have the weight 0, also in fp64. (t − x)² would be infinite for a
# score such as −3e38, and its gradient NaN.
LOWEST = -100.0


def log_below(t: Tensor, x: Tensor, call: Call) -> Tensor:
    """log P(x_j + ε_j < t) for each key."""
    return call.zero_hidden(log_cdf(t - x))  # t − x ≥ FIRST, because x ≤ 0


@torch.no_grad()
def first_point(x: Tensor, call: Call) -> Tensor:
    """For each row, the t at which Σ log P(x_j + ε_j < t) is about `NEGLIGIBLE`, (…, Nq, 1)."""
    low = torch.full_like(x[..., :1], FIRST)
    high = torch.full_like(low, LAST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        negligible = log_below(middle, x, call).sum(-1, keepdim=True) < NEGLIGIBLE
        low = torch.where(negligible, middle, low)
        high = torch.where(negligible, high, middle)
    return low


def weights(q: Tensor, k: Tensor, call: Call, noise: str, std: float) -> Tensor:
    x = call.scores(q, k) / std + call.bias
    if noise == "gumbel":
        return call.softmax(x)
    if call.keys == 0:  # there is no largest score
        return x
    # A hidden key becomes 0, because the gradient of log Φ is infinite for large scores, and the 0
    # that multiplies it later would make it NaN.
    x = x - call.hide(x).detach().amax(-1, keepdim=True)
    x = call.zero_hidden(x.clamp(min=LOWEST))
    first = first_point(x, call)
    points = POINTS[x.dtype]
    step = (LAST - first) / (points - 1)
    w = torch.zeros_like(x)
    for i in range(points):
        t = first + i * step
        below = log_below(t, x, call)
        density = -0.5 * (t - x).square() - LOG_ROOT
        w = w + (density + below.sum(-1, keepdim=True) - below).exp()
    return call.zero_hidden(step * w)


def forms(call: Call, noise: str, std: float) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=1 / std),) if noise == "gumbel" else ()


VARIANT = Variant(
    name="perturb_max",
    formula="P(z_j + σ·ε_j is the largest)",
    use="Study weights other than softmax: normal noise gives leading keys more weight.",
    paper="Hazan & Jaakkola 2012, arXiv:1206.6410",
    aliases=("perturb and map", "gumbel max"),
    weights=weights,
    forms=forms,
    params=(
        Param(
            "noise",
            "normal",
            kind="str",
            doc="distribution of the noise",
            check=lambda x: x in ("normal", "gumbel"),
            allowed="'normal' or 'gumbel'",
        ),
        Param(
            "std",
            1.0,
            kind="float",
            doc="factor of the noise",
            check=lambda x: x >= 1e-6,
            allowed="at least 1e-6",
        ),
    ),
)
