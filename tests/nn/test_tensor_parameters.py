"""Modules own parameters of kind "tensor", (H, …), such as a feature map."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnzoo
from attnzoo import Param
from attnzoo.core import registry
from attnzoo.nn import Attention, KVCache, MultiheadAttention, Transformer
from helpers.cases import rand

H, D = 4, 8


def weights(q: Tensor, k: Tensor, call: Any, map: Tensor, b: Any) -> Tensor:
    """softmax of scores of mapped queries and keys; only for as many kv heads as query heads."""
    scores = call.scale * (q.to(call.dtype) @ map) @ (k.to(call.dtype) @ map).mT
    return call.softmax(scores + b)


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    params = (
        Param("map", kind="tensor", size=lambda d: (d, 3), doc="feature map (H, D, 3)"),
        Param("b", 0.0, init=0.0),
    )
    attnzoo.register_variant(attnzoo.Variant("mine", "-", "-", weights, params=params))


def register(size: Any) -> None:
    """A variant with a tensor parameter of these dimensions."""
    registry._VARIANTS.pop("own", None)
    params = (Param("b", kind="tensor", size=size),)
    attnzoo.register_variant(
        attnzoo.Variant("own", "-", "-", lambda q, k, call, b: call.scores(q, k), params=params)
    )


def qkv() -> list[Tensor]:
    return [rand(2, H, 7, D, seed=i) for i in range(3)]


def start() -> Tensor:
    return rand(H, D, 3, seed=6)


@pytest.mark.parametrize("how", ["given", "fixed", "learn", "parameter"])
def test_values_and_gradients_equal_those_of_a_call(how: str) -> None:
    matrices = start().float()
    options: dict[str, Any] = {
        "given": {"given": ("map",)},
        "fixed": {"map": matrices},
        "learn": {"map": matrices, "learn": ("map", "b")},
        "parameter": {"map": nn.Parameter(matrices)},
    }[how]
    module = Attention("mine", H, **options)
    (q, k, v), leaf = qkv(), matrices.clone().requires_grad_()
    passed = {"map": leaf} if how == "given" else {}
    out = module(q, k, v, is_causal=True, **passed)
    expected = attnzoo.attention(q, k, v, "mine", is_causal=True, map=leaf, b=0.0)
    assert torch.equal(out, expected)
    names = {n for n, _ in module.named_parameters()}
    assert names == {"given": {"b"}, "fixed": {"b"}}.get(how, {"map", "b"})
    assert ("map" in module.state_dict()) == (how != "given")
    do = rand(*out.shape, seed=7)
    (gradient,) = torch.autograd.grad(expected, leaf, do)
    if "map" in names:
        assert module.map.shape == (H, D, 3)
        assert torch.allclose(torch.autograd.grad(out, module.map, do)[0], gradient)


def test_state_dict_copies_reset_and_caches() -> None:
    module = Attention("mine", H, map=start().float(), learn=("map",))
    other = Attention("mine", H, map=rand(H, D, 3).float(), learn=("map",))
    other.load_state_dict(module.state_dict())
    (q, k, v), cache = qkv(), KVCache(7)
    expected = module(q, k, v, is_causal=True)
    for one in (other, copy.deepcopy(module)):
        assert torch.equal(one(q, k, v, is_causal=True), expected)
    with torch.no_grad():
        parts = [module(*(x[:, :, s] for x in (q, k, v)), cache=cache)
                 for s in (slice(4), slice(4, 7))]  # fmt: skip
        assert torch.allclose(torch.cat(parts, dim=2), expected)
        module.map.fill_(3.0)
    module.reset_parameters()
    assert torch.equal(module.map, start().float())


def test_layers_pass_the_tensor_on() -> None:
    layer = MultiheadAttention(H * D, H, variant="mine", map=start(), learn=("map",))
    x = rand(5, 2, H * D).float()
    layer(x, x, x)[0].sum().backward()
    assert bool(layer.attend.map.grad.any())
    initial = start().float()
    model = Transformer(9, H * D, H, 2, "mine", map=initial, learn=("map",))
    model.reset_parameters()  # draws no values for the maps
    for inner in model.layers:
        assert torch.equal(inner.attend.map, initial)


def test_wrong_tensors_raise() -> None:
    for options, error, message in (
        ({}, TypeError, r"'mine' requires the parameter 'map': feature map \(H, D, 3\)"),
        ({"learn": ("map",)}, ValueError, "learn: mine's map needs an initial value, a tensor"),
        ({"map": 0.5}, TypeError, "mine's map must be a tensor, got 0.5"),
        ({"map": 0.5, "learn": ("map",)}, TypeError, "mine's map must be a tensor, got 0.5"),
        (
            {"map": torch.ones(3, D, 3)},
            ValueError,
            r"map must have shape \(4, …\), got \(3, 8, 3\)",
        ),
        ({"map": torch.ones(())}, ValueError, r"map must have shape \(4, …\), got \(\)"),
        ({"map": torch.ones(4, D, 3).long()}, TypeError, "map must be fp16, .* got torch.int64"),
        ({"map": torch.full((4, D, 3), float("inf"))}, ValueError, "map must be finite through"),
    ):
        with pytest.raises(error, match=message):
            Attention("mine", H, **options)
    with pytest.raises(TypeError, match=r"'b': size must be a function of \(D\), got \(8, 3\)"):
        register(size=(8, 3))
    for size, error, message in (
        (lambda d: [d, 3], TypeError, r"own's b: size\(D\) must be a tuple of ints, got \[8, 3\]"),
        (lambda d: d, TypeError, "own's b: .* tuple of ints, got 8"),
        (lambda d: (d, 1.5), TypeError, r"own's b: .* tuple of ints, got \(8, 1.5\)"),
        (lambda d: (d, True), TypeError, r"own's b: .* tuple of ints, got \(8, True\)"),
        (lambda d: (d, 0), ValueError, r"own's b: .* ints of at least 1, got \(8, 0\)"),
    ):
        register(size)
        with pytest.raises(error, match=message):
            attnzoo.attention(*qkv(), "own", b=torch.ones(H, D))
    module = Attention("mine", H, map=torch.ones(H, 5, 3))
    with pytest.raises(ValueError, match=r"map must have shape \(4, 8, 3\), got \(4, 5, 3\)"):
        module(*qkv())
