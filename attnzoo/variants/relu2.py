"""relu2: squared rectified scores, normalized to sum 1.

Formula:
    w_ij = ReLU(z_ij)² / Σ_j ReLU(z_ij)²

Effect: Keys with a negative score have weight 0. Scaling all logits of a row by a positive number
does not change its weights. A query whose scores are all negative attends to nothing.

Source: after Hua et al. 2022 (gated attention unit), arXiv:2202.10447.

Differences: The paper divides by the number of keys instead of the sum; see ``relu`` with power 2.

Notes: Squares of fp32 scores overflow above 1e19 and vanish below 1e-22.
"""

from torch import Tensor

from attnzoo.core.activations import RELU2
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Variant


def weights(q: Tensor, k: Tensor, call: Call) -> Tensor:
    return call.normalized((call.scores(q, k) + call.bias).relu().square())


def forms(call: Call) -> tuple[Form, ...]:
    return (Pairwise(RELU2, "sum"),)


VARIANT = Variant(
    name="relu2",
    formula="ReLU(z)² / Σ",
    use="Use for weights that can be 0 and do not depend on the scale of the logits.",
    paper="Hua et al. 2022, arXiv:2202.10447",
    aliases=("squared relu", "relu squared", "gated attention unit"),
    weights=weights,
    forms=forms,
    normalized=False,
)
