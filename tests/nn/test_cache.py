"""Decoding: prefill in pieces and token by token give the rows of the whole call, in every variant.

Both caches, with what a whole call may have: padding on the left, windows, segments, ALiBi, groups
of heads. And what a cache is for besides: to go back, to reorder beams, to say when it is full.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.nn import Attention, Cache, KVCache, StateCache, attend
from helpers.cases import NO_SCORE, VARIANTS, learned, params_of, rand

LENGTH = 13
PIECES = [5, 1, 3, 1, 1, 1, 1]  # a prefill in two parts, then tokens; the second part is one too
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def params(variant: str) -> dict[str, Any]:
    return {**params_of(variant, 64), **learned(variant, 4)}


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Three sequences; what they hold differs."""
    shapes = (3, heads, LENGTH, 8), (3, kv_heads, LENGTH, 8), (3, kv_heads, LENGTH, 6)
    return [rand(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(PIECES, dim=2)


def decoded(cache: Cache, variant: str, tensors: list[Tensor], **options: Any) -> Tensor:
    """The outputs of all pieces; options of (…, Nq, Nk), or (B, N), are cut to what is there."""
    out, length = [], 0
    for q, k, v in zip(*map(pieces, tensors), strict=True):
        length += q.shape[2]
        here = dict(options)
        if "attn_mask" in here:
            mask = here["attn_mask"][..., :length]
            here["attn_mask"] = (
                mask if mask.shape[2] == 1 else mask[:, :, length - q.shape[2] : length]
            )
        if "segment_ids" in here:
            ids = here["segment_ids"]
            here["segment_ids"] = ids[:, length - q.shape[2] : length], ids[:, :length]
        out.append(attend(cache, q, k, v, variant, enable_gqa=True, **params(variant), **here))
        assert cache.length == length
    return torch.cat(out, dim=2)


def whole(variant: str, tensors: list[Tensor], **options: Any) -> Tensor:
    return attnzoo.attention(
        *tensors, variant, is_causal=True, enable_gqa=True, backend="eager", **params(variant),
        **options,
    )  # fmt: skip


def padded_left() -> Tensor:
    """Of three sequences: none, 4 and all but one of the prefill's first tokens."""
    keys = torch.arange(LENGTH)
    return torch.stack([keys >= pad for pad in (0, 4, 7)])[:, None, None]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded left": {"attn_mask": padded_left()},
    "a mask of its own for each row": {"attn_mask": (rand(3, 1, LENGTH, LENGTH, seed=8) > -1.0)},
    "window": {"window": 4},
    "alibi": {"alibi": torch.linspace(0.1, 0.7, 4)},
    "segments": {"segment_ids": torch.arange(LENGTH).floor_divide(6).expand(3, LENGTH)},
}
OF_A_STATE = ("plain", "padded left")
STATES = [
    v for v in VARIANTS if Attention(v, 4, **params_of(v)).new_cache(1).__class__ is StateCache
]


# ALiBi is added to a score, and two variants have none.
CALLS = [(v, o) for v in VARIANTS for o in OPTIONS if (o, v in NO_SCORE) != ("alibi", True)]


@pytest.mark.parametrize(("variant", "option"), CALLS)
def test_keys_give_the_rows_of_the_whole_call(variant: str, option: str) -> None:
    tensors = qkv()
    found = decoded(KVCache(LENGTH), variant, tensors, **OPTIONS[option])
    assert torch.allclose(found, whole(variant, tensors, **OPTIONS[option]), atol=1e-6)


@pytest.mark.parametrize("option", OF_A_STATE)
@pytest.mark.parametrize("variant", STATES)
def test_a_state_gives_the_rows_of_the_whole_call(variant: str, option: str) -> None:
    tensors = qkv()
    found = decoded(StateCache(), variant, tensors, **OPTIONS[option])
    assert torch.allclose(found, whole(variant, tensors, **OPTIONS[option]), atol=1e-9)


@pytest.mark.parametrize("make", [lambda: KVCache(LENGTH), StateCache])
def test_a_mask_of_the_new_token_alone_is_refused(make: Any) -> None:
    """It would broadcast over all keys, padding included."""
    cache, (q, k, v) = make(), qkv()
    attend(cache, *(x[:, :, :4] for x in (q, k, v)), "taylor", enable_gqa=True)
    token = [x[:, :, 4:5] for x in (q, k, v)]
    for n in (1, 4):
        mask = torch.ones(3, 1, 1, n, dtype=torch.bool)
        with pytest.raises(ValueError, match="attn_mask must be over all 5 keys so far"):
            attend(cache, *token, "taylor", attn_mask=mask, enable_gqa=True)
    assert cache.length == 4


def test_a_state_is_of_one_variant_and_its_parameters() -> None:
    cache, tensors = StateCache(), qkv()
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(9), slice(9, None)))
    attend(cache, *first, "cosformer", max_length=64, enable_gqa=True)
    for changed, message in (
        ({"max_length": 128}, "max_length must be that of the state, 64, got 128"),
        ({"max_length": 64, "scale": 3.0}, "scale must be that of the state, None, got 3.0"),
        ({}, "variant must be that of the state, 'cosformer', got 'taylor'"),
    ):
        variant = "cosformer" if changed else "taylor"
        with pytest.raises(ValueError, match=message):
            attend(cache, *last, variant, enable_gqa=True, **changed)
    cache.crop(0)
    attend(cache, *first, "cosformer", max_length=128, enable_gqa=True)


def test_both_caches_take_keywords_that_say_nothing() -> None:
    q, k, v = (x[:, :2] for x in qkv())
    nothing = {"dropout_p": 0.0, "window": None, "return_lse": False, "backend": None}
    outs = [
        attend(cache, q, k, v, "taylor", **nothing) for cache in (KVCache(LENGTH), StateCache())
    ]
    assert torch.allclose(*outs)
    with pytest.raises(ValueError, match="dropout_p must be 0.0 with a state of keys, got 0.1"):
        attend(StateCache(), q, k, v, "taylor", dropout_p=0.1)


def test_what_was_prefilled_in_inference_mode_is_written_to_outside() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    with torch.inference_mode():
        attend(cache, *(x[:, :, :9] for x in tensors), "softmax", enable_gqa=True)
    out = attend(cache, *(x[:, :, 9:] for x in tensors), "softmax", enable_gqa=True)
    assert torch.allclose(out, whole("softmax", tensors)[:, :, 9:])


@every_variant
def test_the_module_hands_its_parameters_on(variant: str) -> None:
    module = Attention(variant, 4, **params(variant)).double()
    tensors = qkv()
    cache = module.new_cache(LENGTH)
    with torch.no_grad():
        expected = module(*tensors, is_causal=True, enable_gqa=True, backend="eager")
        found = [
            module(q, k, v, cache=cache, enable_gqa=True)
            for q, k, v in zip(*map(pieces, tensors), strict=True)
        ]
    assert torch.allclose(torch.cat(found, dim=2), expected, atol=1e-6)


def test_lse_comes_with_each_row() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    _, expected = whole("sink", tensors, return_lse=True)
    rows = [
        attend(cache, q, k, v, "sink", return_lse=True, enable_gqa=True, **params("sink"))[1]
        for q, k, v in zip(*map(pieces, tensors), strict=True)
    ]
    assert torch.allclose(torch.cat(rows, dim=2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_are_held_as_they_come(dtype: torch.dtype) -> None:
    tensors, cache = qkv(dtype), KVCache(20)
    decoded(cache, "softmax", tensors)
    assert cache.keys is not None
    assert torch.equal(cache.keys, tensors[1])
    assert torch.equal(cache.values, tensors[2])


# ---- back, and in another order ---------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 9, LENGTH])
def test_cropped_keys_are_forgotten(length: int) -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    decoded(cache, "ssmax", [rand(*x.shape, seed=9) for x in tensors])
    # What is kept is what the other sequence began with.
    cache.crop(0)
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(length), slice(length, None)))
    attend(cache, *first, "ssmax", enable_gqa=True)
    draft = [rand(*x.shape, seed=7) for x in last]
    attend(cache, *draft, "ssmax", enable_gqa=True)
    cache.crop(length)
    out = attend(cache, *last, "ssmax", enable_gqa=True)
    expected = attnzoo.attention(*tensors, "ssmax", is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected[:, :, length:])


def test_a_cropped_cache_takes_another_batch() -> None:
    cache = KVCache(LENGTH)
    decoded(cache, "softmax", qkv())
    cache.crop(0)
    q, k, v = (x[:1, :2].float() for x in qkv())
    assert attend(cache, q, k, v, "softmax").dtype == torch.float32


def test_a_state_goes_back_to_the_beginning_only() -> None:
    cache = StateCache()
    expected = decoded(cache, "taylor", qkv())
    cache.crop(LENGTH)
    with pytest.raises(ValueError, match=r"length must be 0 or 13: a state cannot forget"):
        cache.crop(5)
    cache.crop(0)
    assert torch.equal(decoded(cache, "taylor", qkv()), expected)


@pytest.mark.parametrize(
    ("variant", "make"), [("ssmax", lambda: KVCache(20)), ("taylor", StateCache)]
)
def test_beams(variant: str, make: Any) -> None:
    """Five beams of three sequences: as if each had been its own from the start."""
    cache, tensors = make(), qkv()
    decoded(cache, variant, tensors)
    index = torch.tensor([2, 0, 0, 1, 2])
    cache.reorder(index)
    token = [rand(5, x.shape[1], 1, x.shape[3], seed=20 + i) for i, x in enumerate(tensors)]
    out = attend(cache, *token, variant, enable_gqa=True)
    longer = [torch.cat([x[index], t], dim=2) for x, t in zip(tensors, token, strict=True)]
    expected = attnzoo.attention(*longer, variant, is_causal=True, enable_gqa=True)
    assert torch.allclose(out, expected[:, :, -1:])


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "variant"), [(lambda: KVCache(8), "ssmax"), (StateCache, "taylor")]
)
@pytest.mark.parametrize("wrong", [-1, 3])
def test_sequences_that_are_not_there(make: Any, variant: str, wrong: int) -> None:
    cache = make()
    attend(cache, *(rand(3, 2, 4, 8, seed=i) for i in range(3)), variant)
    with pytest.raises(ValueError, match=f"index must hold .*, from 0 to 2, got {wrong}"):
        cache.reorder(torch.tensor([0, wrong, 1]))
    assert cache.length == 4


def test_full() -> None:
    cache = KVCache(4)
    q, k, v = (x[:, :2, :3] for x in qkv())
    attend(cache, q, k, v, "softmax")
    with pytest.raises(ValueError, match="max_length=4 tokens: 3 more do not fit after 3"):
        attend(cache, q, k, v, "softmax")
    assert cache.length == 3


def test_a_call_that_fails_appends_nothing() -> None:
    tensors, cache = qkv(), KVCache(LENGTH)
    first, last = ([x[:, :, s] for x in tensors] for s in (slice(9), slice(9, None)))
    attend(cache, *first, "softmax", enable_gqa=True)
    with pytest.raises(ValueError, match="unknown variant"):
        attend(cache, *(-x for x in last), "softmaxx", enable_gqa=True)
    with pytest.raises(ValueError, match="q and k must hold the same tokens, got 4 and 3"):
        attend(cache, last[0], last[1][:, :, 1:], last[2][:, :, 1:], "softmax", enable_gqa=True)
    assert cache.length == 9
    out = attend(cache, *last, "softmax", enable_gqa=True)
    assert torch.allclose(out, whole("softmax", tensors)[:, :, 9:])


def test_keys_that_were_updated_are_those_of_a_call() -> None:
    (q, k, v), cache = qkv(), KVCache(LENGTH)
    for part in (slice(0, 9), slice(9, LENGTH)):
        keys, values = cache.update(k[:, :, part], v[:, :, part])
    assert cache.length == LENGTH
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = attnzoo.attention(q[:, :, 9:], keys, values, "ssmax", **options)
    assert torch.allclose(out, attnzoo.attention(q, k, v, "ssmax", **options)[:, :, 9:])
    with pytest.raises(ValueError, match="max_length=13 tokens: 13 more do not fit after 13"):
        cache.update(k, v)
    assert cache.length == LENGTH


def test_a_first_call_that_fails_fixes_no_shape() -> None:
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
def test_bad_calls(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = KVCache(LENGTH)
    decoded(cache, "softmax", [x[:, :, : sum(PIECES)] for x in qkv()])
    cache.crop(LENGTH - 1)
    given = dict(zip("qkv", (x[:, :, -1:] for x in qkv()), strict=True))
    options: dict[str, Any] = {"enable_gqa": True}
    for name, change in changed.items():
        if name in given:
            given[name] = change(given[name])
        else:
            options[name] = change
    with pytest.raises(error, match=message):
        attend(cache, given["q"], given["k"], given["v"], "softmax", **options)
    assert cache.length == LENGTH - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: KVCache(0), ValueError, "max_length must be an int of at least 1, got 0"),
        (lambda: KVCache(True), ValueError, "max_length must be an int"),
        (lambda: KVCache(4).crop(1), ValueError, "length must be an int from 0 to 0"),
        (lambda: StateCache().crop(-1), ValueError, "length must be an int from 0 to 0"),
        (lambda: KVCache(4).reorder([0]), TypeError, "index must be an int32 or int64 tensor"),
        (lambda: StateCache().reorder(torch.zeros(2)), TypeError, "got torch.float32"),
        (lambda: KVCache(4).reorder(torch.zeros(2, 2).long()), ValueError, r"shape \(B,\)"),
        (lambda: Attention("ssmax", 2).new_cache(4, "state"), ValueError, "'ssmax' has no state"),
        (lambda: Attention("ssmax", 2).new_cache(4, "kv"), ValueError, "kind must be 'keys'"),
        (lambda: Attention("taylor", 2).new_cache(0), ValueError, "max_length must be an int"),
        (
            lambda: Attention("ssmax", 4)(*qkv(), cache={}, enable_gqa=True),
            TypeError,
            "cache must be from new_cache",
        ),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_state_refuses_what_needs_the_past() -> None:
    q, k, v = (x[:, :2] for x in qkv())
    for options, message in (
        ({"window": 3}, "window must be None with a state of keys, got 3"),
        (
            {"attn_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)},
            "does not support a dense mask",
        ),
    ):
        cache = StateCache()
        with pytest.raises((ValueError, TypeError), match=message):
            attend(cache, q, k, v, "taylor", **options)
        assert cache.length == 0


def test_which_cache_a_module_makes() -> None:
    """By its parameters: only the second order of Taylor has a linear form."""
    assert {"cosformer", "taylor"} == set(STATES)
    assert isinstance(Attention("taylor", 2, order=4).new_cache(9), KVCache)
    assert isinstance(Attention("taylor", 2).new_cache(9, "keys"), KVCache)
    assert repr(Attention("entmax", 2).new_cache(9)) == "KVCache(max_length=9, length=0)"


def test_a_gradient_flows_through_a_state() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    found = decoded(StateCache(), "taylor", leaves)
    expected = whole("taylor", leaves)
    do = rand(*expected.shape, seed=6)
    pairs = (torch.autograd.grad(out, leaves, do) for out in (found, expected))
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))
