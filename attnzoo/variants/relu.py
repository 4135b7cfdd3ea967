"""relu: rectified scores divided by the number of visible keys, without a normalizer.

Formula:
    w_ij = ReLU(z_ij)^power / n_i,  n_i = number of keys visible to query i

Effect: Keys with a negative score have weight 0. Each weight depends on its own logit and on n
only, so the weights of a row do not sum to 1. Dividing by n keeps the size of the output as n
grows.

Initial values: power = 1.

Source: Wortsman et al. 2023, arXiv:2309.08586, which compares powers of n with several activations.

Differences: The paper divides by the constant sequence length. Here n_i counts the visible keys of
each query.

Notes: Powers of fp32 scores overflow above 10^(38/power), so power is at most 16. The weights and
gradients of scores up to 200 are then finite.
"""

from torch import Tensor

from attnzoo.core.activations import RELU, RELU2, RELU_POWER
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, power: PerQuery) -> Tensor:
    s = call.zero_hidden(call.scores(q, k) + call.bias)  # a score of 0 has weight 0
    # Replacing scores below 0 keeps the gradient of the power finite. NaN stays NaN.
    powers = s.masked_fill(s <= 0, 1.0) ** power
    return powers.masked_fill(s <= 0, 0.0) / call.counts.clamp(min=1)[..., None]


def forms(call: Call, power: PerQuery) -> tuple[Form, ...]:
    factor = 1 / call.counts.clamp(min=1)
    exact = {1.0: RELU, 2.0: RELU2}
    if not isinstance(power, Tensor) and power in exact:
        return (Pairwise(exact[power], "none", offset=0.0, factor=factor),)
    shape = call.per_query(power)
    return (Pairwise(RELU_POWER, "none", offset=0.0, shape=shape, factor=factor),)


VARIANT = Variant(
    name="relu",
    formula="ReLU(z)^p / n",
    use="Use for elementwise weights that can be 0. Train from scratch.",
    paper="Wortsman et al. 2023, arXiv:2309.08586",
    aliases=("relu attention", "rectified attention"),
    weights=weights,
    params=(
        Param(
            "power",
            1.0,
            doc="exponent p; a number, or one per head (H,)",
            check=lambda x: (x > 0) & (x <= 16),
            allowed="above 0 and at most 16",
            between=(0.0, 16.0),
        ),
    ),
    forms=forms,
    normalized=False,
)
