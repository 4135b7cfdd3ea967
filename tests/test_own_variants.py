"""A definition of a user's own: what it receives, and what it must return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import registry
from cases import rand

POWER = torch.tensor([1.0, 1.5, 2.0, 3.0]).double()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


def register(weights: Callable[..., Any], **fields: Any) -> None:
    """As a newcomer writes it: a definition, and perhaps a parameter."""
    attnzoo.register_variant(attnzoo.Variant("mine", "-", "-", weights, **fields))


def shifted_relu(q: Tensor, k: Tensor, call: Any, power: Any) -> Tensor:
    weights = call.scores(q, k).relu() ** power / call.counts.clamp(min=1)[..., None]
    return weights.masked_fill(~call.visible, 0.0)


# Four heads: as many as keys, as queries, as both, and as neither.
SHAPES = [(5, 4), (4, 6), (4, 4), (5, 6)]


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_each_head_has_its_own_parameter(queries: int, keys: int, backend: str) -> None:
    register(shifted_relu, params=(attnzoo.Param("power", 1.0),))
    q, k, v = (rand(2, 4, n, 8, seed=n) for n in (queries, keys, keys))
    options: dict[str, Any] = {"is_causal": True, "backend": backend}
    found = attnzoo.attention(q, k, v, "mine", power=POWER, **options)
    for head, power in enumerate(POWER.tolist()):
        one = (x[:, head : head + 1] for x in (q, k, v))
        alone = attnzoo.attention(*one, "mine", power=power, **options)
        assert torch.allclose(found[:, head : head + 1], alone)
    weights = attnzoo.attention_weights(q, k, v, "mine", is_causal=True, power=POWER)
    assert torch.allclose(weights @ v, found)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_each_query_has_its_own_parameter(backend: str) -> None:
    register(shifted_relu, params=(attnzoo.Param("power", 1.0, per_token=True),))
    q, k, v = rand(3, 2, 4, 4, 8).unbind()
    power = 1 + rand(2, 4, 4, seed=5).abs()
    found = attnzoo.attention(q, k, v, "mine", power=power, backend=backend)
    z = (q @ k.mT / 8**0.5).relu()
    assert torch.allclose(found, z ** power[..., None] / 4 @ v)


def test_gradients_reach_the_parameter_of_each_head() -> None:
    register(shifted_relu, params=(attnzoo.Param("power", 1.0),))
    q, k, v = rand(3, 2, 4, 4, 8).unbind()
    power = POWER.clone().requires_grad_()
    z = (q @ k.mT / 8**0.5).relu()
    (expected,) = torch.autograd.grad((z ** power[:, None, None] / 4 @ v).sum(), power)
    for backend in ("eager", "tiled"):
        out = attnzoo.attention(q, k, v, "mine", power=power, backend=backend)
        (found,) = torch.autograd.grad(out.sum(), power)
        assert torch.allclose(found, expected)


WRONG_WEIGHTS: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (
        lambda q, k, call: call.scores(q, k)[None],
        ValueError,
        r"weights of variant 'mine' must have shape .* = \(2, 4, 5, 6\), got \(1, 2, 4, 5, 6\)",
    ),
    (
        lambda q, k, call: call.scores(q, k).mT,
        ValueError,
        r"weights of variant 'mine' must have shape .*got \(2, 4, 6, 5\)",
    ),
    (
        lambda q, k, call: torch.full((1, 1, 1, call.keys), 1 / call.keys),
        ValueError,
        r"weights of variant 'mine' must have shape .*got \(1, 1, 1, 6\)",
    ),
    (
        lambda q, k, call: call.scores(q, k).to(torch.float64),
        TypeError,
        "weights of variant 'mine' must be in the dtype .*torch.float32, got torch.float64",
    ),
    (
        lambda q, k, call: call.visible.expand(2, 4, 5, 6),
        TypeError,
        "weights of variant 'mine' must be in the dtype .*torch.float32, got torch.bool",
    ),
    (lambda q, k, call: None, TypeError, "weights .*'mine' must be a tensor, got NoneType"),
]


@pytest.mark.parametrize("case", WRONG_WEIGHTS, ids=lambda case: case[2][:20])
def test_wrong_weights_are_refused(case: tuple[Callable[..., Any], type[Exception], str]) -> None:
    weights, error, words = case
    register(weights)
    q, k, v = (rand(2, 4, n, 8).float() for n in (5, 6, 6))
    for backend in ("eager", "tiled"):
        with pytest.raises(error, match=words):
            attnzoo.attention(q, k, v, "mine", backend=backend)
    with pytest.raises(error, match=words):
        attnzoo.attention_weights(q, k, v, "mine")
