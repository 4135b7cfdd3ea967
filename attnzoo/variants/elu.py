"""elu: linear attention with the features elu(x) + 1.

Formula:
    w_ij = a_ij / Σ_j a_ij,  a_ij = ψ(scale·q_i)·ψ(k_j)
    ψ(x) = elu(x) + 1 = max(x, 0) + e^min(x, 0), for each entry

Effect: All weights are positive. A weight grows at most in proportion to the entries of q and k,
not exponentially. With n keys of similar size, each weight is of order 1/n.

Source: Katharopoulos et al. 2020 (Linear Transformer), arXiv:2006.16236, eq. 7.

Differences: q is multiplied by the argument ``scale`` before ψ, D^-½ by default. The paper has no
scale: pass ``scale=1.0``. Entries of scale·q and k below −40 count as −40, so that products are not
0 in fp32.

Notes: ψ is not linear, so RoPE before it does not make weights depend on distances only.
"""

from torch import Tensor

from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Linear
from attnzoo.core.variant import Variant

LOWEST = -40.0  # e^−80, the smallest product, is a normal number in fp32


def psi(x: Tensor) -> Tensor:
    # elu(x) + 1 would lose all digits of e^x for x far below 0.
    return x.relu() + x.clamp(LOWEST, 0).exp()


def weights(q: Tensor, k: Tensor, call: Call) -> Tensor:
    products = call.by_group(psi(call.scale * q.to(call.dtype)), psi(k.to(call.dtype)).mT)
    return call.normalized(products)


def features(x: Tensor, positions: Tensor) -> Tensor:
    return psi(x)


def forms(call: Call) -> tuple[Form, ...]:
    return (Linear(features, size=lambda d: d),)


VARIANT = Variant(
    name="elu",
    formula="ψ(q)·ψ(k) / Σ, ψ = elu + 1",
    use="Use for constant cost per decoded token, with D features. It is less sharp than softmax.",
    paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    aliases=("linear transformer", "linear attention", "elu plus one"),
    weights=weights,
    forms=forms,
    has_logits=False,
    has_state=lambda: True,
)
