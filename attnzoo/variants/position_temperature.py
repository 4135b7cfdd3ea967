"""position_temperature: softmax with a gain that grows with the query's position.

Formula:
    w_i = softmax((1 + beta · log(1 + ⌊(p_i + 1) / train_length⌋)) · z_i),
    p_i = position of query i in its sequence, from 0

Effect: The first train_length − 1 rows keep their softmax weights. Later rows become sharper in
steps: at beta = 0.1 the gain is 1.07 from p + 1 = train_length on and 1.14 from 3 · train_length
on. As n grows, a key that leads all others by more than 1 / beta tends to weight 1.

Initial values: beta = 0.1 and train_length = 8192 (Llama 4).

Source: Llama 4, Meta 2025, github.com/meta-llama/llama-models; Ministral 3, Mistral AI 2025, with
``one_based=False``.

Differences: p_i counts from the first key of the query's segment that the mask does not hide. Llama
4 uses the gain only in its layers without position encoding, which is a choice of the model.
``train_length`` need not be an integer.

Notes: Converted Hugging Face layers with a sliding window or chunks raise an error, because their
caches drop the keys from which positions are counted. So do layers of Llama 4 and Ministral 3 that
already have this gain.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise, PerQuery
from attnzoo.core.variant import Param, Variant


def gain(positions: Tensor, beta: PerQuery, train_length: float, one_based: bool) -> Tensor:
    steps = torch.div(positions + int(one_based), train_length, rounding_mode="floor")
    return 1 + beta * steps.log1p()


def scores(
    q: Tensor, k: Tensor, call: Call, beta: PerQuery, train_length: float, one_based: bool
) -> Tensor:
    gains = gain(call.places[..., None], beta, train_length, one_based)
    return gains * call.scores(q, k) + call.bias


def forms(call: Call, beta: PerQuery, train_length: float, one_based: bool) -> tuple[Form, ...]:
    return (Pairwise(EXP, "sum", gain=gain(call.places, beta, train_length, one_based)),)


VARIANT = Variant(
    name="position_temperature",
    formula="softmax((1 + β·log(1 + ⌊(p + 1) / train_length⌋))·z)",
    use="Sharpen attention slightly at positions beyond the train length, as Llama 4 does.",
    paper="Llama 4, Meta 2025",
    aliases=("llama 4 scaling", "attention temperature tuning", "temperature tuning"),
    params=(
        Param("beta", 0.1, doc="growth of the gain; a number, or one per head (H,)"),
        Param(
            "train_length",
            8192,
            kind="float",
            doc="position at which the gain starts to grow",
            check=lambda x: x >= 1,
            allowed="at least 1",
        ),
        Param(
            "one_based",
            True,
            kind="bool",
            doc="whether the first position counts as 1, as in Llama 4, or as 0, as in Ministral 3",
        ),
    ),
    forms=forms,
    scores=scores,
    absolute=True,
    length_gain=True,
    identity={"beta": 0.0},
    example=lambda length: {"train_length": max(1, length // 4)},
)
