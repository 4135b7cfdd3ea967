"""The cache of validated calls: repeated calls give the results and errors of a first call."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import attnzoo
from attnzoo.core import registry
from attnzoo.core.activations import EXP, RELU2
from attnzoo.functional import call_cache
from helpers.cases import VARIANTS, params_of, rand
from helpers.crossed import crossed


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_CACHE", {})


def qkv(n: int = 7, queries: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (rand(1, 2, n, 8, seed=seed + i).float() for i in range(3))
    return q[:, :, : queries or n], k, v


LAYOUTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.arange(49).view(7, 7) % 3 != 1},
    "window": {"window": (2, 1)},
    "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2]])},
}
# Calls with segments are not cached on a CPU, because the ids decide how they are split.
ENTRIES = {layout: int(layout != "segments") for layout in LAYOUTS}


@pytest.mark.parametrize(("variant", "layout"), crossed(VARIANTS, LAYOUTS))
def test_cached_call_gives_the_results_of_a_new_call(variant: str, layout: str) -> None:
    """The first call, which fills the cache, has other tensor values than the repeated call."""
    options = {**params_of(variant), **LAYOUTS[layout]}

    def attend() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in qkv(seed=5)]
        out = attnzoo.attention(*leaves, variant, **options)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = attend()
    call_cache._CACHE.clear()
    others = [x.requires_grad_() for x in qkv(seed=9)]
    attnzoo.attention(*others, variant, **options)
    assert len(call_cache._CACHE) == ENTRIES[layout]
    for have, want in zip(attend(), expected, strict=True):
        assert torch.equal(have, want)
    assert len(call_cache._CACHE) == ENTRIES[layout]


@pytest.mark.parametrize(
    ("variant", "good", "bad"),
    [
        ("softmax", {"is_causal": True}, {"is_causal": 1}),
        ("softmax", {"dropout_p": 0.0}, {"dropout_p": False}),
        ("softmax", {"scale": 1.0}, {"scale": True}),
        ("softmax", {"window": (1, 0)}, {"window": (True, False)}),
        ("topk", {"top_k": 1}, {"top_k": True}),
        ("topk", {"top_k": 2}, {"top_k": 2.0}),
        ("top_p", {"p": 1.0}, {"p": True}),
        ("ssmax", {"s": torch.ones(2)}, {"s": torch.tensor([1.0, math.nan])}),
        ("entmax", {"alpha": torch.full((2,), 1.5)}, {"alpha": torch.full((2,), 2.5)}),
        ("softmax", {"alibi": torch.ones(2)}, {"alibi": torch.tensor([1.0, math.inf])}),
        (
            "softmax",
            {"relative_bias": torch.ones(2, 3)},
            {"relative_bias": torch.full((2, 3), math.inf)},
        ),
        ("softmax", {}, {"backend": "none such"}),
        ("softmax", {}, {"return_lse": None}),
    ],
)
def test_wrong_argument_raises_after_a_similar_valid_call(
    variant: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    attnzoo.attention(*qkv(), variant, **good)
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        attnzoo.attention(*qkv(), variant, **bad)


def test_mask_values_are_not_cached() -> None:
    q, k, v = qkv()
    for seed in range(2):
        mask = rand(7, 7, seed=seed) > 0
        assert torch.equal(
            attnzoo.attention(q, k, v, "sigmoid", attn_mask=mask),
            attnzoo.attention(q, k, v, "sigmoid", attn_mask=mask, backend="eager"),
        )


def test_grad_mode_and_inference_mode_are_respected() -> None:
    q, k, v = qkv()
    s = torch.full((2,), 0.3, requires_grad=True)
    with torch.inference_mode():
        attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True)
    with torch.no_grad():
        assert not attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True).requires_grad
    out = attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True)
    assert torch.autograd.grad(out.square().sum(), s)[0].abs().min() > 0


def test_autocast_is_respected() -> None:
    q, k, v = qkv()
    assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.bfloat16
    assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.float32


def test_compiled_and_fake_calls_do_not_disturb_the_cache() -> None:
    q, k, v = qkv()
    expected = attnzoo.attention(q, k, v, "log_n", is_causal=True)
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(q, k, v, "log_n", is_causal=True), expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert attnzoo.attention(*fake, "log_n", is_causal=True).shape == expected.shape
    assert torch.equal(attnzoo.attention(q, k, v, "log_n", is_causal=True), expected)


def test_vmap_of_a_cached_call_gives_the_same_output() -> None:
    q, k, v = qkv()
    one = attnzoo.attention(q, k, v, "entmax", backend="eager")
    many = torch.func.vmap(lambda x: attnzoo.attention(x, k, v, "entmax", backend="eager"))
    assert torch.allclose(many(q[None])[0], one, atol=1e-6)


def test_replaced_variant_is_not_served_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    q, k, v = qkv()

    def register(factor: float) -> None:
        def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
            return factor * call.softmax(call.scores(q, k))

        registry._VARIANTS.pop("own", None)
        attnzoo.register_variant(attnzoo.Variant("own", "f", "p", weights))

    register(1.0)
    once = attnzoo.attention(q, k, v, "own")
    register(2.0)
    assert torch.allclose(attnzoo.attention(q, k, v, "own"), 2 * once)


def test_writing_into_cached_counts_does_not_change_later_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.scores(q, k) / call.counts.mul_(2.0)[..., None]

    attnzoo.register_variant(attnzoo.Variant("writing", "f", "p", weights, normalized=False))
    q, k, v = qkv()
    outs = [attnzoo.attention(q, k, v, "writing") for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def add(name: str, weights: Any, **fields: Any) -> None:
    attnzoo.register_variant(attnzoo.Variant(name, "f", "p", weights, **fields))


@pytest.mark.usefixtures("own_registry")
def test_checkpoint_of_a_form_with_learned_features_gives_the_same_gradients() -> None:
    """The recomputed forward uses the cache and must save as many tensors as the first one."""
    a = rand(8, 4).float().requires_grad_()

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        e = a.exp()
        w = call.zero_hidden((call.scale * q @ e).exp() @ (k @ e).exp().mT)
        return w / w.sum(-1, keepdim=True)

    def forms(call: Any) -> tuple[attnzoo.Linear]:
        made = a.exp()
        return (attnzoo.Linear(lambda x, at: (x @ made).exp(), lambda size: 4),)

    add("learned_features", weights, forms=forms)
    q, k, v = (x.requires_grad_() for x in qkv())

    def attend(q: Tensor) -> Tensor:
        return attnzoo.attention(q, k, v, "learned_features", is_causal=True)

    once = torch.autograd.grad(attend(q).square().sum(), (q, a))
    call_cache._CACHE.clear()
    out: Any = checkpoint(attend, q, use_reentrant=False)
    for have, want in zip(torch.autograd.grad(out.square().sum(), (q, a)), once, strict=True):
        assert torch.allclose(have, want)


@pytest.mark.usefixtures("own_registry")
def test_vector_gets_a_gradient_if_requires_grad_is_set_after_the_first_call() -> None:
    gain = torch.full((1, 2, 1), 0.7)

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.softmax(gain[..., None] * call.scores(q, k))

    add("thawed", weights, forms=lambda call: (attnzoo.Pairwise(EXP, "sum", gain=gain),))
    q, k, v = (x.requires_grad_() for x in qkv())
    attnzoo.attention(q, k, v, "thawed")
    gain.requires_grad_()
    out = attnzoo.attention(q, k, v, "thawed")
    assert torch.autograd.grad(out.square().sum(), gain)[0].abs().min() > 0


@pytest.mark.usefixtures("own_registry")
def test_changed_forms_are_validated_again() -> None:
    forms: list[Any] = [attnzoo.Pairwise(EXP, "sum")]
    add("fickle", lambda q, k, call: call.softmax(call.scores(q, k)), forms=lambda c: tuple(forms))
    q, k, v = qkv()
    expected = attnzoo.attention(q, k, v, "fickle")
    forms.clear()
    assert torch.allclose(attnzoo.attention(q, k, v, "fickle"), expected, atol=1e-6)
    forms.append(attnzoo.Pairwise(EXP, "sum", gain=torch.ones(5)))
    with pytest.raises(ValueError, match="gain must be a float or a float tensor"):
        attnzoo.attention(q, k, v, "fickle")


@pytest.mark.parametrize("wrong", [{"variant": ["softmax"]}, {"backend": ["sdpa"]}])
def test_unhashable_arguments_raise_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        attnzoo.attention(*qkv(), **wrong)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_call_is_not_cached() -> None:
    q, k, v = qkv()
    torch.jit.trace(
        lambda q, k, v: attnzoo.attention(q, k, v, "ssmax"), (q, k, v), check_trace=False
    )
    assert not call_cache._CACHE


def test_cache_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_ENTRIES", 3)
    for n in range(1, 9):
        attnzoo.attention(*qkv(n), "ssmax", is_causal=True)
        assert len(call_cache._CACHE) <= 3


@pytest.mark.parametrize("backend", ["tiled", pytest.param("flash", marks=pytest.mark.interpreter)])
def test_activations_made_in_each_call_share_an_entry_and_are_freed(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations = []

    def forms(call: attnzoo.Call) -> tuple[attnzoo.Pairwise, ...]:
        made = attnzoo.Activation("each call", RELU2.value, RELU2.slope, triton=RELU2.triton)
        activations.append(weakref.ref(made))
        return (attnzoo.Pairwise(made, "none", offset=0.1),)

    def weights(q: Tensor, k: Tensor, call: attnzoo.Call) -> Tensor:
        return call.zero_hidden((call.scores(q, k) - 0.1).relu() ** 2)

    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))
    attnzoo.register_variant(
        attnzoo.Variant("each_call", "ReLU²", "none", weights, forms=forms, normalized=False)
    )
    for _ in range(5):
        attnzoo.attention(*qkv(), "each_call", backend=backend)
    assert len(call_cache._CACHE) == 1
    call_cache._CACHE.clear()
    gc.collect()
    assert not any(activation() for activation in activations)
