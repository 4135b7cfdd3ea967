"""`attnzoo.nn.RelativeBias`, and tables of a bias by relative position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attnzoo
from attnzoo.nn import RelativeBias
from helpers.cases import rand


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 1000)])
def test_equals_the_bias_of_t5(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        num_heads=3, d_model=6, d_kv=2, relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional,
    )  # fmt: skip
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    bias = RelativeBias(3, num_buckets, max_distance, bidirectional)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.normal_()
        bias.weight.copy_(theirs.relative_attention_bias.weight)
        expected = theirs.compute_bias(1300, 1300)[0]
        position = torch.arange(1300) - torch.arange(1300)[:, None]
        entry = position.clamp(-max_distance, max_distance) + max_distance
        assert torch.equal(bias()[:, entry], expected)


def test_the_weight_learns_and_starts_without_a_bias() -> None:
    q, k, v = rand(3, 2, 4, 40, 8).float()
    bias = RelativeBias(4, num_buckets=8, max_distance=16)
    out = attnzoo.attention(q, k, v, "ssmax", relative_bias=bias())
    assert torch.equal(out, attnzoo.attention(q, k, v, "ssmax", relative_bias=torch.zeros(4, 3)))
    out.square().sum().backward()
    assert bias.weight.grad is not None
    # Position 0 has the first bucket of the keys up to the query, so that of the others is unused.
    used = bias.weight.grad.abs().sum(1) > 0
    assert used.tolist() == [True, True, True, True, False, True, True, True]


def test_modules_and_wrappers_take_a_table() -> None:
    q, k, v = rand(3, 2, 4, 12, 8).float()
    table = rand(4, 7, seed=1).float()
    attend = attnzoo.nn.Attention("sigmoid", num_heads=4)
    expected = attnzoo.attention(q, k, v, "sigmoid", relative_bias=table, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, relative_bias=table, is_causal=True), expected)
    wrapper = attnzoo.nn.DifferentialV2("softmax", 4, 32)
    gate = rand(2, 4, 12, 1, seed=2).float()
    q = rand(2, 8, 12, 8).float()
    mask = table[:, (torch.arange(12) - torch.arange(12)[:, None]).clamp(-3, 3) + 3]
    torch.testing.assert_close(
        wrapper(q, k, v, gate=gate, relative_bias=table),
        wrapper(q, k, v, gate=gate, attn_mask=mask),
    )


def test_decoding_equals_one_call() -> None:
    q, k, v = rand(3, 1, 2, 9, 8).float()
    table = rand(2, 5, seed=1).float()
    expected = attnzoo.attention(q, k, v, "ssmax", is_causal=True, relative_bias=table)
    cache, steps = attnzoo.nn.KVCache(16), []
    for part in ([0, 4], [4, 5], [5, 9]):
        q_now, k_now, v_now = (x[:, :, slice(*part)] for x in (q, k, v))
        steps.append(attnzoo.nn.attend(cache, q_now, k_now, v_now, "ssmax", relative_bias=table))
    torch.testing.assert_close(torch.cat(steps, 2), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"alibi": torch.ones(4), "relative_bias": torch.ones(4, 3)},
            ValueError,
            "relative_bias must be None with alibi, got a tensor",
        ),
        ({"relative_bias": [0.1]}, TypeError, "relative_bias must be a tensor, got list"),
        ({"relative_bias": torch.ones(4)}, ValueError, r"\(4, 2R \+ 1\), got \(4,\)"),
        ({"relative_bias": torch.ones(4, 6)}, ValueError, r"odd number .* got \(4, 6\)"),
        ({"relative_bias": torch.ones(4, 1)}, ValueError, r"at least 3 .* got \(4, 1\)"),
        ({"relative_bias": torch.ones(1, 3)}, ValueError, r"per query head.* got \(1, 3\)"),
        ({"relative_bias": torch.ones(4, 3).int()}, TypeError, "relative_bias must be fp16"),
        (
            {"relative_bias": torch.ones(4, 3).index_fill(1, torch.tensor(2), math.nan)},
            ValueError,
            r"relative_bias must be finite in torch.float32, got nan at \[0, 2\]",
        ),
    ],
)
def test_wrong_tables(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = rand(3, 2, 4, 12, 8).float()
    with pytest.raises(error, match=message):
        attnzoo.attention(q, k, v, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an int of at least 1, got 0"),
        ({"num_buckets": 2}, "num_buckets must be an int of at least 4, got 2"),
        ({"num_buckets": 7}, "num_buckets must be even with bidirectional, got 7"),
        ({"max_distance": 8}, "max_distance must be an int above 8, .*, got 8"),
        ({"max_distance": 9.5}, "max_distance must be an int above 8, .*, got 9.5"),
        ({"device": "gpu"}, "device must be the name of a device, .*, got 'gpu'"),
        ({"dtype": torch.int32}, "dtype must be fp16, bf16, fp32 or fp64, got torch.int32"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        RelativeBias(**{"num_heads": 4, **arguments})


def test_a_module_made_on_the_meta_device_can_be_reset() -> None:
    bias = RelativeBias(4, device="meta")
    assert bias().shape == (4, 257)
    bias = bias.to_empty(device="cpu")
    torch.nn.init.ones_(bias.weight)
    bias.reset_parameters()
    assert torch.equal(bias.weight, torch.zeros(32, 4))


@pytest.mark.parametrize("argument", ["alibi", "relative_bias"])
def test_the_gradient_of_16_bit_values_is_rounded_once(argument: str) -> None:
    """It is a sum over segments, which are calls of their own, or over blocks."""
    ids = torch.arange(30).repeat_interleave(torch.arange(1, 31))
    q, k, v, do = rand(4, 1, 2, len(ids), 8).float().unbind()
    values = (rand(2, 9, seed=1) if argument == "relative_bias" else torch.ones(2)).bfloat16()
    gradients = []
    for leaf in (values.clone(), values.float()):
        options: dict[str, Any] = {argument: leaf.requires_grad_()}
        out = attnzoo.attention(q, k, v, segment_ids=ids[None], **options)
        gradients += torch.autograd.grad(out, leaf, do)
    assert torch.equal(gradients[0], gradients[1].bfloat16())
