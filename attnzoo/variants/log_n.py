"""log_n: softmax with the gain log n / log train_length, without learned parameters.

Formula:
    w_i = softmax(log n_i / log(train_length) · z_i),  n_i = number of keys visible to query i
    with clip: w_i = softmax(max(1, log n_i / log(train_length)) · z_i)

Effect: Rows with more than train_length visible keys become sharper than in softmax, rows with
fewer become flatter. As n grows, a key that leads all others by more than log(train_length) tends
to weight 1. A row with one visible key has gain 0 and weight 1. With ``clip``, rows with at most
train_length visible keys keep their softmax weights.

Initial values: train_length = 512 (Su 2021).

Source: Chiang & Cholak 2022, arXiv:2202.12172 (gain log n); Su 2021, kexue.fm/archives/8823
(divided by the logarithm of the training length). The models Qwen and Qwen 1.5 clip
(``use_logn_attn``).

Differences: n_i is counted per query after mask, causality and window.

Notes: ``train_length=math.e`` gives the gain log n of Chiang & Cholak. The train_length from
``calibrate`` of `convert` makes the mean gain 1 without ``clip``, and more than 1 with it.
"""

import math

from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def gain(call: Call, train_length: float, clip: bool) -> Tensor:
    ratio = call.log_n / math.log(train_length)
    return ratio.clamp(min=1) if clip else ratio


def scores(q: Tensor, k: Tensor, call: Call, train_length: float, clip: bool) -> Tensor:
    return gain(call, train_length, clip)[..., None] * call.scores(q, k) + call.bias


def forms(call: Call, train_length: float, clip: bool) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=gain(call, train_length, clip)),)


VARIANT = Variant(
    name="log_n",
    formula="softmax(log n / log train_length · z)",
    use="Extend a trained softmax model; clip=True keeps softmax up to train_length keys.",
    paper="Chiang & Cholak 2022, arXiv:2202.12172; Su 2021",
    aliases=("log-length scaling", "logn scaling", "entropy invariance"),
    params=(
        Param(
            "train_length",
            512,
            kind="float",
            doc="number of keys at which the gain is 1 (the train length of the model)",
            check=lambda x: x > 1,
            allowed="a number above 1",
        ),
        Param("clip", False, kind="bool", doc="whether the gain is at least 1"),
    ),
    forms=forms,
    scores=scores,
    example=lambda length: {"train_length": length},
    inference_only=True,
    length_gain=True,
    calibrate=lambda log_n: {"train_length": math.exp(log_n)},
)
