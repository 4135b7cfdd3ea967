"""Calls that were checked before are looked up: with the results and errors of a first call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnzoo
from attnzoo.core import registry
from attnzoo.functional import known_calls
from helpers.cases import VARIANTS, params_of, rand


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_KNOWN", {})


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_call_gives_what_a_new_one_gives(variant: str, layout: str) -> None:
    """With other values in its tensors, forward and backward."""
    options = {**params_of(variant), **LAYOUTS[layout]}

    def run() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in qkv(seed=5)]
        out = attnzoo.attention(*leaves, variant, **options)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = run()
    known_calls._KNOWN.clear()
    others = [x.requires_grad_() for x in qkv(seed=9)]
    attnzoo.attention(*others, variant, **options)
    assert len(known_calls._KNOWN) == 1
    for have, want in zip(run(), expected, strict=True):
        assert torch.equal(have, want)
    assert len(known_calls._KNOWN) == 1


@pytest.mark.parametrize(
    ("variant", "good", "bad"),
    [
        ("softmax", {"is_causal": True}, {"is_causal": 1}),
        ("softmax", {"dropout_p": 0.0}, {"dropout_p": False}),
        ("softmax", {"scale": 1.0}, {"scale": True}),
        ("softmax", {"window": (1, 0)}, {"window": (True, False)}),
        ("topk", {"top_k": 1}, {"top_k": True}),
        ("topk", {"top_k": 2}, {"top_k": 2.0}),
        ("ssmax", {"s": torch.ones(2)}, {"s": torch.tensor([1.0, math.nan])}),
        ("entmax", {"alpha": torch.full((2,), 1.5)}, {"alpha": torch.full((2,), 2.5)}),
        ("softmax", {"alibi": torch.ones(2)}, {"alibi": torch.tensor([1.0, math.inf])}),
        ("softmax", {}, {"backend": "none such"}),
        ("softmax", {}, {"return_lse": None}),
    ],
)
def test_what_equals_a_good_argument_is_no_good_one(
    variant: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    attnzoo.attention(*qkv(), variant, **good)
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        attnzoo.attention(*qkv(), variant, **bad)


def test_a_mask_is_read_anew() -> None:
    q, k, v = qkv()
    for seed in range(2):
        mask = rand(7, 7, seed=seed) > 0
        assert torch.equal(
            attnzoo.attention(q, k, v, "sigmoid", attn_mask=mask),
            attnzoo.attention(q, k, v, "sigmoid", attn_mask=mask, backend="eager"),
        )


def test_grad_mode_and_inference_mode() -> None:
    q, k, v = qkv()
    s = torch.full((2,), 0.3, requires_grad=True)
    with torch.inference_mode():
        attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True)
    with torch.no_grad():
        assert not attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True).requires_grad
    out = attnzoo.attention(q, k, v, "ssmax", s=s, is_causal=True)
    assert torch.autograd.grad(out.square().sum(), s)[0].abs().min() > 0


def test_autocast() -> None:
    q, k, v = qkv()
    assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.bfloat16
    assert attnzoo.attention(q, k, v, "ssmax").dtype == torch.float32


def test_compiled_and_fake_calls_come_between() -> None:
    q, k, v = qkv()
    expected = attnzoo.attention(q, k, v, "log_n", is_causal=True)
    compiled = torch.compile(attnzoo.attention, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(q, k, v, "log_n", is_causal=True), expected)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert attnzoo.attention(*fake, "log_n", is_causal=True).shape == expected.shape
    assert torch.equal(attnzoo.attention(q, k, v, "log_n", is_causal=True), expected)


def test_a_transform_of_a_known_call() -> None:
    q, k, v = qkv()
    one = attnzoo.attention(q, k, v, "entmax", backend="eager")
    many = torch.func.vmap(lambda x: attnzoo.attention(x, k, v, "entmax", backend="eager"))
    assert torch.allclose(many(q[None])[0], one, atol=1e-6)


def test_a_name_that_is_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_variant_that_writes_into_the_counts_spoils_no_other_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))

    def weights(q: Tensor, k: Tensor, call: Any) -> Tensor:
        return call.scores(q, k) / call.counts.mul_(2.0)[..., None]

    attnzoo.register_variant(attnzoo.Variant("rude", "f", "p", weights, normalized=False))
    q, k, v = qkv()
    outs = [attnzoo.attention(q, k, v, "rude") for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST", 3)
    for n in range(1, 9):
        attnzoo.attention(*qkv(n), "ssmax", is_causal=True)
        assert len(known_calls._KNOWN) <= 3
