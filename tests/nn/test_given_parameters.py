"""Arguments of attnzoo.nn.Attention for hosts: softcap, and parameters that each call passes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import Attention, KVCache, StateCache
from helpers.cases import CASES, NO_LOGITS, VARIANTS, learned, params_of, rand
from helpers.errors import WrongCalls, raising

LEARNABLE = [v for v in VARIANTS if CASES[v].learned]


def qkv(n: int = 7) -> list[Tensor]:
    return [rand(2, 4, n, 8, seed=i) for i in range(3)]


@pytest.mark.parametrize("variant", LEARNABLE)
def test_given_parameters_equal_those_of_a_call(variant: str) -> None:
    """Values and gradients are those of `attention`, and the module has no parameters."""
    params = {name: x.requires_grad_() for name, x in learned(variant, 4).items()}
    fixed = {name: x for name, x in params_of(variant).items() if name not in params}
    module = Attention(variant, 4, given=tuple(params), **fixed)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    q, k, v = qkv()
    out = module(q, k, v, is_causal=True, **params)
    expected = attnzoo.attention(q, k, v, variant, is_causal=True, **fixed, **params)
    assert torch.equal(out, expected)
    do, leaves = rand(*out.shape, seed=5), list(params.values())
    pairs = (torch.autograd.grad(x, leaves, do) for x in (out, expected))
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    _, weights = module(q, k, v, need_weights=True, **params)
    assert torch.equal(weights, attnzoo.attention_weights(q, k, v, variant, **fixed, **params))


def test_a_given_parameter_beside_learned_ones() -> None:
    module = Attention("asentmax", 4, given=["gamma"], learn=("beta",), delta=0.5)
    assert module.given == ("gamma",)
    assert [name for name, _ in module.named_parameters()] == ["beta"]
    assert repr(module) == (
        "Attention('asentmax', num_heads=4, beta=0.6931 (learned), delta=0.5, extra=0, scaled=1.0, "
        "given=('gamma',))"
    )
    per_token = rand(2, 4, 7, seed=3)
    q, k, v = qkv()
    expected = attnzoo.attention(
        q, k, v, "asentmax", beta=module.beta, gamma=per_token, delta=0.5, backend="eager"
    )
    for other in (module, pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(q, k, v, gamma=per_token, backend="eager"), expected)


def test_default_learned_parameters_can_be_given() -> None:
    assert list(Attention("ssmax", 4, given=("s",)).parameters()) == []
    assert Attention("ssmax", 4).given == ()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in NO_LOGITS])
def test_softcap_applies_to_each_call(variant: str) -> None:
    module = Attention(variant, 4, softcap=2, **params_of(variant))
    assert module.softcap == 2.0
    described = repr(module).split("\n  (parametrizations)")[0].removesuffix(")")
    assert described.endswith(", softcap=2.0")
    q, k, v = (3 * x for x in qkv())
    expected = attnzoo.attention(q, k, v, variant, is_causal=True, softcap=2.0, **module._params())
    assert torch.equal(module(q, k, v, is_causal=True), expected)
    assert not torch.allclose(
        expected, attnzoo.attention(q, k, v, variant, is_causal=True, **module._params())
    )
    cache = module.new_cache(7)
    assert isinstance(cache, KVCache)
    with torch.no_grad():
        parts = [module(*(x[:, :, s] for x in (q, k, v)), cache=cache)
                 for s in (slice(4), slice(4, 7))]  # fmt: skip
    assert torch.allclose(torch.cat(parts, dim=2), expected, atol=1e-6)


@pytest.mark.slow
def test_a_host_passes_its_sinks_in_one_compiled_graph() -> None:
    module = Attention("sink", 4, given=("b",), softcap=30.0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    (q, k, v), sinks = qkv(), rand(4, seed=6)
    expected = module(q, k, v, is_causal=True, b=sinks)
    assert torch.allclose(compiled(q, k, v, is_causal=True, b=sinks), expected)


Q = rand(2, 4, 3, 8)
WRONG: WrongCalls = [
    (lambda: Attention("sink", 4, softcap=0), ValueError, "softcap must be a number above 0 .*0"),
    (lambda: Attention("sink", 4, softcap="x"), TypeError, "softcap must be a .* None, got 'x'"),  # type: ignore
    (lambda: Attention("sink", 4, given="b"), TypeError, "given must be a tuple of names, got 'b'"),  # type: ignore
    (lambda: Attention("sink", 4, given=None), TypeError, "given must be a tuple .*, got None"),  # type: ignore
    (
        lambda: Attention("sink", 4, given=("c",)),
        ValueError,
        r"given must name parameters of 'sink' that may be tensors \(b\), got 'c'",
    ),
    (
        lambda: Attention("topk", 4, given=("top_k",)),
        ValueError,
        r"given must name parameters of 'topk' that may be tensors \(none\), got 'top_k'",
    ),
    (
        lambda: Attention("sink", 4, given=("b", "b")),
        ValueError,
        r"given must name each parameter once, got \('b', 'b'\)",
    ),
    (
        lambda: Attention("sink", 4, given=("b",), learn=("b",)),
        ValueError,
        "learn and given must not share a parameter, got 'b' in both",
    ),
    (
        lambda: Attention("sink", 4, given=("b",), b=1.0),
        TypeError,
        r"sink's b must not have a value in the constructor: .* given is \('b',\)",
    ),
    (
        lambda: Attention("sink", 4, given=("b",))(Q, Q, Q),
        TypeError,
        r"sink's b must be passed to forward, because given is \('b',\)",
    ),
    (
        lambda: Attention("sink", 4)(Q, Q, Q, b=torch.ones(4)),
        TypeError,
        "b must not be passed to forward: it is set in the constructor",
    ),
    (
        lambda: Attention("sink", 4, given=("b",))(Q, Q, Q, b=torch.ones(3)),
        ValueError,
        r"sink's b must have shape \(\) or \(4,\) or .*, got \(3,\)",
    ),
    (
        lambda: Attention("sink", 4)(Q, Q, Q, softcap=3.0),
        TypeError,
        "softcap must not be passed to forward: it is set in the constructor",
    ),
    (
        lambda: Attention("taylor", 4, softcap=3.0).new_cache(4, "state"),
        ValueError,
        "got 'state': 'taylor' has no state with a softcap",
    ),
    (
        lambda: Attention("taylor", 4, softcap=3.0)(Q, Q, Q, cache=StateCache()),
        ValueError,
        "softcap must be None with a StateCache, got 3.0",
    ),
]


test_wrong_arguments_raise = raising(WRONG)
