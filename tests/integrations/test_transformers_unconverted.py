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
from helpers.hf_checks import state
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
    """Also in copies and after loading."""
    torch.manual_seed(0)
    batch = {"input_ids": ids(), "pixel_values": torch.randn(1, 3, 32, 32)}
    model = clip().eval()
    plain = model(**batch).image_embeds
    model = convert(model, "ssmax", layers=["text_model.encoder.layers.0.self_attn"], inputs=batch)
    expected = model(**batch).text_embeds
    model.save_pretrained(tmp_path)
    copies = [CLIPModel.from_pretrained(tmp_path), copy.deepcopy(model)]
    for one in (model, pickle.loads(pickle.dumps(model)), *copies):
        out = one(**batch)
        assert torch.allclose(out.text_embeds, expected, atol=1e-6)
        assert torch.allclose(out.image_embeds, plain, atol=1e-5)


def decoder_of_bart() -> Any:
    return convert(bart(), "ssmax", layers=["decoder.layers.0.self_attn"])


@pytest.mark.parametrize(
    ("make", "act"),
    [
        (llama, lambda model: model.set_attn_implementation("sdpa")),
        (llama, lambda model: model.set_attn_implementation("eager")),
        (llama, lambda model: model.set_attn_implementation({"": "sdpa"})),
        (llama, lambda model: model.model.set_attn_implementation("sdpa")),
        (bart, lambda model: model.set_attn_implementation("sdpa")),
        (decoder_of_bart, lambda model: model.encoder.set_attn_implementation("sdpa")),
        (clip, lambda model: model.set_attn_implementation({"text_config": "sdpa"})),
        (clip, lambda model: model.text_model.set_attn_implementation("sdpa")),
    ],
)  # fmt: skip
def test_a_converted_model_takes_no_other_implementation(make: Any, act: Any) -> None:
    """It would compute softmax."""
    model = make().eval()
    if not hasattr(model.config, "attnzoo"):
        convert(model, "ssmax")
    before = state(model)
    with pytest.raises(
        ValueError, match=r"must be 'attnzoo', .* for softmax call revert\(model\)$"
    ):
        act(model)
    assert state(model) == before
    model.set_attn_implementation("attnzoo")
    act(revert(model))


def test_other_parts_of_a_converted_model_take_any_implementation(tmp_path: Path) -> None:
    model = convert(clip().eval(), "ssmax", layers=["text_model.encoder.layers.0.self_attn"])
    model.set_attn_implementation({"vision_config": "eager"})
    model.vision_model.set_attn_implementation("sdpa")
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "attnzoo"
    model.save_pretrained(tmp_path)
    for chosen in ({"vision_config": "eager"}, None):
        config = CLIPModel.from_pretrained(tmp_path, attn_implementation=chosen).config
        assert config.vision_config._attn_implementation == ("eager" if chosen else "sdpa")
        assert config.text_config._attn_implementation == "attnzoo"
    for wrong in ({"text_config": "sdpa"}, "sdpa"):
        with pytest.raises(ValueError, match="layers of CLIPTextModel have variants, got 'sdpa'"):
            CLIPModel.from_pretrained(tmp_path, attn_implementation=wrong)


def test_continuous_batching_does_not_compute_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """It selects flash attention where that is installed."""
    from transformers.generation.continuous_batching import continuous_api

    model = convert(llama(), "ssmax")
    manager = continuous_api.ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn
    with pytest.raises(ValueError, match="attnzoo.* is not supported"):
        switch(object.__new__(manager), model)
    for name in ("is_flash_attn_3_available", "is_flash_attn_2_available"):
        monkeypatch.setattr(continuous_api, name, lambda **_: True)
    monkeypatch.setattr(
        type(model), "_check_and_adjust_attn_implementation", lambda _, name, **__: name
    )
    with pytest.raises(ValueError, match=r"must be 'attnzoo', .* revert\(model\)"):
        switch(object.__new__(manager), model)


def test_failed_convert_leaves_no_mark() -> None:
    model = bert()
    with pytest.raises(ValueError, match="stick_breaking"):
        convert(model, "stick_breaking")
    with pytest.raises(ValueError, match="needs a converted model"):
        set_for("attnzoo", model)(ids())
