"""topk_probabilities() with variants that users register."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import probabilities, topk_probabilities
from attnzoo.core import registry
from attnzoo.core.activations import EXP
from helpers.largest import agrees

CUBE = attnzoo.Activation(
    "cube",
    lambda s, shape: s.add_(1).relu_().pow_(3),
    lambda s, phi, shape: 3 * phi.pow(2 / 3),
    convex=True,
)
SQUARE = attnzoo.Activation("square", lambda s, shape: s * s, lambda s, phi, shape: 2 * s)


def cube_threshold(q: Tensor, k: Tensor, call: attnzoo.Call) -> Tensor:
    """[1 + s − τ]_+³ with sum 1; τ by bisection."""
    s = call.hide(call.scores(q, k))
    low, high = s.amax(-1, keepdim=True), s.amax(-1, keepdim=True) + 1
    for _ in range(100):
        middle = (low + high) / 2
        above = ((1 + s - middle).relu() ** 3).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return call.zero_hidden((1 + s - low).relu() ** 3)


VARIANTS = {
    "convex threshold": (
        cube_threshold,
        lambda call: (attnzoo.Pairwise(CUBE, "threshold"),),
    ),
    "not increasing": (
        lambda q, k, call: call.zero_hidden(call.scores(q, k) ** 2),
        lambda call: (attnzoo.Pairwise(SQUARE, "none", offset=0.0),),
    ),
    "no form": (lambda q, k, call: call.zero_hidden(call.scores(q, k).sin()), lambda call: ()),
    "negative gain": (
        lambda q, k, call: call.softmax(-2 * call.scores(q, k)),
        lambda call: (attnzoo.Pairwise(EXP, "sum", gain=-2.0),),
    ),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_own_variants(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    weights, forms = VARIANTS[case]
    variant = attnzoo.Variant("own", "f(z)", "none", weights, forms=forms, normalized=False)
    attnzoo.register_variant(variant)
    scores, mask = torch.randn(4, 2000, dtype=torch.float64), torch.rand(4, 2000) < 0.7
    for seen in (None, mask):
        want = probabilities(scores, "own", mask=seen)
        agrees(topk_probabilities(scores, 3, "own", mask=seen), want, 3, 1e-9)
