"""Hosts with a learned bias by relative position: T5 and its relatives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.integrations.transformers import convert
from helpers.cases import rand
from helpers.hf_models import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2,
    "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "T5": {}, "MT5": {}, "UMT5": {}, "LongT5": {"local_radius": 4}, "Pop2Piano": {}, "Udop": {},
    "SwitchTransformers": {"num_experts": 2, "num_decoder_layers": 2},
}  # fmt: skip


def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for module in model.modules():
        if isinstance(bias := getattr(module, "relative_attention_bias", None), torch.nn.Embedding):
            torch.nn.init.normal_(bias.weight)
    return model


def inputs_of(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {
        "input_ids": torch.randint(2, 99, (2, 12), generator=generator), "attention_mask": mask,
        "labels": torch.randint(2, 99, (2, 7), generator=generator),
    }  # fmt: skip
    if family == "Udop":
        inputs["bbox"] = torch.zeros(2, 12, 4)
    elif family == "Pop2Piano":  # its tokens are sounds
        inputs["inputs_embeds"] = rand(2, 12, 32).float()
        del inputs["input_ids"]
    return inputs


def gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "family",
    [f if f in ("T5", "UMT5") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_softmax_equals_the_host(family: str) -> None:
    host, inputs = model_of(family), inputs_of(family)
    model = convert(copy.deepcopy(host), "softmax", inputs=inputs)
    torch.testing.assert_close(model(**inputs).logits, host(**inputs).logits, rtol=1e-5, atol=1e-5)
    expected = gradients(host, inputs)
    assert any("relative_attention_bias" in name for name in expected)
    torch.testing.assert_close(gradients(model, inputs), expected, rtol=1e-5, atol=1e-5)
    if family != "Pop2Piano":
        tokens = {name: x for name, x in inputs.items() if name != "labels"}
        options = {**tokens, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(**options), host.generate(**options))


def test_the_bias_comes_after_the_gain_as_a_relative_bias_does() -> None:
    model = convert(model_of("T5"), "ssmax", s=0.4)
    layer = model.encoder.block[0].layer[0].SelfAttention
    x = rand(2, 200, 32).float()
    bias = attnzoo.nn.RelativeBias(num_heads=4)
    with torch.no_grad():
        bias.weight.copy_(layer.relative_attention_bias.weight)
    q, k, v = (
        project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in (layer.q, layer.k, layer.v)
    )
    out = attnzoo.attention(q, k, v, "ssmax", scale=1.0, s=0.4, relative_bias=bias())
    expected = layer.o(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_converted_model_trains_and_loads(tmp_path: Path) -> None:
    model, inputs = convert(model_of("T5"), "ssmax"), inputs_of("T5")
    optimizer = torch.optim.Adam(attnzoo.nn.parameter_groups(model), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    loaded = attnzoo.integrations.transformers.from_pretrained(
        transformers.T5ForConditionalGeneration, tmp_path
    )
    assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)


def test_variants_that_take_no_bias_raise_and_leave_the_model_unchanged() -> None:
    model = model_of("T5")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(
        ValueError, match="variant must support the position_bias of T5Attention, got 'taylor'"
    ):
        convert(model, "taylor")
    assert [name for name, _ in model.named_modules()] == names
    assert model.config._attn_implementation == "eager"
