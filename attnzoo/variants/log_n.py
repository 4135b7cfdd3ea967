"""log_n: w_i = softmax(log n_i / log train_length · z_i), nothing to learn.

Chiang & Cholak 2022, arXiv:2202.12172 (gain log n); Su 2021, kexue.fm/archives/8823 (divided by the
log of the training length, 512, so that nothing changes there). ``train_length=math.e`` gives the
former. A row with one visible key has gain 0 and weight 1.
"""

import math

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, Param, Variant


def gain(call: Call, train_length: float) -> Tensor:
    return call.log_n / math.log(train_length)


def scores(q: Tensor, k: Tensor, call: Call, train_length: float) -> Tensor:
    return gain(call, train_length)[..., None] * call.scores(q, k) + call.bias


def weights(q: Tensor, k: Tensor, call: Call, train_length: float) -> Tensor:
    return call.softmax(scores(q, k, call, train_length))


def forms(call: Call, train_length: float) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=gain(call, train_length)),)


VARIANT = Variant(
    name="log_n",
    formula="softmax(log n / log train_length · z)",
    paper="Chiang & Cholak 2022, arXiv:2202.12172; Su 2021",
    weights=weights,
    params=(
        Param(
            "train_length",
            512,
            kind="float",
            doc="number of keys at which nothing changes",
            check=lambda x: x > 1,
            allowed="a number above 1",
        ),
    ),
    forms=forms,
    scores=scores,
    example=lambda length: {"train_length": length},
    inference_only=True,
    calibrate=lambda log_n: {"train_length": math.exp(log_n)},
)
