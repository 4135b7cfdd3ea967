"""Errors of attnzoo.integrations.transformers: wrong arguments and unsupported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import (
    CLIPModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    SamConfig,
    SamModel,
    SiglipConfig,
    SiglipForImageClassification,
)

from attnzoo.core.registry import RESERVED
from attnzoo.integrations import transformers as integration
from attnzoo.integrations.transformers import convert, revert
from helpers.cases import CAUSAL_ONLY, params_of
from helpers.errors import names_beside_parameters
from helpers.hf_checks import configs, state
from helpers.hf_models import (
    bart,
    bert,
    clip,
    ids,
    image_classifier,
    llama,
    outputs,
    quiet,
)

pytestmark = quiet


def mismatched_clip() -> CLIPModel:
    """Its text model has no tokens."""
    model = clip()
    model.text_model.embeddings.token_embedding = torch.nn.Embedding(1, 3)
    return model


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
            mismatched_clip,
            ("ssmax",),
            {},
            ValueError,
            r"^inputs must be given for CLIPModel: convert\(model, variant, inputs=.* raised Runt",
        ),
        (
            lambda: torch.nn.Sequential(llama()),
            ("ssmax",),
            {},
            TypeError,
            "^pass the LlamaForCausalLM inside Sequential, not the wrapper$",
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


def test_unsupported_features_of_a_model_raise() -> None:
    """A layer that scales the weights of its heads passes a mask of them."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, keywords: (args, {**keywords, "head_mask": torch.ones(4)}),
            with_kwargs=True,
        )
    before = state(model)
    message = (
        "^LlamaForCausalLM cannot be converted: attnzoo does not support head_mask, which "
        "LlamaAttention uses$"
    )
    with pytest.raises(ValueError, match=message):
        convert(model, "ssmax")
    assert state(model) == before


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


# ---- models of several parts ------------------------------------------------------------------


def siglip_classifier() -> SiglipForImageClassification:
    config = clip().config
    parts = {f"{x}_config": getattr(config, f"{x}_config").to_dict() for x in ("text", "vision")}
    return SiglipForImageClassification(SiglipConfig(**parts)).eval()


def sam() -> SamModel:
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
        "patch_size": 8, "output_channels": 32, "mlp_dim": 64, "global_attn_indexes": [1],
        "num_pos_feats": 16,
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    decoder = {
        "hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }  # fmt: skip
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    return SamModel(config).eval()


COMPOSITES = {"clip": clip, "clip image": image_classifier, "siglip": siglip_classifier, "sam": sam}


@pytest.mark.parametrize("make", COMPOSITES.values(), ids=list(COMPOSITES))
def test_composite_models_are_converted_saved_and_reverted(make: Any, tmp_path: Path) -> None:
    """Some have a sub-config without a sub-model, whose attention implementation is None."""
    model = make().eval()
    before = state(model)
    convert(model, "ssmax", s=0.4)
    assert "attnzoo" in [config._attn_implementation for config in configs(model)]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    revert(loaded)
    implementations = [config._attn_implementation for config in configs(loaded)]
    revert(model)
    for config in configs(model):
        vars(config).pop("architectures", None)  # written by save_pretrained
    assert implementations == [config._attn_implementation for config in configs(model)]
    assert state(model)[:2] == before[:2]
    assert all(not hasattr(config, "attnzoo") for config in [*configs(model), *configs(loaded)])


def test_revert_gives_each_part_its_former_implementation() -> None:
    model = image_classifier()
    model.vision_model.set_attn_implementation("eager")
    before = state(model)
    assert state(revert(convert(model, "ssmax"))) == before
    both = clip().eval()
    both.text_model.set_attn_implementation("eager")
    before = state(both)
    assert state(revert(convert(both, "ssmax"))) == before


@pytest.mark.parametrize("part", ["", "model.layers.0"])
def test_sharded_models_are_refused(part: str, mesh: Any) -> None:
    """FSDP would not manage the new parameters."""
    model = llama()
    fully_shard(model.get_submodule(part), mesh=mesh)
    with pytest.raises(ValueError, match="convert before fully_shard"):
        convert(model, "ssmax")
    assert not any("attnzoo" in name for name, _ in model.named_modules())


def test_arguments_beside_parameters_are_reserved() -> None:
    assert names_beside_parameters(integration) <= RESERVED


def test_models_under_tensor_parallelism_are_refused(mesh: Any) -> None:
    """Each rank would save the parameters of its own heads only."""
    model = llama()
    parallelize_module(model, mesh, {"model.layers.0.self_attn.q_proj": ColwiseParallel()})
    text = "got a DTensor at model.layers.0.self_attn.q_proj.weight: convert and save the model bef"
    with pytest.raises(ValueError, match=text):
        convert(model, "ssmax")
    assert not any("attnzoo" in name for name, _ in model.named_modules())
