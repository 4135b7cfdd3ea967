"""PEFT with converted models and with replaced layers: which comes first, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import attnzoo
from attnzoo.integrations.transformers import convert, revert
from helpers.hf_models import LlamaForCausalLM, ids, llama, quiet

pytestmark = quiet


def lora(*targets: str, **options: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)


def adapted(model: Any) -> PeftModel:
    return get_peft_model(model, lora("q_proj", "v_proj", modules_to_save=["attnzoo"])).eval()


@pytest.mark.parametrize(
    "call", [lambda model: convert(model, "ssmax"), revert], ids=["convert", "revert"]
)
def test_an_adapted_model_raises_with_what_to_do(call: Any) -> None:
    message = (
        r"^pass the LlamaForCausalLM inside PeftModel.*: convert it before get_peft_model, with "
        r"'attnzoo' in modules_to_save; or pass model.get_base_model\(\)"
    )
    with pytest.raises(TypeError, match=message):
        call(adapted(convert(llama(), "ssmax")))
    model = get_peft_model(llama(), lora("q_proj"))
    expected = model(ids()).logits
    convert(model.get_base_model(), "softmax")
    assert torch.allclose(model(ids()).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"variant": "ssmax"}, {"variant": "entmax", "alpha": 1.4}, {"variant": "forgetting"}],
)
def test_adapters_of_a_converted_model_are_saved_loaded_and_merged(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(convert(llama(initializer_range=0.3), **options))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "attnzoo" in name and "default" in name:
                x.fill_(0.9)
    expected = model(ids()).logits
    model.save_pretrained(tmp_path / "adapter")
    base = convert(llama(initializer_range=0.3), **options)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids()).logits, expected)
    merged: Any = model.merge_and_unload()
    del merged.model.layers[0]
    merged.config.num_hidden_layers = 1
    merged.save_pretrained(tmp_path / "merged")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    plain: Any = again.eval()(ids(), use_cache=False).logits
    assert torch.equal(plain, merged(ids(), use_cache=False).logits)


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def test_replace_after_an_adapter_raises_with_what_to_do() -> None:
    model: Any = get_peft_model(encoder(), lora("self_attn"))
    x = torch.randn(1, 5, 32)
    expected = model(x)
    with pytest.raises(ValueError, match=r"^merge the adapter of .*self_attn before replace\(\)"):
        attnzoo.nn.replace(model, "ssmax")
    assert torch.equal(model(x), expected)
    merged = model.merge_and_unload()
    expected = merged(x)
    assert torch.allclose(attnzoo.nn.replace(merged, "softmax")(x), expected, atol=1e-5)


def test_linear_layers_of_a_replaced_model_are_adapted() -> None:
    model: Any = attnzoo.nn.replace(encoder(), "ssmax")
    model = get_peft_model(model, lora("linear1", modules_to_save=["attend"]))
    model(torch.randn(1, 5, 32)).sum().backward()
    trained = [name for name, x in model.named_parameters() if x.grad is not None]
    assert any("linear1.lora_A" in name for name in trained)
    assert any("attend" in name for name in trained)
