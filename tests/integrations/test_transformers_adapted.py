"""MPNet, whose attention does not call AttentionInterface: bias, copies, other layers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetLayer, MPNetSelfAttention

import attnzoo
from attnzoo.integrations.transformers import convert, from_pretrained, revert
from helpers.hf_checks import state
from helpers.hf_hosts import mpnet
from helpers.hf_models import ids, left_padding, quiet, transformers

pytestmark = quiet


def logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    """The logits of two sequences of which one is shorter, or of some tokens."""
    if tokens is not None:
        return model(tokens).logits
    mask = left_padding().flip(1)
    return model(ids(), attention_mask=mask).logits[mask.bool()]


def classes(model: Any) -> list[type]:
    return [type(module) for module in model.modules()]


def attention_of(model: Any, layer: int = 0) -> Any:
    return model.mpnet.encoder.layer[layer].attention.attn


def biases_of(model: Any) -> list[tuple[Tensor | None, Tensor | None]]:
    """The tables and masks that the first layer's child gets from now on."""
    biases = []

    def record(child: Any, args: Any, options: dict[str, Any]) -> None:
        biases.append((options.get("relative_bias"), options.get("attn_mask")))

    attention_of(model).attnzoo.register_forward_pre_hook(record, with_kwargs=True)
    return biases


@pytest.mark.parametrize(
    "variant", ["ssmax", *(pytest.param(x, marks=pytest.mark.slow) for x in ("entmax", "sigmoid"))]
)
def test_a_model_with_a_variant_trains_and_loads(variant: str, tmp_path: Path) -> None:
    model = convert(mpnet(), variant).train()
    optimizer = torch.optim.AdamW(attnzoo.nn.parameter_groups(model, 0.1), lr=1e-2)
    weight = model.mpnet.encoder.relative_attention_bias.weight
    losses, before = [], weight.detach().clone()
    for _ in range(3):
        loss = model(ids(), attention_mask=left_padding().flip(1), labels=ids()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not torch.equal(weight, before)
    expected = logits(model.eval())
    assert not torch.allclose(logits(revert(copy.deepcopy(model))), expected, atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)
    assert torch.equal(logits(loaded), expected)
    assert attention_of(loaded).attnzoo.variant == variant


def test_the_bias_comes_as_a_table_with_the_numbers_of_the_host() -> None:
    host = mpnet().double()
    model = convert(copy.deepcopy(host), "softmax")
    biases = biases_of(model)
    tokens = torch.randint(2, 99, (2, 280), generator=torch.Generator().manual_seed(0))
    actual, expected = logits(model, tokens), logits(host, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    ((table, mask),) = biases
    assert table is not None
    assert mask is None
    matrix = host.mpnet.encoder.compute_position_bias(torch.zeros(1, 280, 32))[0]
    at = torch.arange(280) - torch.arange(280)[:, None]
    assert torch.equal(table[:, 128 + at.clamp(-128, 128)], matrix)


def test_weights_equal_those_of_the_host() -> None:
    host, options = mpnet(), {"attention_mask": left_padding().flip(1), "output_attentions": True}
    model = convert(copy.deepcopy(host), "softmax", layers=[1])
    for actual, expected in zip(
        model(ids(), **options).attentions, host(ids(), **options).attentions, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_dropped_as_the_host_drops_them() -> None:
    host = mpnet().train()
    for module in host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5 if module is attention_of(host, 1).dropout else 0.0
    model = convert(copy.deepcopy(host), "softmax")
    outputs = []
    for one in (host, model):
        torch.manual_seed(0)
        outputs.append(logits(one))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda model: pickle.loads(pickle.dumps(model)), id="pickle"),
        pytest.param(lambda model: convert(model, "softmax"), id="converted twice"),
    ],
)
def test_copies_compute_the_same_and_revert_restores_the_host(copied: Any) -> None:
    host = mpnet()
    model = copied(convert(copy.deepcopy(host), "softmax"))
    biases, expected = biases_of(model), logits(host)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert biases[0][0] is not None
    assert classes(revert(model)) == classes(host)
    assert torch.equal(logits(model), expected)


def test_an_error_leaves_the_model_unchanged() -> None:
    model = mpnet()
    before = state(model), classes(model)
    with pytest.raises(ValueError, match="support the position_bias of MPNetSelfAttention, got 't"):
        convert(model, "taylor")
    with pytest.raises(ValueError, match="model must run after the conversion"):
        convert(model, "stick_breaking")
    assert (state(model), classes(model)) == before


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    model = convert(mpnet(), "ssmax")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)


# ---- layers of other classes -------------------------------------------------------------------


class ScaledBias(MPNetLayer):
    def forward(self, *args: Any, **options: Any) -> Any:
        states, mask, bias = args
        bias = bias * torch.linspace(0, 1, bias.shape[-1])
        return super().forward(states, mask, bias, **options)


class OtherAttention(MPNetSelfAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        states, mask, bias = args
        return super().forward(states, mask, 2 * bias, **options)


@pytest.mark.parametrize("changed", [ScaledBias, OtherAttention])
def test_a_layer_of_another_class_gets_the_bias_as_a_matrix(changed: type) -> None:
    host = mpnet()
    layer = host.mpnet.encoder.layer[1]
    (layer if changed is ScaledBias else layer.attention.attn).__class__ = changed
    model = convert(copy.deepcopy(host), "softmax")
    biases = biases_of(model)
    torch.testing.assert_close(logits(model), logits(host), rtol=1e-5, atol=1e-5)
    assert biases[0][0] is None
    assert hasattr(attention_of(model, 1), "attnzoo") == (changed is ScaledBias)
