"""Saving converted models whose layers were deleted, copied, moved, replaced or changed by hand."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import attnzoo
from attnzoo.integrations.transformers import convert, from_pretrained, revert
from helpers.hf_models import GQA, bart, ids, llama, quiet

pytestmark = quiet


def converted(layers: int = 4) -> LlamaForCausalLM:
    """Layer 0 has ssmax, 1 entmax with a fixed number, 2 softmax, 3 ReLU with a learned offset."""
    model = llama(num_hidden_layers=layers, initializer_range=0.3)
    convert(model, "ssmax", layers=[0], s=torch.tensor([0.3, 0.4, 0.5, 0.6]))
    convert(model, "entmax", layers=[1], alpha=1.3)
    convert(model, "sigmoid", layers=[3], learn=("bias",), bias=-1.0, wrapper="differential")
    return model


def numbered(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with the number of its layers in the config and in the layers."""
    model.config.num_hidden_layers = len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    return model


def keep(*numbers: int) -> Callable[[LlamaForCausalLM], None]:
    """A change of the layers: the given ones stay, in this order. Those named twice are copied."""

    def change(model: LlamaForCausalLM) -> None:
        layers = model.model.layers
        chosen = [layers[n] if n not in numbers[:i] else copy.deepcopy(layers[n])
                  for i, n in enumerate(numbers)]  # fmt: skip
        model.model.layers = nn.ModuleList(chosen)
        numbered(model)

    return change


def unconverted(model: LlamaForCausalLM) -> None:
    layer = llama(num_hidden_layers=4, initializer_range=0.3).model.layers[0]
    layer.self_attn.config = model.config
    model.model.layers[0] = layer


def from_another(model: LlamaForCausalLM) -> None:
    other = convert(llama(num_hidden_layers=4, initializer_range=0.3), "entmax", alpha=1.8)
    model.model.layers[2] = other.model.layers[2]


def setting(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attnzoo.alpha = 1.7


def fixed_number(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.attnzoo.b = 0.4


def learned_tensor(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.attnzoo.s = nn.Parameter(torch.full((4,), 0.9))


def new_parameter(model: LlamaForCausalLM) -> None:
    child = model.model.layers[0].self_attn.attnzoo
    del child.b
    child.b = nn.Parameter(torch.full((4,), 0.5))


CHANGES: dict[str, Callable[[LlamaForCausalLM], None]] = {
    "first deleted": keep(1, 2, 3),
    "middle deleted": keep(0, 2, 3),
    "last deleted": keep(0, 1, 2),
    "copied": keep(0, 1, 1, 2, 3, 3),
    "stacked": keep(0, 1, 2, 3, 0, 1, 2, 3),
    "reordered": keep(3, 1, 0, 2),
    "all converted ones deleted": keep(2),
    "replaced by an unconverted one": unconverted,
    "replaced by one of another model": from_another,
    "setting": setting,
    "fixed number": fixed_number,
    "learned tensor": learned_tensor,
    "new parameter": new_parameter,
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))


def described(model: LlamaForCausalLM) -> list[str]:
    children = [layer.self_attn._modules.get("attnzoo") for layer in model.model.layers]
    return [repr(child).replace(" (learned)", "") for child in children]  # state dicts show it


def assert_equal_models(loaded: Any, model: Any) -> None:
    assert described(loaded) == described(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    out, expected = (one.eval()(ids(), use_cache=False).logits for one in (loaded, model))
    assert torch.equal(out, expected)


def reloaded(model: LlamaForCausalLM, path: Path) -> Any:
    """A model made from the config and the state dict, without save_pretrained."""
    torch.save(model.state_dict(), path / "weights.pt")
    model.config.save_pretrained(path)
    loaded = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(path))
    loaded.load_state_dict(torch.load(path / "weights.pt"))
    return loaded


@every_change
def test_a_changed_model_is_saved_and_loaded(change: Any, tmp_path: Path) -> None:
    model = converted()
    change(model)
    model.save_pretrained(tmp_path)
    assert_equal_models(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    if "attnzoo" in json.loads((tmp_path / "config.json").read_text()):
        assert_equal_models(from_pretrained(AutoModelForCausalLM, tmp_path), model)


@every_change
def test_state_dict_and_config_are_those_of_the_changed_model(change: Any, tmp_path: Path) -> None:
    model = converted()
    change(model)
    assert_equal_models(reloaded(model, tmp_path), model)


def by_hand(model: LlamaForCausalLM) -> None:
    model.model.layers[2].self_attn.attnzoo = attnzoo.nn.Attention("sigmoid", 4)


def plain_tensor(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attnzoo.alpha = torch.full((4,), 1.4)


def bounded_parameter(model: LlamaForCausalLM) -> None:
    child = model.model.layers[1].self_attn.attnzoo
    del child.alpha
    child.alpha = nn.Parameter(torch.full((4,), 1.4))


def no_longer_learned(model: LlamaForCausalLM) -> None:
    child = model.model.layers[0].self_attn.attnzoo
    del child.s
    child.s = 0.7


def variant(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attnzoo.variant = "sparsemax"


def softcap(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.attnzoo.softcap = 20.0


def compiled(model: LlamaForCausalLM) -> None:
    layer = model.model.layers[0].self_attn
    layer.attnzoo = torch.compile(layer.attnzoo, backend="eager")


def of_a_wrapper(model: LlamaForCausalLM) -> None:
    model.model.layers[3].self_attn.attnzoo.initial = 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (by_hand, r"layers=\['model.layers.2.self_attn'\]\) must .* a child that convert"),
        (plain_tensor, "has a tensor alpha that is neither parameter nor buffer"),
        (bounded_parameter, "has tensors that are new: alpha"),
        (no_longer_learned, "has s=0.7, but learns s"),
        (variant, "changed by hand and has "),
        (softcap, "has softcap=20.0 instead of None"),
        (compiled, r"has a compiled child: .* method compile\(\)"),
        (of_a_wrapper, "has initial=0.1 instead of "),
    ],
)
def test_a_change_that_cannot_be_described_raises(
    change: Any, message: str, tmp_path: Path
) -> None:
    model = converted()
    change(model)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    before, expected = copy.deepcopy(model.config.attnzoo), nn.Module.state_dict(model)
    with pytest.warns(UserWarning, match=f"does not describe the layers .*{message}"):
        tensors = model.state_dict()
    assert model.config.attnzoo == before
    assert tensors.keys() == expected.keys()


def test_a_child_with_activation_checkpointing_is_saved(tmp_path: Path) -> None:
    model = converted()
    for layer in model.model.layers:
        if child := layer.self_attn._modules.get("attnzoo"):
            layer.self_attn.attnzoo = checkpoint_wrapper(child)
    assert_equal_models(reloaded(model, tmp_path), converted())


def test_a_shared_layer_is_saved_under_both_names(tmp_path: Path) -> None:
    model = convert(llama(), "entmax", layers=[0], alpha=1.3)
    model.model.layers[1] = model.model.layers[0]
    assert_equal_models(reloaded(model, tmp_path), model)


# ---- parts of models --------------------------------------------------------------------------


def test_a_changed_base_model_is_saved_alone(tmp_path: Path) -> None:
    model = converted()
    del model.model.layers[0]
    numbered(model)
    model.model.save_pretrained(tmp_path / "base")
    loaded = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(loaded(ids())[0], model.eval().model(ids())[0])
    model.save_pretrained(tmp_path / "whole")
    assert_equal_models(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), model)
    # A base model from the checkpoint of a whole one is changed and saved too.
    base = AutoModel.from_pretrained(tmp_path / "whole")
    del base.layers[0]
    base.config.num_hidden_layers = 2
    torch.save(base.state_dict(), tmp_path / "weights.pt")
    base.config.save_pretrained(tmp_path)
    again = AutoModel.from_config(LlamaConfig.from_pretrained(tmp_path))
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(*(x.eval()(ids(), use_cache=False)[0] for x in (again, base)))


def test_half_of_an_encoder_decoder_is_saved_alone(tmp_path: Path) -> None:
    """The halves share a config, which still describes both afterwards."""
    model = convert(bart(), "ssmax", s=0.4)
    before = copy.deepcopy(model.config.attnzoo)
    model.encoder.save_pretrained(tmp_path)
    model.encoder.state_dict()
    assert model.config.attnzoo == before
    loaded = type(model.encoder).from_pretrained(tmp_path)
    assert torch.equal(loaded(ids())[0], model.encoder(ids())[0])
    assert len(before["layers"]) == 3


def test_a_reverted_part_is_saved(tmp_path: Path) -> None:
    text, vision = LlamaConfig(**GQA), CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=4,
    )  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)
    model = LlavaForConditionalGeneration(config).eval()
    pixels = torch.zeros(1, 3, 16, 16)
    batch = {"input_ids": torch.tensor([[98] * 16 + [5, 6]]), "pixel_values": pixels}
    convert(model, "ssmax", s=0.7, inputs=batch)
    assert len(model.config.attnzoo["layers"]) >= 3
    revert(model.model.vision_tower)
    model.save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.allclose(loaded(**batch).logits, model(**batch).logits, atol=1e-6)


# ---- checkpoints that do not fit their config -------------------------------------------------


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def no_number(config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 3


def one_more(config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 5


def one_less_in_the_spec(config: dict[str, Any]) -> None:
    del config["attnzoo"]["layers"]["model.layers.0.self_attn"]


def another_in_the_spec(config: dict[str, Any]) -> None:
    layers = config["attnzoo"]["layers"]
    layers["model.layers.2.self_attn"] = layers["model.layers.0.self_attn"]


def no_spec(config: dict[str, Any]) -> None:
    del config["attnzoo"], config["attn_implementation"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_number, "got 'model.layers.3.self_attn', but layers of LlamaModel has 3 layers"),
        (one_more, "as many layers as the checkpoint, which has no weights of model.layers.4"),
        (one_less_in_the_spec, "does not have model.layers.0.self_attn.attnzoo.s"),
        (another_in_the_spec, "of none, but lacks model.layers.2.self_attn.attnzoo.s"),
        (no_spec, "config.attnzoo must describe the layers of the checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_raises(
    change: Any, message: str, tmp_path: Path
) -> None:
    converted().save_pretrained(tmp_path)
    config = config_of(tmp_path)
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_deleted_layers_that_the_config_still_counts_raise(tmp_path: Path) -> None:
    model = converted()
    del model.model.layers[1]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no weights of model.layers.3"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ---- copies, trainers and adapters ------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_models_describe_themselves(clone: Any, tmp_path: Path) -> None:
    model = converted()
    other = clone(model)
    CHANGES["middle deleted"](other)
    other.save_pretrained(tmp_path)
    assert_equal_models(AutoModelForCausalLM.from_pretrained(tmp_path), other)
    assert list(model.config.attnzoo["layers"]) != list(other.config.attnzoo["layers"])


@pytest.mark.slow
def test_checkpoints_of_a_trainer_describe_a_changed_model(tmp_path: Path) -> None:
    model = converted()
    CHANGES["copied"](model)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids()]
    Trainer(model, arguments, train_dataset=data).train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert_equal_models(loaded, model)


def test_a_model_that_shares_the_config_of_a_converted_one_does_not_change_it() -> None:
    model = llama()
    other = LlamaForCausalLM(model.config)
    convert(model, "ssmax")
    before = copy.deepcopy(model.config.attnzoo)
    other.state_dict()
    assert model.config.attnzoo == before
    revert(model)


def test_state_dict_draws_no_random_numbers() -> None:
    model = converted()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    model.state_dict()
    assert torch.rand(1) == expected
