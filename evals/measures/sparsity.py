"""Measures of how evenly a row of weights is spread over the keys that the row sees.

w are the weights of a row with n visible keys, p = |w| / Σ|w|, and p_(1) ≥ p_(2) ≥ … are the
entries of p in descending order:

    entropy     H(p) / log n with the Shannon entropy H(p) = −Σ p log p
    renyi_2     H₂(p) / log n with the Rényi entropy of order 2, H₂(p) = −log Σ p²
    renyi_inf   H_∞(p) / log n with the Rényi entropy of order ∞, H_∞(p) = −log max p
    n_eff       1 / Σ p², the effective number of keys; equal to e^{H₂}
    l1_l2       ℓ1/ℓ2 = Σ|w| / √Σw²; equal to √n_eff
    hoyer       (√n − ℓ1/ℓ2) / (√n − 1)
    gini        1 − (2/n) Σ_r p_(r) (r − ½)

Entropies, n_eff and ℓ1/ℓ2 fall as weights become sparser; hoyer and gini rise. "Measures of
sparsity" in docs/evals.md has their limits and properties. No measure depends on the scale of the
weights. Negative weights count with their absolute values. If all weights of a row are 0, or the
row sees no key, every measure is 0. With one visible key, hoyer, gini and the entropies are 0,
n_eff and ℓ1/ℓ2 are 1. NaN weights give NaN.

References:
    Hurley, Rickard 2009, "Comparing measures of sparsity", arXiv:0811.4706, tables I and III. Their
    Gini index, 1 − 2 Σ_k (c_(k)/‖c‖₁) (N − k + ½)/N with ascending c_(k), is the one above.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# The measures with their column names.
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "entropy": "H/log n",
        "renyi_2": "H₂/log n",
        "renyi_inf": "H∞/log n",
        "n_eff": "1/Σp²",
        "l1_l2": "ℓ1/ℓ2",
        "hoyer": "Hoyer",
        "gini": "Gini",
    }
)


def sparsity(weights: Tensor, visible: Tensor | int) -> dict[str, Tensor]:
    """Compute the measures listed at the top of this file, each as a tensor (…), by name.

    Args:
        weights: (…, N), the weights; 0 for keys that a row does not see.
        visible: n, the number of keys that a row sees: an int, or a tensor that broadcasts to (…).

    >>> measures = sparsity(torch.tensor([0.5, 0.5, 0.0, 0.0]), 4)
    >>> measures["n_eff"].item(), measures["entropy"].item(), measures["gini"].item()
    (2.0, 0.5, 0.5)
    """
    size = weights.abs()
    # Divided by the largest weight first: a square or a sum of tiny weights could underflow.
    largest = size.amax(-1)
    all_zero = largest == 0
    scaled = size / largest.masked_fill(all_zero, 1.0)[..., None]
    total = scaled.sum(-1).masked_fill(all_zero, 1.0)
    p = scaled / total[..., None]
    n = torch.as_tensor(visible, dtype=p.dtype, device=p.device).expand(all_zero.shape)
    single, log_n = n <= 1, n.clamp(min=2).log()  # with one key, each entropy is 0
    n_eff = 1 / p.square().sum(-1).masked_fill(all_zero, 1.0)
    l1_l2 = n_eff.sqrt()
    rank = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device) + 0.5
    descending = p.sort(-1, descending=True).values
    root = n.sqrt()
    measures = {
        "entropy": -torch.special.xlogy(p, p).sum(-1) / log_n,
        "renyi_2": n_eff.log() / log_n,
        "renyi_inf": total.log() / log_n,  # max p = 1 / total
        "n_eff": n_eff,
        "l1_l2": l1_l2,
        "hoyer": ((root - l1_l2) / (root - 1).masked_fill(single, 1.0)).masked_fill(single, 0.0),
        "gini": 1 - 2 * (descending * rank).sum(-1) / n.clamp(min=1),
    }
    return {name: value.masked_fill(all_zero, 0.0) for name, value in measures.items()}
