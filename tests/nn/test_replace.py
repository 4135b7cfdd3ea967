"""replace() puts attnzoo.nn.MultiheadAttention into a model of torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn import quantizable
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import attnzoo
from attnzoo.nn import MultiheadAttention, replace
from helpers.cases import VARIANTS, params_of, rand


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    nested = {"enable_nested_tensor": options.pop("enable_nested_tensor", True)}
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, **nested)


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
    with pytest.raises(ValueError, match="^model's 0 must be .* with hooks"):
        replace(nn.ModuleList([layer]), "softmax")


class Subclass(nn.MultiheadAttention):
    pass


def with_forward(layer: nn.MultiheadAttention) -> None:
    layer.forward = functools.partial(nn.MultiheadAttention.forward, layer)


# Each function changes the layer, or returns another module in its place.
IRREPLACEABLE: dict[str, tuple[Callable[[nn.MultiheadAttention], Any], str]] = {
    "spectral_norm of in_proj": (
        lambda layer: parametrizations.spectral_norm(layer, "in_proj_weight"),
        "tensors differ in in_proj_weight, parametrizations.in_proj_weight",
    ),
    "weight_norm of out_proj": (
        lambda layer: parametrizations.weight_norm(layer.out_proj) and None,
        r"tensors differ in out_proj.parametrizations.weight.original0",
    ),
    "spectral_norm with hooks": (
        lambda layer: nn.utils.spectral_norm(layer, "in_proj_weight"),
        "tensors differ in in_proj_weight, in_proj_weight_orig",
    ),
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "in_proj_weight", 0.3),
        "tensors differ in in_proj_weight, in_proj_weight_mask",
    ),
    "buffer": (lambda layer: layer.register_buffer("size", torch.ones(1)), "differ in size"),
    "subclass": (lambda layer: Subclass(16, 4), "one of the subclass Subclass"),
    "quantizable": (lambda layer: quantizable.MultiheadAttention(16, 4), "linear_Q.weight"),
    "forward": (with_forward, "one with another forward"),
    "compiled in place": (
        lambda layer: layer.compile(backend="eager"),
        "call replace before compile",
    ),
    "compiled": (
        functools.partial(torch.compile, backend="eager"),
        "not be compiled: call replace before torch.compile",
    ),
}


@pytest.mark.parametrize("kind", IRREPLACEABLE)
def test_one_layer_that_cannot_be_replaced_raises_and_nothing_is_replaced(kind: str) -> None:
    change, message = IRREPLACEABLE[kind]
    model = encoder(enable_nested_tensor=False)
    layer = model.layers[1].self_attn
    changed = change(layer)
    if isinstance(changed, nn.Module):
        model.layers[1].self_attn = changed
    with pytest.raises(ValueError, match=rf"^model's layers\.1\.self_attn.* must .*{message}"):
        replace(model, "ssmax")
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    with pytest.raises(ValueError, match=rf"^model\b.* must .*{message}"):
        replace(model.layers[1].self_attn, "ssmax")


@pytest.mark.parametrize("wrap", ["fully_shard", "layer", "ddp"])
def test_replace_of_sharded_and_replicated_models_raises(wrap: str, mesh: Any) -> None:
    """Their hooks hold the parameters that the model had when it was wrapped."""
    model: Any = encoder(enable_nested_tensor=False)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model if wrap == "fully_shard" else model.layers[0].self_attn, mesh=mesh)
    with pytest.raises(ValueError, match="call replace before (fully_shard|DistributedDataPar)"):
        replace(model, "ssmax")
    assert not any(isinstance(part, MultiheadAttention) for part in model.modules())


def test_another_variant_in_sharded_layers_raises(mesh: Any) -> None:
    """Its learned parameters would not be sharded, and their gradients not reduced."""
    model = replace(encoder(enable_nested_tensor=False), "ssmax")
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="call replace before fully_shard"):
        replace(model, "sink")
    assert [layer.self_attn.attend.variant for layer in model.layers] == ["ssmax", "ssmax"]


@pytest.mark.slow
def test_a_compiled_encoder_runs_the_new_layers() -> None:
    model, x = encoder(enable_nested_tensor=False), rand(2, 5, 16).float()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    replace(compiled, "ssmax")
    assert torch.equal(compiled(x), model(x))
    assert not torch.allclose(compiled(x), before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_that_depend_on_positions_do_not_attend_to_another_sequence(variant: str) -> None:
    """As in convert. The other variants do."""
    x, other, params = rand(2, 7, 16).float(), rand(2, 5, 16).float(), params_of(variant)
    layer = MultiheadAttention(16, 4, batch_first=True, variant=variant, **params)
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    wrapped = MultiheadAttention(
        16, 4, batch_first=True, variant=variant, wrapper="output_gate", **params
    )
    calls = (
        lambda: layer(x, other, other),
        lambda: wrapped(x, other, other, need_weights=False),
        lambda: replace(nn.MultiheadAttention(16, 4, batch_first=True), variant, **params)(
            x, other, other
        ),
        lambda: replace(model, variant, **params)(other, x),
        lambda: replace(model.decoder.layers[0], variant, **params)(x, other),
    )
    for call in calls:
        if attnzoo.get_variant(variant).by_position:
            with pytest.raises(
                ValueError, match=f"^{variant} does not support the cross-attention"
            ):
                call()
        else:
            call()
    if attnzoo.get_variant(variant).by_position:
        assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
        later = x[:, 5:]  # the last queries of the sequence
        layer.eval()
        last = layer(later, x, x, is_causal=True)[0]
        assert torch.allclose(last, layer(x, x, x, is_causal=True)[0][:, 5:], atol=1e-6)


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
