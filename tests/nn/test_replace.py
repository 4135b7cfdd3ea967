"""replace() puts attnzoo.nn.MultiheadAttention into a model of torch."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnzoo.nn import MultiheadAttention, replace
from helpers.cases import VARIANTS, params_of, rand


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


# Torch warns if it runs its fused path for encoders, and also if that path is disabled.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested")
@pytest.mark.parametrize(("training", "norm_first"), list(product((True, False), repeat=2)))
def test_encoder_with_softmax_is_unchanged(training: bool, norm_first: bool) -> None:
    """In eval mode without gradients, torch's own encoder runs its fused path."""
    theirs = encoder(norm_first=norm_first).train(training)
    ours = replace(copy.deepcopy(theirs), "softmax")
    x = rand(2, 7, 16).float()
    padding = torch.arange(7).expand(2, 7) >= torch.tensor([[7], [5]])
    later = nn.Transformer.generate_square_subsequent_mask(7)
    visible = ~padding[..., None]
    with torch.set_grad_enabled(training):
        for options in ({}, {"src_key_padding_mask": padding}, {"mask": later, "is_causal": True}):
            actual, expected = ours(x, **options), theirs(x, **options)
            rows = visible if "src_key_padding_mask" in options else torch.ones_like(visible)
            assert torch.allclose(actual * rows, expected * rows, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_encoder_does_not_use_torchs_fused_path(variant: str) -> None:
    """Outputs in eval mode without gradients equal those in training."""
    model = replace(encoder(), variant, **params_of(variant))
    x = rand(2, 7, 16).float()
    padding = torch.arange(7).expand(2, 7) >= torch.tensor([[7], [5]])
    trained = model(x, src_key_padding_mask=padding)
    trained.sum().backward()
    with torch.no_grad():
        assert torch.allclose(model.eval()(x, src_key_padding_mask=padding), trained, atol=1e-5)


def test_replace_keeps_the_parameter_tensors() -> None:
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    before = dict(model.named_parameters())
    replace(model, "ssmax", s=0.3)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    new = set(after) - set(before)
    layers = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn",
              "decoder.layers.0.multihead_attn")  # fmt: skip
    assert new == {f"{name}.attend.s" for name in layers}
    x = rand(2, 5, 16).float()
    model(x, x).sum().backward()


def test_replace_keeps_shared_layers_shared_and_returns_a_single_layer() -> None:
    layer = nn.MultiheadAttention(16, 4)
    model = nn.ModuleList([layer, layer])
    replace(model, "softmax")
    assert model[0] is model[1]
    assert isinstance(replace(layer, "softmax"), MultiheadAttention)


def test_replacing_twice_exchanges_the_variant() -> None:
    """The second call replaces the remaining torch layers and changes the encoder's variant."""
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True, dropout=0.0).eval()
    once = replace(copy.deepcopy(model), "entmax", alpha=1.3)
    replace(model.encoder, "ssmax")
    before = dict(model.named_parameters())
    assert replace(model, "entmax", alpha=1.3) is model
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in after)
    assert set(before) - set(after) == {"encoder.layers.0.self_attn.attend.s"}
    x = rand(2, 5, 16).float()
    assert torch.equal(model(x, x), once(x, x))
    layer = MultiheadAttention(16, 4, variant="sink")
    assert replace(layer, "ssmax") is layer
    assert layer.attend.variant == "ssmax"
    with pytest.raises(TypeError, match="max_length"):
        replace(model, "cosformer")
    assert torch.equal(model(x, x), once(x, x))


def test_failed_replace_changes_nothing() -> None:
    model = encoder()
    with pytest.raises(TypeError, match="max_length"):
        replace(model, "cosformer")
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    with pytest.raises(ValueError, match=r"a torch\.nn\.MultiheadAttention, got a Linear"):
        replace(nn.Linear(2, 2), "ssmax")


@pytest.mark.parametrize(
    "kind",
    ["forward", "forward_pre", "full_backward", "full_backward_pre", "load_state_dict_post"],
)
def test_replace_of_layers_with_hooks_raises(kind: str) -> None:
    layer = nn.MultiheadAttention(16, 4)
    getattr(layer, f"register_{kind}_hook")(lambda *args: None)
    with pytest.raises(ValueError, match="has hooks"):
        replace(nn.ModuleList([layer]), "softmax")


def test_replace_of_parametrized_layers_raises() -> None:
    layer = nn.MultiheadAttention(16, 4)
    torch.nn.utils.parametrizations.weight_norm(layer.out_proj)
    with pytest.raises(ValueError, match=r"parametrizations\.weight"):
        replace(nn.ModuleList([layer]), "softmax")


def test_padding_of_linear_variants_under_a_dispatch_mode() -> None:
    """Modes that count or save operations run on real values."""
    model = replace(encoder().eval(), "elu")
    padding = torch.tensor([[False] * 4 + [True] * 2])
    x = rand(1, 6, 16).float()
    expected = model(x, src_key_padding_mask=padding)
    with FlopCounterMode(display=False):
        assert torch.equal(model(x, src_key_padding_mask=padding), expected)


def test_nested_inputs_of_torchs_encoder_raise() -> None:
    model = encoder().eval()
    model.layers[1].self_attn = replace(model.layers[1].self_attn, "softmax")
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad(), pytest.raises(TypeError, match="give replace the whole TransformerEnco"):
        model(rand(2, 6, 16).float(), src_key_padding_mask=padding)
