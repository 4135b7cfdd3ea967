"""forgetting: softmax with a forget gate, so that a key counts less with each token after it.

Formula:
    w_ij = exp(z_ij + c_i − c_j) / Σ_j exp(z_ij + c_i − c_j),  c_i = Σ_{l ≤ i} log f_l

log f_l ≤ 0 is the logarithm of the forget gate of token l, so c_i − c_j is the sum of the log gates
of the tokens after key j, up to query i.

Effect: With all gates equal to f, this is ALiBi with slope −log f. Gates that depend on the data
let a head keep some tokens and drop others. A gate of 1 (log f = 0) for all tokens gives softmax.

Initial values: Modules that see the hidden states use f = σ(x·w + b) with b = 5 initially, so that
a key loses 0.7 % of its weight per token.

Source: Lin et al. 2025 (Forgetting Transformer), arXiv:2503.02130, eq. 4; b = 5 is the value of
x-transformers.

Differences: A query without a gate of its own, as in cross attention, has no meaning here: the call
must be causal, or all queries must follow all keys.

Notes: c is a cumulative sum in fp32 (fp64 for fp64 inputs) and reaches thousands in long sequences.
c_i − c_j is formed before the logits are added. Its error is about 6e-8 · |c_i|, so a gate of −100
hides all earlier keys, and much lower gates only lose digits. Separate documents with segment_ids.
"""

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerKey
from attnzoo.core.variant import Param, Projection, Variant


def unsupported(call: Call, log_gates: PerKey) -> str | None:
    if call.sees_no_later_key:
        return None
    return (
        "forgetting has no gates from a query to later keys: is_causal must be True, unless all "
        "queries follow all keys"
    )


def decays(call: Call, log_gates: PerKey) -> tuple[Tensor, Tensor]:
    """c at the keys (…, Nk) and at the queries (…, Nq)."""
    c = call.per_key(log_gates).cumsum(-1)
    if call.keys == 0:
        return c, c.new_zeros(*c.shape[:-1], call.queries)
    return c, c.index_select(-1, call.own_keys)


def scores(q: Tensor, k: Tensor, call: Call, log_gates: PerKey) -> Tensor:
    if isinstance(log_gates, Tensor):
        log_gates = log_gates.squeeze(-2)
    keys, queries = decays(call, log_gates)
    return call.scores(q, k) + call.bias + (queries[..., None] - keys[..., None, :])


def forms(call: Call, log_gates: PerKey) -> tuple[Form, ...]:
    keys, queries = decays(call, log_gates)
    return (Pairwise(EXP, "sum", key_bias=-keys, offset=-queries),)


VARIANT = Variant(
    name="forgetting",
    formula="softmax(z + c_i − c_j), c = cumsum(log f)",
    use="Use for a learned, data-dependent decay in place of a position encoding; causal only.",
    paper="Lin et al. 2025, arXiv:2503.02130",
    aliases=("forgetting transformer", "forgetting attention", "fox", "forget gate"),
    params=(
        Param(
            "log_gates",
            doc=(
                "logarithm of the forget gate of each key; a number, one per head (H,), or one "
                "per key (B, H, Nk)"
            ),
            per_key=True,
            check=lambda x: (x <= 0) & (x >= -1e4),
            allowed="between -1e4 and 0",
            between=(-math.inf, 0.0),
            projection=Projection(logsigmoid, bias=5.0),
        ),
    ),
    forms=forms,
    scores=scores,
    unsupported=unsupported,
    positional=True,
    identity={"log_gates": 0.0},
    example=lambda length: {"log_gates": -0.01},
)
