"""scale_invariant: softmax with a gain and a bias by distance that treat all scales alike.

Formula:
    w_ij = softmax_j(a_t z_ij + m_t),  t = |i − j|
    a_t = √(1 + 2 log(1 + t/τ)),  m_t = −2 log(1 + t/τ)

Effect: If logits are normal with variance 1, the expected sum of exp(s_ij) over the keys at
distances from t to ct depends on c only, for t far above τ. The bias makes distant keys weaker, and
the gain lets a relevant distant key stand out.

Initial values: τ = 10.

Source: Anson et al. 2025, arXiv:2505.17083.

Differences: The paper treats causal attention. Without ``is_causal``, the distance is |i − j|.
"""

import math

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.distance import LOGARITHMIC
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def scores(q: Tensor, k: Tensor, call: Call, tau: PerQuery) -> Tensor:
    growth = 2 * (call.distance.abs().to(call.dtype) / tau).log1p()
    return call.scores(q, k) * (1 + growth).sqrt() - growth + call.bias


def forms(call: Call, tau: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", distance=LOGARITHMIC, decay=tau),)


VARIANT = Variant(
    name="scale_invariant",
    formula="softmax(a_t z + m_t), t = |i − j|",
    use="Use in place of a position encoding, where near and distant keys should count alike.",
    paper="Anson et al. 2025, arXiv:2505.17083",
    aliases=("scale-invariant attention",),
    params=(
        Param(
            "tau",
            10.0,
            doc="distance below which all keys are treated alike; a number, or one per head (H,)",
            # A smaller τ would overflow t/τ in fp32.
            check=lambda x: x >= 1e-6,
            allowed="finite and at least 1e-6",
            between=(1e-6, math.inf),
        ),
    ),
    forms=forms,
    scores=scores,
    positional=True,
)
