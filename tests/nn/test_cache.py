"""Decoding with a cache gives the outputs of one call over the whole sequence.

`KVCache` is tested with all variants (masks, windows, segments, ALiBi, grouped heads), `StateCache`
with the variants that have a state. Further tests cover cropping, reordering and errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import Attention, Cache, KVCache, StateCache, attend
from helpers.cases import ALL_VARIANTS, NO_SCORE, learned, mark_expensive, params_of, rand
from helpers.crossed import crossed

LENGTH = 13
PIECES = [5, 1, 3, 1, 1, 1, 1]  # tokens per decoding call
every_variant = pytest.mark.parametrize("variant", ALL_VARIANTS)


def params(variant: str) -> dict[str, Any]:
    return {**params_of(variant, 64), **learned(variant, 4)}


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Return random q, k and v for three sequences."""
    shapes = (3, heads, LENGTH, 8), (3, kv_heads, LENGTH, 8), (3, kv_heads, LENGTH, 6)
    return [rand(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(PIECES, dim=2)


def decoded(cache: Cache, variant: str, tensors: list[Tensor], **options: Any) -> Tensor:
    """Decode in pieces, with masks and segment ids per piece, and return (B, H, N, Dv)."""
    out, length = [], 0
    for q, k, v in zip(*map(pieces, tensors), strict=True):
        length += q.shape[2]
        current = dict(options)
        if "attn_mask" in current:
            mask = current["attn_mask"][..., :length]
            current["attn_mask"] = (
                mask if mask.shape[2] == 1 else mask[:, :, length - q.shape[2] : length]
            )
        if "segment_ids" in current:
            ids = current["segment_ids"]
            current["segment_ids"] = ids[:, length - q.shape[2] : length], ids[:, :length]
        out.append(attend(cache, q, k, v, variant, enable_gqa=True, **params(variant), **current))
        assert cache.length == length
    return torch.cat(out, dim=2)


def in_one_call(variant: str, tensors: list[Tensor], **options: Any) -> Tensor:
    return attnzoo.attention(
        *tensors, variant, is_causal=True, enable_gqa=True, backend="eager", **params(variant),
        **options,
    )  # fmt: skip


def left_padding() -> Tensor:
    """Return a key mask that hides the first 0, 4 and 7 tokens of the three sequences."""
    keys = torch.arange(LENGTH)
    return torch.stack([keys >= pad for pad in (0, 4, 7)])[:, None, None]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left padding": {"attn_mask": left_padding()},
    "dense mask": {"attn_mask": (rand(3, 1, LENGTH, LENGTH, seed=8) > -1.0)},
    "window": {"window": 4},
    "alibi": {"alibi": torch.linspace(0.1, 0.7, 4)},
    "segments": {"segment_ids": torch.arange(LENGTH).floor_divide(6).expand(3, LENGTH)},
}
STATE_OPTIONS = ("plain", "left padding")
STATES = [
    v
    for v in ALL_VARIANTS
    if Attention(v, 4, learn=(), **params_of(v)).new_cache(1).__class__ is StateCache
]


# Variants without a score do not support ALiBi.
CALLS = [
    case
    for case in crossed(mark_expensive(ALL_VARIANTS), OPTIONS)
    if case.values[1] != "alibi" or case.values[0] not in NO_SCORE
]


@pytest.mark.parametrize(("variant", "option"), CALLS)
def test_kv_cache_equals_one_call(variant: str, option: str) -> None:
    tensors = qkv()
    out = decoded(KVCache(LENGTH), variant, tensors, **OPTIONS[option])
    assert torch.allclose(out, in_one_call(variant, tensors, **OPTIONS[option]), atol=1e-6)


@pytest.mark.parametrize("option", STATE_OPTIONS)
@pytest.mark.parametrize("variant", STATES)
def test_state_cache_equals_one_call(variant: str, option: str) -> None:
    tensors = qkv()
    out = decoded(StateCache(), variant, tensors, **OPTIONS[option])
    assert torch.allclose(out, in_one_call(variant, tensors, **OPTIONS[option]), atol=1e-9)


@pytest.mark.parametrize("make", [lambda: KVCache(LENGTH), StateCache])
def test_mask_that_does_not_cover_all_keys_raises(make: Any) -> None:
    """A key mask of length 1 must raise, because it would broadcast over all keys."""
    cache, (q, k, v) = make(), qkv()
    attend(cache, *(x[:, :, :4] for x in (q, k, v)), "taylor", enable_gqa=True)
    token = [x[:, :, 4:5] for x in (q, k, v)]
    for n in (1, 4):
        mask = torch.ones(3, 1, 1, n, dtype=torch.bool)
        with pytest.raises(ValueError, match="attn_mask must cover all 5 keys so far"):
            attend(cache, *token, "taylor", attn_mask=mask, enable_gqa=True)
    assert cache.length == 4


def test_a_head_dimension_of_0_raises() -> None:
    q, k, v = qkv()
    for cache in (StateCache(), KVCache(LENGTH)):
        with pytest.raises(ValueError, match="head dimension of at least 1"):
            attend(cache, q[..., :0], k[..., :0], v, "taylor", enable_gqa=True)


def test_state_cache_with_changed_arguments_raises() -> None:
    cache, tensors = StateCache(), qkv()
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(9), slice(9, None)))
    attend(cache, *first, "cosformer", max_length=64, enable_gqa=True)
    for changed, message in (
        ({"max_length": 128}, "max_length must be 64 as in the first call.*, got 128"),
        ({"max_length": 64, "scale": 3.0}, "scale must be 0.35.* as in the first.*, got 3.0"),
        ({}, "variant must be 'cosformer' as in .*, got 'taylor'"),
    ):
        variant = "cosformer" if changed else "taylor"
        with pytest.raises(ValueError, match=message):
            attend(cache, *last, variant, enable_gqa=True, **changed)
    cache.crop(0)
    attend(cache, *first, "cosformer", max_length=128, enable_gqa=True)


def test_both_caches_accept_default_values_of_keywords() -> None:
    q, k, v = (x[:, :2] for x in qkv())
    defaults = {"dropout_p": 0.0, "window": None, "return_lse": False, "backend": None}
    outs = [
        attend(cache, q, k, v, "taylor", **defaults) for cache in (KVCache(LENGTH), StateCache())
    ]
    assert torch.allclose(*outs)
    with pytest.raises(ValueError, match="dropout_p must be 0.0 with a StateCache, got 0.1"):
        attend(StateCache(), q, k, v, "taylor", dropout_p=0.1)


def test_state_cache_with_equal_arguments_in_other_words() -> None:
    (q, k, v), cache = (x[:, :2] for x in qkv()), StateCache()
    scale = q.shape[-1] ** -0.5
    for params in ({"order": 2}, {}, {"order": np.int64(2), "scale": scale}, {"scale": None}):
        out = attend(cache, q, k, v, "taylor", **params)
    twice = [torch.cat([x, x, x, x], dim=2) for x in (q, k, v)]
    assert torch.allclose(out, in_one_call("taylor", twice)[:, :, 3 * LENGTH :])


def test_rollback_to_a_saved_state() -> None:
    tensors, cache = [x[:, :2] for x in qkv()], StateCache()
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(9), slice(9, None)))
    attend(cache, *first, "taylor", scale=0.3)
    saved = cache.state
    expected = attend(cache, *last, "taylor", scale=0.3)
    for rolled_back in (cache, StateCache()):
        rolled_back.state = saved
        assert rolled_back.length == 9
        assert torch.equal(attend(rolled_back, *last, "taylor", scale=0.3), expected)
    cache.state = None
    assert cache.length == 0
    attend(cache, *first, "cosformer", max_length=64)


def test_prefill_in_inference_mode_then_decode_outside() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    with torch.inference_mode():
        attend(cache, *(x[:, :, :9] for x in tensors), "softmax", enable_gqa=True)
        cache.reorder(torch.tensor([1, 0, 2]))
        cache.reorder(torch.tensor([1, 0, 2]))
    out = attend(cache, *(x[:, :, 9:] for x in tensors), "softmax", enable_gqa=True)
    assert torch.allclose(out, in_one_call("softmax", tensors)[:, :, 9:])


@every_variant
def test_module_with_cache_equals_module_without(variant: str) -> None:
    module = Attention(variant, 4, head_dim=8, **params(variant)).double()
    tensors = qkv()
    cache = module.new_cache(LENGTH)
    with torch.no_grad():
        expected = module(*tensors, is_causal=True, enable_gqa=True, backend="eager")
        outs = [
            module(q, k, v, cache=cache, enable_gqa=True)
            for q, k, v in zip(*map(pieces, tensors), strict=True)
        ]
    assert torch.allclose(torch.cat(outs, dim=2), expected, atol=1e-6)


def test_lse_with_cache_equals_that_of_one_call() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    _, expected = in_one_call("sink", tensors, return_lse=True)
    parts = [
        attend(cache, q, k, v, "sink", return_lse=True, enable_gqa=True, **params("sink"))[1]
        for q, k, v in zip(*map(pieces, tensors), strict=True)
    ]
    assert torch.allclose(torch.cat(parts, dim=2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cache_keeps_the_dtype_of_keys_and_values(dtype: torch.dtype) -> None:
    tensors, cache = qkv(dtype), KVCache(20)
    decoded(cache, "softmax", tensors)
    assert cache.keys is not None
    assert torch.equal(cache.keys, tensors[1])
    assert torch.equal(cache.values, tensors[2])


# ---- crop and reorder -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 9, LENGTH])
def test_decoding_after_crop_ignores_cropped_keys(length: int) -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    decoded(cache, "ssmax", [rand(*x.shape, seed=9) for x in tensors])
    cache.crop(0)
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(length), slice(length, None)))
    attend(cache, *first, "ssmax", enable_gqa=True)
    draft = [rand(*x.shape, seed=7) for x in last]
    attend(cache, *draft, "ssmax", enable_gqa=True)
    cache.crop(length)
    out = attend(cache, *last, "ssmax", enable_gqa=True)
    expected = attnzoo.attention(*tensors, "ssmax", is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected[:, :, length:])


def test_cache_cropped_to_zero_accepts_another_batch() -> None:
    cache = KVCache(LENGTH)
    decoded(cache, "softmax", qkv())
    cache.crop(0)
    q, k, v = (x[:1, :2].float() for x in qkv())
    assert attend(cache, q, k, v, "softmax").dtype == torch.float32


def test_state_cache_crops_to_zero_or_its_length_only() -> None:
    cache = StateCache()
    expected = decoded(cache, "taylor", qkv())
    cache.crop(LENGTH)
    with pytest.raises(ValueError, match=r"length must be 0 or 13, got 5: a state does not keep"):
        cache.crop(5)
    cache.crop(0)
    assert torch.equal(decoded(cache, "taylor", qkv()), expected)


@pytest.mark.parametrize(
    ("variant", "make"), [("ssmax", lambda: KVCache(20)), ("taylor", StateCache)]
)
def test_reorder_for_beam_search(variant: str, make: Any) -> None:
    """Five beams continue three sequences; the next output equals attention without a cache."""
    cache, tensors = make(), qkv()
    decoded(cache, variant, tensors)
    index = torch.tensor([2, 0, 0, 1, 2])
    cache.reorder(index)
    token = [rand(5, x.shape[1], 1, x.shape[3], seed=20 + i) for i, x in enumerate(tensors)]
    out = attend(cache, *token, variant, enable_gqa=True)
    longer = [torch.cat([x[index], t], dim=2) for x, t in zip(tensors, token, strict=True)]
    expected = attnzoo.attention(*longer, variant, is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected[:, :, -1:])


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "variant"), [(lambda: KVCache(8), "ssmax"), (StateCache, "taylor")]
)
@pytest.mark.parametrize("wrong", [-1, 3])
def test_reorder_out_of_range_raises(make: Any, variant: str, wrong: int) -> None:
    cache = make()
    attend(cache, *(rand(3, 2, 4, 8, seed=i) for i in range(3)), variant)
    with pytest.raises(ValueError, match=f"index must hold .* from 0 to 2, got {wrong}"):
        cache.reorder(torch.tensor([0, wrong, 1]))
    assert cache.length == 4


def test_full_cache_raises() -> None:
    cache = KVCache(4)
    q, k, v = (x[:, :2, :3] for x in qkv())
    attend(cache, q, k, v, "softmax")
    with pytest.raises(
        ValueError, match="cache is full: 3 tokens do not fit after 3 of max_length=4"
    ):
        attend(cache, q, k, v, "softmax")
    assert cache.length == 3


def test_failed_call_appends_nothing() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(9), slice(9, None)))
    attend(cache, *first, "softmax", enable_gqa=True)
    with pytest.raises(ValueError, match="unknown variant"):
        attend(cache, *(-x for x in last), "softmaxx", enable_gqa=True)
    with pytest.raises(
        ValueError, match="q and k must hold the same number of tokens, got 4 and 3"
    ):
        attend(cache, last[0], last[1][:, :, 1:], last[2][:, :, 1:], "softmax", enable_gqa=True)
    assert cache.length == 9
    out = attend(cache, *last, "softmax", enable_gqa=True)
    assert torch.allclose(out, in_one_call("softmax", tensors)[:, :, 9:])


def test_attention_over_keys_returned_by_update_equals_one_call() -> None:
    (q, k, v), cache = qkv(), KVCache(LENGTH)
    for part in (slice(0, 9), slice(9, LENGTH)):
        keys, values = cache.update(k[:, :, part], v[:, :, part])
    assert cache.length == LENGTH
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = attnzoo.attention(q[:, :, 9:], keys, values, "ssmax", **options)
    assert torch.allclose(out, attnzoo.attention(q, k, v, "ssmax", **options)[:, :, 9:])
    with pytest.raises(ValueError, match="13 tokens do not fit after 13 of max_length=13"):
        cache.update(k, v)
    assert cache.length == LENGTH


def test_failed_first_call_does_not_fix_the_shape() -> None:
    cache = KVCache(LENGTH)
    with pytest.raises(ValueError, match="unknown variant"):
        attend(cache, *(x.float() for x in qkv()), "softmaxx", enable_gqa=True)
    decoded(cache, "softmax", qkv())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": lambda k: k[:2]}, ValueError, r"k must be \(3, 2, 1, 8\) torch.float64 on cpu"),
        ({"v": lambda v: v.float()}, ValueError, r"v must be .* got \(3, 2, 1, 6\) torch.float32"),
        ({"k": lambda k: k[0]}, ValueError, r"k must have shape \(B, Hkv, N, D\)"),
        ({"v": lambda v: None}, TypeError, "v must be a tensor, got NoneType"),
        ({"k": lambda k: k.clone().requires_grad_()}, ValueError, "k requires a gradient"),
        ({"q": lambda q: q.clone().requires_grad_()}, ValueError, "q requires a gradient"),
        ({"is_causal": False}, ValueError, "is_causal must be True with a cache"),
    ],
)
def test_wrong_argument_of_a_cached_call_raises(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = KVCache(LENGTH)
    decoded(cache, "softmax", [x[:, :, : sum(PIECES)] for x in qkv()])
    cache.crop(LENGTH - 1)
    tensors = dict(zip("qkv", (x[:, :, -1:] for x in qkv()), strict=True))
    options: dict[str, Any] = {"enable_gqa": True}
    for name, change in changed.items():
        if name in tensors:
            tensors[name] = change(tensors[name])
        else:
            options[name] = change
    with pytest.raises(error, match=message):
        attend(cache, tensors["q"], tensors["k"], tensors["v"], "softmax", **options)
    assert cache.length == LENGTH - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: KVCache(0), ValueError, "max_length must be an int .* 1, got 0"),
        (lambda: KVCache(True), ValueError, "max_length must be an int"),
        (lambda: KVCache(4).crop(1), ValueError, "length must be an int from 0 to 0"),
        (lambda: StateCache().crop(-1), ValueError, "length must be an int from 0 to 0"),
        (lambda: KVCache(4).reorder([0]), TypeError, "index must be an int32 or int64 tensor"),
        (lambda: StateCache().reorder(torch.zeros(2)), TypeError, "got torch.float32"),
        (lambda: setattr(StateCache(), "state", 3), TypeError, "state must be a LinearState or"),
        (lambda: KVCache(4).reorder(torch.zeros(2, 2).long()), ValueError, r"shape \(B,\)"),
        (lambda: Attention("ssmax", 2).new_cache(4, "state"), ValueError, "'ssmax' has no state"),
        (lambda: Attention("ssmax", 2).new_cache(4, "kv"), ValueError, "kind must be 'keys'"),
        (lambda: Attention("taylor", 2).new_cache(0), ValueError, "max_length must be an int"),
        (
            lambda: Attention("ssmax", 4)(*qkv(), cache={}, enable_gqa=True),
            TypeError,
            "cache must be a KVCache or a StateCache, got dict",
        ),
    ],
)
def test_wrong_arguments_raise(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_state_cache_with_unsupported_arguments_raises() -> None:
    q, k, v = (x[:, :2] for x in qkv())
    for options, message in (
        ({"window": 3}, "window must be None with a StateCache, got 3"),
        ({"return_lse": 0}, "return_lse must be False with a StateCache, got 0"),
        ({"return_max_logits": None}, "return_max_logits must be False .*, got None"),
        ({"dropout_p": False}, "dropout_p must be 0.0 with a StateCache, got False"),
        (
            {"attn_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)},
            "does not support a dense mask",
        ),
    ):
        cache = StateCache()
        with pytest.raises((ValueError, TypeError), match=message):
            attend(cache, q, k, v, "taylor", **options)
        assert cache.length == 0


def test_new_cache_is_a_state_where_possible() -> None:
    """Among the orders of taylor, only order 2 has a linear form and so a StateCache."""
    assert {"cosformer", "taylor"} <= set(STATES)
    assert isinstance(Attention("taylor", 2, order=4).new_cache(9), KVCache)
    assert isinstance(Attention("taylor", 2).new_cache(9, "keys"), KVCache)
    assert repr(Attention("entmax", 2).new_cache(9)) == "KVCache(max_length=9, length=0)"


def test_state_cache_is_differentiable() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    out = decoded(StateCache(), "taylor", leaves)
    expected = in_one_call("taylor", leaves)
    do = rand(*expected.shape, seed=6)
    pairs = (torch.autograd.grad(x, leaves, do) for x in (out, expected))
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))
