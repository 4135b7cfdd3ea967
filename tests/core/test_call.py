"""Masks, causality, windows, segments, biases, GQA and strides: visible keys, counts, outputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.core.arguments import check_call
from attnzoo.core.call import Call
from helpers.cases import params_of, rand

SHAPES = (1, 1), (5, 5), (1, 6), (4, 7), (7, 4), (6, 1)


def make_call(queries: int, keys: int, heads: int = 2, **options: Any) -> Call:
    q, k = torch.zeros(2, heads, queries, 4), torch.zeros(2, heads, keys, 4)
    return check_call(q, k, k, **options)


def visible_by_hand(call: Call, **options: Any) -> Tensor:
    """Return bool (B, H, Nq, Nk): True where query i sees key j, by a loop over all entries."""
    shape = (call.batch, call.heads, call.queries, call.keys)
    visible = torch.zeros(shape, dtype=torch.bool)
    window, mask = options.get("window"), options.get("attn_mask")
    ids = options.get("segment_ids")
    ids = (ids, ids) if isinstance(ids, Tensor) else ids
    for b, h, i, j in product(*map(range, shape)):
        position = call.keys - call.queries + i  # the last query is aligned with the last key
        see = True
        if options.get("is_causal"):
            see = see and j <= position
        if isinstance(window, int):  # a query sees its own key and the W − 1 keys before
            see = see and position - j < window
        elif window is not None:
            see = see and position - window[0] <= j <= position + window[1]
        if mask is not None:
            entry = mask.expand(shape)[b, h, i, j]
            see = see and bool(entry if mask.dtype == torch.bool else entry != float("-inf"))
        if ids is not None:
            see = see and bool(ids[0][b, i] == ids[1][b, j])
        visible[b, h, i, j] = see
    return visible


def options_for(queries: int, keys: int) -> list[dict[str, Any]]:
    mask = rand(2, 2, queries, keys, seed=1) > -0.3
    floats = rand(queries, keys, seed=2).float()
    ids = rand(2, queries + keys, seed=3).round().long() * 10**12 - 5  # ids may be any int64
    segments = {"segment_ids": (ids[:, :queries], ids[:, queries:])}
    masks: list[dict[str, Any]] = [
        {},
        {"attn_mask": mask},
        {"attn_mask": mask[:1, :1]},
        {"attn_mask": mask[:, :1, :1]},  # key mask per batch
        {"attn_mask": mask[:, :, :1]},  # key mask per head
        {"attn_mask": mask[0, 0, 0]},  # one key mask for all
        {"attn_mask": mask[0, 0, :, :1]},  # hides all keys of some queries
        {"attn_mask": floats.masked_fill(floats < -0.3, float("-inf"))},
        segments,
        {**segments, "attn_mask": mask[:, :, :1]},
        {**segments, "attn_mask": mask},
    ]
    spans: list[dict[str, Any]] = [{}, {"is_causal": True}]
    spans += [{"is_causal": True, "window": w} for w in (1, 2, 3, 20)]
    spans += [{"window": w} for w in ((0, 0), (1, 0), (0, 2), (2, 1), (20, 20))]
    return [{**a, **b} for a in masks for b in spans]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_visible_keys_and_counts_equal_those_of_a_loop(shape: tuple[int, int]) -> None:
    for options in options_for(*shape):
        call = make_call(*shape, **options)
        expected = visible_by_hand(call, **options)
        assert torch.equal(call.visible.expand(expected.shape), expected), options
        counts = call.counts.expand(expected.shape[:3])
        assert torch.equal(counts, expected.sum(-1).float()), options
        assert call.counts.dtype == torch.float32
        hidden = torch.zeros_like(expected)
        for columns, where in call.hidden():
            hidden[..., columns] |= where
        assert torch.equal(hidden, ~expected), options


@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)], ids=str)
def test_block_sees_the_same_keys_as_the_call(shape: tuple[int, int]) -> None:
    for options in options_for(*shape):
        call = make_call(*shape, **options)
        visible = visible_by_hand(call, **options)
        for rows in (slice(0, 2), slice(2, 4), slice(3, 4)):
            part, keys = call.block(slice(1, 2), slice(0, 2), rows)
            expected = visible[1:2, :, rows, keys]
            assert torch.equal(part.visible.expand(expected.shape), expected), options
            # The block's key range holds all visible keys, so its counts equal the call's.
            assert int(expected.sum()) == int(visible[1:2, :, rows].sum())
            _ = call.counts
            part, _ = call.block(slice(1, 2), slice(0, 2), rows)
            counts = visible[1:2, :, rows].sum(-1).float()
            assert torch.equal(part.counts.expand(counts.shape), counts), options


def test_counts_of_long_calls_take_linear_memory() -> None:
    """A full mask of this call, 65 536² bools, would take 4 GiB."""
    n = 65536
    ids = (torch.arange(n) // 1000)[None]
    q = torch.zeros(1, 1, n, 1)
    call = check_call(
        q, q, q, is_causal=True, segment_ids=ids, attn_mask=(torch.arange(n) % 2 == 0)
    )
    at = torch.arange(n) % 1000
    assert torch.equal(call.counts[0, 0], (at // 2 + 1).float())
    windowed = check_call(q, q, q, is_causal=True, window=4096)
    assert torch.equal(windowed.counts.flatten(), torch.arange(1, n + 1).clamp(max=4096).float())


def test_key_mask_is_recognized_by_its_shape() -> None:
    """A dense mask whose rows are equal does not count as a key mask."""
    q = rand(1, 2, 6, 4)
    keys = torch.tensor([True, True, False, True, True, False])
    dense = keys.expand(6, 6).clone()
    assert check_call(q, q, q, attn_mask=keys).key_mask
    assert check_call(q, q, q, attn_mask=keys[None, None, None]).key_mask
    assert not check_call(q, q, q, attn_mask=dense).key_mask
    same = attnzoo.attention(q, q, q, "taylor", attn_mask=keys, backend="linear")
    assert torch.allclose(same, attnzoo.attention(q, q, q, "taylor", attn_mask=dense))
    with pytest.raises(ValueError, match="dense"):
        attnzoo.attention(q, q, q, "taylor", attn_mask=dense, backend="linear")


def test_causality_is_aligned_bottom_right() -> None:
    """If Nk > Nq, the last query sees all keys; if Nq > Nk, the first queries see none."""
    q, k = rand(1, 1, 2, 4), rand(1, 1, 5, 4)
    w = attnzoo.attention_weights(q, k, k, is_causal=True)[0, 0]
    assert torch.equal(w != 0, torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool())
    w = attnzoo.attention_weights(k, q, q, is_causal=True)[0, 0]
    assert torch.equal(w != 0, torch.tensor([[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]).bool())


def test_mask_and_causality_both_apply() -> None:
    q = rand(1, 1, 4, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]]).bool()
    for backend in ("eager", "tiled"):
        both = attnzoo.attention(q, q, q, attn_mask=mask, is_causal=True, backend=backend)
        one = attnzoo.attention(q, q, q, attn_mask=mask.tril(), backend=backend)
        assert torch.equal(both, one)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_window_includes_the_query_s_own_key(backend: str) -> None:
    q = rand(1, 1, 5, 4)
    v = torch.eye(5, dtype=torch.float64)[None, None]
    one = attnzoo.attention(q, q, v, is_causal=True, window=1, backend=backend)
    assert torch.equal(one, v)
    three = attnzoo.attention(q, q, v, is_causal=True, window=3, backend=backend)
    assert (three != 0).sum(-1).flatten().tolist() == [1, 2, 3, 3, 3]
    pair = attnzoo.attention(q, q, v, window=(1, 2), backend=backend)
    assert (pair != 0).sum(-1).flatten().tolist() == [3, 4, 4, 3, 2]


@pytest.mark.parametrize("backend", ["eager", "tiled"])
def test_bias_is_added_after_the_gain(backend: str) -> None:
    """The expected weights of ssmax with s = 2 are softmax(2 log n z + mask − slope |i − j|)."""
    q, k = rand(1, 2, 4, 6, seed=1), rand(1, 2, 7, 6, seed=2)
    mask, slopes = rand(4, 7, seed=3), torch.tensor([0.5, 0.125]).double()
    position = torch.arange(3, 7)
    distance = (position[:, None] - torch.arange(7)).abs()
    z = q @ k.mT / 6**0.5
    s = 2 * torch.tensor(7.0).double().log() * z + mask - slopes[:, None, None] * distance
    out = attnzoo.attention(q, k, k, "ssmax", s=2.0, attn_mask=mask, alibi=slopes, backend=backend)
    assert torch.allclose(out, s.softmax(-1) @ k)


@pytest.mark.parametrize("variant", ["ssmax", "log_n", "sigmoid", "asentmax"])
def test_finite_mask_entries_count_as_visible(variant: str) -> None:
    """A mask entry of −1e4 makes a softmax weight 0, but the key still counts as visible.

    Only −inf also removes the key from the count of visible keys.
    """
    q, k = rand(1, 1, 3, 6, seed=1), rand(1, 1, 8, 6, seed=2)
    low = torch.zeros(8, dtype=torch.float64)
    low[5:] = -1e4
    hidden = low.masked_fill(low < 0, float("-inf"))
    assert check_call(q, k, k, attn_mask=low).counts.unique().tolist() == [8.0]
    assert check_call(q, k, k, attn_mask=hidden).counts.unique().tolist() == [5.0]
    params = {"gamma": 2.0} if variant == "asentmax" else {}
    a = attnzoo.attention(q, k, k, variant, attn_mask=low, **params)
    b = attnzoo.attention(q, k, k, variant, attn_mask=hidden, **params)
    c = attnzoo.attention(q, k, k, variant, attn_mask=hidden == 0, **params)
    assert not torch.allclose(a, b)
    assert torch.allclose(b, c)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("variant", ["softmax", "ssmax", "sigmoid", "entmax", "cosformer"])
def test_segments_equal_separate_calls(variant: str, backend: str) -> None:
    """Packed sequences give the outputs of one call per sequence, also under causality."""
    q, k, v = (rand(1, 2, 12, 6, seed=i) for i in range(3))
    ids = torch.tensor([[4, 4, 4, 4, 4, -1, -1, -1, 9, 9, 9, 9]])
    options = dict(is_causal=True, backend=backend, **params_of(variant, 12))
    packed = attnzoo.attention(q, k, v, variant, segment_ids=ids, **options)
    for part in (slice(0, 5), slice(5, 8), slice(8, 12)):
        alone = attnzoo.attention(*(x[:, :, part] for x in (q, k, v)), variant, **options)
        assert torch.allclose(packed[:, :, part], alone)


@pytest.mark.parametrize("backend", ["eager", "tiled", "sdpa"])
def test_groups_of_query_heads_share_a_key_value_head(backend: str) -> None:
    """Query heads 0 and 1 use key/value head 0, query heads 2 and 3 use key/value head 1."""
    q, k, v = rand(2, 4, 6, 8, seed=1), rand(2, 2, 6, 8, seed=2), rand(2, 2, 6, 8, seed=3)
    out = attnzoo.attention(q, k, v, enable_gqa=True, backend=backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(out, expected)
    assert not torch.allclose(out[:, 0], out[:, 2])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    """q and k are strided views of (B, N, H, D) tensors, v is a slice that is broadcast."""
    base = rand(2, 9, 4, 16, dtype=dtype)
    q, k, v = base.transpose(1, 2)[..., ::2], base.transpose(1, 2)[..., 1::2], base[:1, :, :, :8]
    v = v.transpose(1, 2).expand(2, 4, 9, 8)
    for variant in ("softmax", "sigmoid", "entmax", "taylor"):
        expected = attnzoo.attention(
            q.contiguous(), k.contiguous(), v.contiguous(), variant, backend="eager"
        )
        for backend in attnzoo.backends.BACKENDS:
            if attnzoo.explain(q, k, v, variant, backend=backend).chosen:
                out = attnzoo.attention(q, k, v, variant, backend=backend)
                close = torch.allclose(out, expected, rtol=1e-5, atol=20 * torch.finfo(dtype).eps)
                assert close, (variant, backend)
