"""The weights of one row of visible scores z (n,), written from the formulas.

``p`` holds the parameters by name; those that are missing have the variant's defaults.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def log_n(z: Tensor) -> float:
    return math.log(max(len(z), 1))


def log_n_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    gain = log_n(z) / math.log(p.get("train_length", 512))
    return ((max(gain, 1.0) if p.get("clip") else gain) * z).softmax(-1)


def bisected(z: Tensor, alpha: float) -> Tensor:
    """[(α−1) z − τ]_+^{1/(α−1)} with sum 1, τ by bisection."""
    z = (alpha - 1) * z
    low, high = z.amax(-1, keepdim=True) - 1, z.amax(-1, keepdim=True)
    for _ in range(200):
        middle = (low + high) / 2
        above = ((z - middle).relu() ** (1 / (alpha - 1))).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (z - low).relu() ** (1 / (alpha - 1))


def top_k_softmax(z: Tensor, count: int) -> Tensor:
    """Softmax over the ``count`` largest scores; among equal scores, the first are kept."""
    w = torch.zeros_like(z)
    order = sorted(range(len(z)), key=lambda j: (-z[j].item(), j))[:count]
    w[order] = z[order].softmax(-1)
    return w


def adaptive_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    w = z.softmax(-1)
    h = -(w * w.clamp(min=1e-300).log()).sum()
    beta = -0.037 * h**4 + 0.481 * h**3 - 2.3 * h**2 + 4.917 * h - 1.791
    return ((beta.clamp(min=1) if h > 0.5 else 1) * z).softmax(-1)


def asentmax_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    n, share = len(z) + p.get("extra", 0), p.get("scaled", 1.0)
    power = math.log(n) ** p.get("gamma", 0.0) if n > 1 else 0.0
    gain = p.get("delta", 1.0) + p.get("beta", math.log(2)) * power
    return bisected((share * gain + 1 - share) * z, 1.5)


def taylor_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    terms = [z**i / math.factorial(i) for i in range(int(p.get("order", 2)) + 1)]
    total = torch.stack(terms).sum(0)
    return total / total.sum()


def top_p_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    shares = sorted(z.softmax(-1).tolist(), reverse=True)
    count = 0
    while count < len(z) and (p["p"] == 1 or sum(shares[:count]) < p["p"]):
        count += 1
    return top_k_softmax(z, count)


def perturbed_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    """P(z_j + σε_j is the largest) = ∫ density_j(t) Π_{l ≠ j} P(z_l + σε_l < t) dt."""
    x = z / p.get("std", 1.0)
    if p.get("noise", "normal") == "gumbel":
        return x.softmax(-1)
    t = torch.linspace(-12, 12, 4801, dtype=torch.float64)[:, None] + x.max(0).values
    below = torch.distributions.Normal(x, 1.0).cdf(t)
    density = torch.distributions.Normal(x, 1.0).log_prob(t).exp()
    others = torch.stack([below[:, torch.arange(len(x)) != j].prod(-1) for j in range(len(x))], -1)
    return torch.trapezoid(density * others, dx=0.005, dim=0)


def lssa_row(z: Tensor, p: dict[str, Any]) -> Tensor:
    softplus = torch.logaddexp(log_n(z) * z, torch.zeros_like(z))
    return softplus / (softplus.sum() + p.get("eps", 1e-30))
