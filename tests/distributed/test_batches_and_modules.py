"""shard, unshard, shard_batch and shard_sequence on one rank: padding and errors.

Tests with several ranks are in test_context_models.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import attnzoo
from attnzoo.distributed import (
    context_parallel_attention,
    shard,
    shard_batch,
    shard_sequence,
    unshard,
)
from attnzoo.nn import Attention, MultiheadAttention, Transformer

LONG = torch.zeros(1, 4, dtype=torch.long)


def test_shard_pads_and_unshard_removes_the_padding(mesh: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    local = shard(x, mesh, fill=-1)
    assert local.tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]]
    assert torch.equal(unshard(local, mesh, length=3), x)
    assert torch.equal(unshard(local, mesh), local)
    assert torch.equal(shard(x, mesh, layout="contiguous"), x)
    assert shard(x, mesh, fill=-math.inf)[0, -1] == -math.inf


def test_a_batch_has_positions_labels_and_a_mask(mesh: Any) -> None:
    batch = shard_batch(torch.tensor([[5, 6, 7], [1, 2, 3]]), mesh)
    assert batch.tokens.tolist() == [[5, 6, 7, 0], [1, 2, 3, 0]]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.labels.tolist() == [[6, 7, -100, -100], [2, 3, -100, -100]]
    assert batch.mask.tolist() == [[True, True, True, False]] * 2
    assert batch.key_mask.shape == (2, 1, 1, 4)
    assert batch.count == 4
    labels = torch.tensor([[-100, 1, 2], [-100, -100, 3]])
    with_labels = shard_batch(torch.zeros(2, 3, dtype=torch.long), mesh, labels=labels)
    assert with_labels.labels.tolist() == [[-100, 1, 2, -100], [-100, -100, 3, -100]]
    assert with_labels.count == 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: shard(torch.zeros(1, 3), m), "multiple of 2 tokens along dim 1, got 3"),
        (lambda m: shard(torch.zeros(1, 4), m, 2), "dim must be a dimension of x"),
        (lambda m: shard(torch.zeros(1, 4), m, layout="striped"), "layout must be one of zigzag"),
        (lambda m: unshard(torch.zeros(1, 4), m, length=5), "length must be from 0 to 4, got 5"),
        (lambda m: unshard(torch.zeros(1, 3), m), "must be even with layout 'zigzag', got 3"),
        (lambda m: shard(torch.zeros(1, 3).int(), m, fill=0.5), "fill must be a value of x's"),
        (lambda m: shard(torch.zeros(1, 3).bool(), m, fill=2), "fill must be a value of x's"),
        (lambda m: shard(torch.zeros(1, 3).int(), m, fill=math.nan), "fill must be a value of x's"),
        (lambda m: shard(torch.zeros(1, 3).half(), m, fill=-1e5), "fill must be a value of x's"),
        (lambda m: shard_batch(torch.zeros(4), m), r"tokens must be \(B, N\), got \(4,\)"),
        (lambda m: shard_batch(torch.zeros(2, 0).long(), m), "tokens must hold at least one token"),
        (lambda m: shard_batch(LONG, m, labels=torch.zeros(1, 3).long()), "labels must have"),
        (lambda m: shard_sequence(nn.Linear(2, 2), m), "must contain an attnzoo.nn.Attention"),
        (lambda m: shard_sequence(Attention("softmax", 2), m, "rings"), "method must be one of"),
        (
            lambda m: shard_sequence(
                nn.ModuleList([Attention("softmax", 2), nn.MultiheadAttention(8, 2)]), m
            ),
            "module's 1 is a MultiheadAttention without an attnzoo.nn.Attention",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(mesh: Any, call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(mesh)


def test_wrong_types_raise(mesh: Any) -> None:
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got str"):
        shard(torch.zeros(1, 4), "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fill must be a number or None, got 'a'"):
        shard(torch.zeros(1, 3), mesh, fill="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tokens must be int, got torch.float32"):
        shard_batch(torch.zeros(1, 4), mesh)
    with pytest.raises(TypeError, match="labels must be int64, got torch.int32"):
        shard_batch(LONG, mesh, labels=LONG.int())
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got type"):
        shard_sequence(Attention, mesh)  # type: ignore[type-var]


def test_a_sharded_module_rejects_caches_and_weights(mesh: Any) -> None:
    attend = shard_sequence(Attention("softmax", 2), mesh)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="cache must be None for a sharded sequence"):
        attend(q, q, q, cache=attend.new_cache(8))
    with pytest.raises(ValueError, match="need_weights must be False for a sharded sequence"):
        attend(q, q, q, need_weights=True)


def test_modules_on_one_rank_give_their_own_results(mesh: Any) -> None:
    torch.manual_seed(0)
    model = Transformer(50, 32, 4, 1, "sigmoid", "alibi", wrapper="output_gate")
    tokens, ids = torch.randint(50, (2, 8)), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]).expand(2, -1)
    layer = MultiheadAttention(32, 4, variant="entmax", batch_first=True)
    x = torch.randn(2, 8, 32)
    expected = model(tokens, segment_ids=ids), layer(x, x, x, need_weights=False)[0]
    shard_sequence(nn.ModuleList([model, layer]), mesh)
    actual = model(tokens, segment_ids=ids), layer(x, x, x, need_weights=False)[0]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["softmax", "entmax", "elu"])
def test_the_ring_without_gradients(mesh: Any, variant: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    out = context_parallel_attention(q, k, v, variant, mesh=mesh, method="ring", is_causal=True)
    expected = attnzoo.attention(q, k, v, variant, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
