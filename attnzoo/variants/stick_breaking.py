"""stick_breaking: each query breaks its weight off a stick, from the last key back.

Formula:
    w_ij = σ(z_ij) · Π_{j < l < i} (1 − σ(z_il))  for keys j before query i, else 0

Effect: A key takes the share σ(z_ij) of what the keys between it and the query have left. Recent
keys come first, so no position encoding is needed. A row sums to less than 1. With all logits
equal, weights fall geometrically with the distance, whatever n is.

Source: Tan et al. 2024, arXiv:2410.17980.

Differences: Hidden keys are skipped: they get weight 0 and take nothing. ALiBi and float masks are
added to z.

Notes: A query does not see its own key, so the first query of a sequence has output 0. The products
are computed as sums of logarithms.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from attnzoo.core.call import Call
from attnzoo.core.forms import Shares
from attnzoo.core.variant import Variant


def unsupported(call: Call) -> str | None:
    if call.sees_no_later_key:
        return None
    return (
        "stick_breaking only has weights for earlier keys: is_causal must be True, unless all "
        "queries follow all keys"
    )


def weights(q: Tensor, k: Tensor, call: Call) -> Tensor:
    s = call.scores(q, k) + call.bias
    unseen = ~(call.visible & (call.distance > 0))
    left = logsigmoid(-s).masked_fill(unseen, 0.0)
    # Σ over the keys after j, without forming a total from which its own term is subtracted.
    after = pad(left.flip(-1).cumsum(-1).flip(-1), (0, 1))[..., 1:]
    return (logsigmoid(s) + after).exp().masked_fill(unseen, 0.0)


VARIANT = Variant(
    name="stick_breaking",
    formula="σ(z_ij)·Π_{j<l<i} (1 − σ(z_il))",
    use="Use in place of a position encoding where recent keys should come first; causal only.",
    paper="Tan et al. 2024, arXiv:2410.17980",
    aliases=("stick-breaking attention", "sb attention", "sba"),
    weights=weights,
    forms=lambda call: (Shares(),),
    unsupported=unsupported,
    normalized=False,
    positional=True,
)
