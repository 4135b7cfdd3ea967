"""Errors of attnzoo.integrations.transformers: wrong arguments and unsupported models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    BartConfig,
    BartModel,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from attnzoo.integrations.transformers import convert, revert
from helpers.cases import CAUSAL_ONLY, params_of
from helpers.hf_models import (
    GQA,
    bert,
    clip,
    gpt_oss,
    ids,
    llama,
    outputs,
    quiet,
)

pytestmark = quiet


@pytest.mark.parametrize(
    ("make", "args", "options", "error", "message"),
    [
        (llama, ("softmaxx",), {}, ValueError, "'softmaxx'"),
        (llama, ("mixture",), {}, ValueError, "the name of a wrapper; pass wrapper='mixture'"),
        (llama, ("cosformer",), {}, TypeError, "requires the parameter 'max_length'"),
        (llama, ("ssmax",), {"layers": [2]}, ValueError, "layers must be from -2 to 1, got 2"),
        (llama, ("ssmax",), {"layers": [np.int64(2)]}, ValueError, "layers must be from -2 to 1"),
        (llama, ("ssmax",), {"layers": "0"}, TypeError, "layers must be a non-empty list"),
        (llama, ("ssmax",), {"layers": ["x"]}, ValueError, "layers must be among model.layers.0"),
        (
            llama,
            ("entmax",),
            {"calibrate": {}},
            ValueError,
            "'entmax' cannot be calibrated; variants that can: log_n, ssmax",
        ),
        (lambda: torch.nn.Linear(2, 2), ("ssmax",), {}, TypeError, "PreTrainedModel, got Linear"),
        (
            lambda: llama().to("meta"),
            ("ssmax",),
            {},
            ValueError,
            "model must have its weights lo",
        ),
        (
            clip,
            ("ssmax",),
            {},
            ValueError,
            "CLIPModel failed on the default batch; .*inputs=. AttributeError",
        ),
    ],
)
def test_wrong_arguments_raise(
    make: Any, args: tuple, options: dict, error: type, message: str
) -> None:
    model = make()
    with pytest.raises(error, match=message):
        convert(model, *args, **options)
    if isinstance(model, LlamaForCausalLM):
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model.config, "attnzoo")


@pytest.mark.parametrize(
    ("make", "feature"),
    [
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
            ),
            "position_bias.*T5Attention",
        ),
    ],
    ids=["t5"],
)
def test_unsupported_features_of_a_model_raise(make: Any, feature: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"attnzoo does not support {feature}"):
        convert(model, "ssmax")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("variant", CAUSAL_ONLY)
def test_causal_variant_in_an_encoder_raises(variant: str) -> None:
    model = bert()
    message = f"model must run .*, but BertModel raised: {variant} .*is_causal must be True"
    with pytest.raises(ValueError, match=message):
        convert(model, variant, **params_of(variant))
    outputs(model)


def bart() -> BartModel:
    sizes = {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64}
    layers = {f"{who}_{what}": n for who in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return BartModel(BartConfig(**sizes, **layers)).eval()


def test_half_of_an_encoder_decoder_raises() -> None:
    """The halves share a config, so that a loaded model would have both converted."""
    model = bart()
    for half in (model.encoder, model.decoder):
        with pytest.raises(ValueError, match=f"whole model, got {type(half).__name__}, which"):
            convert(half, "sigmoid")
    layers = ["encoder.layers.0.self_attn"]
    assert convert(model, "sigmoid", layers=layers).config.attnzoo["layers"].keys() == set(layers)


def test_positional_variant_in_cross_attention_raises() -> None:
    model = bart()
    with pytest.raises(ValueError, match="cosformer does not support the cross-attention of Bart"):
        convert(model, "cosformer", layers=[-1], max_length=64)
    model(input_ids=ids(), decoder_input_ids=ids(5))


def test_revert_of_another_object_raises() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel, got int"):
        revert(3)


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
    given = {"input_ids": ids(), "pixel_values": torch.randn(1, 3, 32, 32)}
    model = clip().eval()
    plain = model(**given).image_embeds
    model = convert(model, "ssmax", layers=["text_model.encoder.layers.0.self_attn"], inputs=given)
    expected = model(**given).text_embeds
    model.save_pretrained(tmp_path)
    copies = [CLIPModel.from_pretrained(tmp_path), copy.deepcopy(model)]
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(model(**given).text_embeds, expected)
    model.set_attn_implementation("attnzoo")
    for one in (model, pickle.loads(pickle.dumps(model)), *copies):
        out = one(**given)
        assert torch.allclose(out.text_embeds, expected, atol=1e-6)
        assert torch.allclose(out.image_embeds, plain, atol=1e-5)


def test_failed_convert_leaves_no_mark() -> None:
    model = bert()
    with pytest.raises(ValueError, match="stick_breaking"):
        convert(model, "stick_breaking")
    with pytest.raises(ValueError, match="needs a converted model"):
        set_for("attnzoo", model)(ids())


def test_failed_convert_restores_the_config() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="layers must be"):
        convert(model, "ssmax", layers=[99])
    assert model.config._attn_implementation == "eager"


def test_model_without_attention_raises() -> None:
    model = MambaModel(
        MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="model.*MambaModel"):
        convert(model, "ssmax")
    assert not hasattr(model.config, "attnzoo")
