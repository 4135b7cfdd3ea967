"""screening: each key is accepted or dropped by its own similarity, without a normalizer.

Formula:
    w_ij = max(1 − r_h (1 − z_ij), 0)²,  with z_ij the cosine of q_i and k_j

Effect: A key with z_ij ≤ 1 − 1/r has weight 0, and one with z_ij = 1 has weight 1. A weight depends
on its own key only, not on the other keys or on n, so no key loses weight as n grows. If no key is
similar enough, the output is 0. If the share of accepted keys is constant, the output grows with n.

Initial values: r = 2, learned: keys within 60° of the query are accepted.

Source: Nakanishi 2026, arXiv:2604.01178.

Differences: Pass q and k as unit vectors (`torch.nn.functional.normalize`), after which they may
be rotated, and scale = 1. Other logits z are not bounded by 1, and larger ones have weights above
1. The paper's acceptance width, σ(s) in its third version, is 1/r; its first has r = 1 + e^s. Its
Softmask, which multiplies weights by a function of the distance, is not included; ``window`` hides
distant keys. Neither are the unit vectors v and the norm of the output, tanh(|o|)·o/|o|.
"""

import math

from torch import Tensor

from attnzoo.core.activations import RELU2
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, r: PerQuery) -> Tensor:
    s = 1 - r * (1 - call.scores(q, k)) + call.bias
    return call.zero_hidden(s.relu().square())


def forms(call: Call, r: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(RELU2, "none", gain=r, offset=r - 1),)


VARIANT = Variant(
    name="screening",
    formula="max(1 − r(1 − z), 0)²",
    use="Use with unit vectors q, k and scale=1, to accept keys by an absolute threshold.",
    paper="Nakanishi 2026, arXiv:2604.01178",
    aliases=("multiscreen", "trim and square"),
    weights=weights,
    params=(
        Param(
            "r",
            2.0,
            doc="1 / acceptance width; a number, or one per head (H,)",
            init=2.0,
            check=lambda x: x >= 1,
            allowed="finite and at least 1",
            between=(1.0, math.inf),
        ),
    ),
    forms=forms,
    normalized=False,
)
