"""sigmoid: w_ij = σ(z_ij + b), no normalizer; b = −log n_i unless given.

Ramapuram et al. 2024, arXiv:2409.04431. With b = −log n the total mass stays near that of
softmax's at initialization. Not shift-invariant: the rows do not sum to 1.

Differs: the authors ship one constant b = −log of the training length; here the default counts the
visible keys of each row. Their number is ``bias=-math.log(n)``.
"""

from torch import Tensor

from attnzoo.core.activations import SIGMOID
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, PerQuery, Variant


def weights(q: Tensor, k: Tensor, call: Call, bias: PerQuery | None) -> Tensor:
    bias = -call.log_n[..., None] if bias is None else bias
    s = call.scores(q, k) + call.bias + bias
    return call.zero_hidden(s.sigmoid())


def forms(call: Call, bias: PerQuery | None) -> tuple[Form, ...]:
    offset = call.log_n if bias is None else -call.per_query(bias)
    return (Pairwise(SIGMOID, "none", offset=offset),)


VARIANT = Variant(
    name="sigmoid",
    formula="σ(z + bias), bias = −log n",
    paper="Ramapuram et al. 2024, arXiv:2409.04431",
    weights=weights,
    params=(Param("bias", None, doc="added to every score; None is −log n of each row"),),
    forms=forms,
    normalized=False,
)
