"""Errors of attnzoo.integrations.transformers: wrong arguments and unsupported models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from attnzoo.integrations.transformers import convert, revert
from helpers.cases import CAUSAL_ONLY, params_of
from helpers.hf_models import (
    bart,
    bert,
    clip,
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
