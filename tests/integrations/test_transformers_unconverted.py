"""Models with attn_implementation="attnzoo" that were not converted, or only in part."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, CLIPModel, LlamaConfig, LlamaForCausalLM

from attnzoo.integrations.transformers import convert, revert
from helpers.hf_models import GQA, bart, bert, clip, gpt_oss, ids, llama, quiet

pytestmark = quiet


def set_for(name: Any, model: Any) -> Any:
    model.set_attn_implementation(name)
    return model


def loaded_with_the_name(folder: Path) -> Any:
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="attnzoo")


@pytest.mark.parametrize(
    "make",
    [
        lambda _: AutoModel.from_config(llama().config, attn_implementation="attnzoo"),
        lambda _: LlamaForCausalLM(LlamaConfig(**GQA, attn_implementation="attnzoo")),
        loaded_with_the_name,
        lambda _: set_for("attnzoo", llama()),
        lambda _: set_for("attnzoo", bert()),
        lambda _: set_for("attnzoo", bart()),
        lambda _: set_for({"": "attnzoo"}, gpt_oss()),
        lambda _: copy.deepcopy(set_for("attnzoo", llama())),
        lambda _: set_for("attnzoo", revert(convert(llama(), "ssmax"))),
    ],
)
def test_the_name_alone_does_not_compute_softmax(make: Any, tmp_path: Path) -> None:
    """A model gets a variant by convert, not by the name of the attention implementation."""
    model = make(tmp_path)
    inputs = {"decoder_input_ids": ids()} if model.config.is_encoder_decoder else {}
    with pytest.raises(ValueError, match=r'"attnzoo" needs a converted model.*convert\(model, va'):
        model(ids(), **inputs)
    convert(model, "sink" if model.config.model_type == "gpt_oss" else "ssmax")
    model(ids(), **inputs)
    assert revert(model).config._attn_implementation == "eager"
    model(ids(), **inputs)


def test_the_name_of_one_part_does_not_compute_softmax() -> None:
    model = set_for({"text_config": "attnzoo"}, clip())
    images = torch.zeros(1, 3, 32, 32)
    model.get_image_features(images)
    with pytest.raises(ValueError, match="CLIPAttention is not part of one"):
        model(ids(), images)


def test_other_layers_and_parts_of_a_converted_model_compute_softmax(tmp_path: Path) -> None:
    """Also in copies, after loading and after other implementations."""
    torch.manual_seed(0)
    batch = {"input_ids": ids(), "pixel_values": torch.randn(1, 3, 32, 32)}
    model = clip().eval()
    plain = model(**batch).image_embeds
    model = convert(model, "ssmax", layers=["text_model.encoder.layers.0.self_attn"], inputs=batch)
    expected = model(**batch).text_embeds
    model.save_pretrained(tmp_path)
    copies = [CLIPModel.from_pretrained(tmp_path), copy.deepcopy(model)]
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(model(**batch).text_embeds, expected)
    model.set_attn_implementation("attnzoo")
    for one in (model, pickle.loads(pickle.dumps(model)), *copies):
        out = one(**batch)
        assert torch.allclose(out.text_embeds, expected, atol=1e-6)
        assert torch.allclose(out.image_embeds, plain, atol=1e-5)


def test_failed_convert_leaves_no_mark() -> None:
    model = bert()
    with pytest.raises(ValueError, match="stick_breaking"):
        convert(model, "stick_breaking")
    with pytest.raises(ValueError, match="needs a converted model"):
        set_for("attnzoo", model)(ids())
