"""ssmax, Scalable-Softmax: w_i = softmax((s_h · log n_i + b_h) · z_i), n_i the visible keys.

Nakanishi 2025, arXiv:2501.19399: n^{s z} in the place of e^z, so that a key keeps its weight as n
grows if its lead times s is above 1. A row with one visible key has gain b and weight 1.

Initial value: s = 0.168 = 1 / mean(log n) over n = 1 … 1024, so that the mean temperature starts
at 1. The bias b helps training and can hurt length generalization, so it is 0 and fixed by default.

Differs: n_i is counted per row after mask, causality and window. One n for all causal rows would be
a constant temperature.
"""

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, PerQuery, Variant


def gain(log_n: Tensor, s: PerQuery, b: PerQuery) -> Tensor:
    return s * log_n + b


def scores(q: Tensor, k: Tensor, call: Call, s: PerQuery, b: PerQuery) -> Tensor:
    return gain(call.log_n[..., None], s, b) * call.scores(q, k) + call.bias


def weights(q: Tensor, k: Tensor, call: Call, s: PerQuery, b: PerQuery) -> Tensor:
    return call.softmax(scores(q, k, call, s, b))


def forms(call: Call, s: PerQuery, b: PerQuery) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=gain(call.log_n, s, b)),)


VARIANT = Variant(
    name="ssmax",
    formula="softmax((s·log n + b)·z)",
    paper="Nakanishi 2025, arXiv:2501.19399",
    weights=weights,
    params=(
        Param("s", 0.168, doc="scale of log n", init=0.168),
        Param("b", 0.0, doc="constant part of the gain"),
    ),
    forms=forms,
    scores=scores,
    calibrate=lambda log_n: {"s": 1 / log_n},
    identity={"s": 0.0, "b": 1.0},
)
