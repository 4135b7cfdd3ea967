"""Converting models with wrappers: again, back, saving and loading, wrong calls."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    VideoMAEConfig,
    VideoMAEModel,
)

import attnzoo
from attnzoo.integrations.transformers import convert, from_config, from_pretrained, revert
from helpers.hf_hosts import inkling2
from helpers.hf_models import (
    GQA,
    SMALL,
    bert,
    gpt2,
    gpt_oss,
    llama,
    outputs,
    quiet,
)
from helpers.hf_wrappers import EACH, ONE_QUERY, children, wrapped
from helpers.wrappers import MADE

pytestmark = quiet

# ------------------------------------------------------------------ other conversions


def test_converting_again_keeps_the_models_queries() -> None:
    model = llama()
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    for wrapper, rows in (("mixture", 2), (("mixture", {"components": 3}), 3), ("laser", 1)):
        convert(model, "softmax", wrapper=wrapper)  # pyright: ignore
        layer = model.model.layers[0].self_attn.q_proj
        assert layer.weight.shape == (rows * 32, 32)
        assert layer.out_features == rows * 32
        assert torch.equal(layer.weight.unflatten(0, (4, rows, 8))[:, 0].flatten(0, 1), before)
    convert(model, "softmax")
    assert not model.model.layers[0].self_attn._forward_pre_hooks
    assert torch.allclose(outputs(model), outputs(llama()), atol=1e-6)


def test_new_queries_are_drawn_like_the_models() -> None:
    torch.manual_seed(0)
    model = convert(llama(hidden_size=128), "softmax", wrapper="differential_v2", layers=[0])
    rows = model.model.layers[0].self_attn.q_proj.weight.detach().unflatten(0, (4, 2, 32))
    # The standard error of the standard deviation of 16,384 numbers is 0.6 %.
    assert rows[:, 1].std() == pytest.approx(rows[:, 0].std().item(), rel=0.04)
    assert (rows[:, 0] * rows[:, 1]).mean() / rows[:, 0].var() < 0.04


@pytest.mark.parametrize("which", EACH)
def test_revert_restores_the_model(which: str) -> None:
    model = revert(wrapped(which))
    expected = llama().state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    assert torch.equal(outputs(model), outputs(llama()))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("which", EACH)
def test_saved_models_are_loaded(which: str, tmp_path: Path) -> None:
    model = wrapped(which, layers=[1])
    model.save_pretrained(tmp_path)
    expected = outputs(model)
    for load in (AutoModelForCausalLM.from_pretrained,
                 lambda path: from_pretrained(AutoModelForCausalLM, path)):  # fmt: skip
        loaded = load(tmp_path)
        assert torch.equal(outputs(loaded), expected)
        assert torch.equal(outputs(revert(loaded)), outputs(llama()))
    made = from_config(AutoModelForCausalLM, model.config)
    assert {n: x.shape for n, x in made.state_dict().items()} == {
        n: x.shape for n, x in model.state_dict().items()
    }


@pytest.mark.parametrize("which", ONE_QUERY)
def test_missing_values_become_initial_values(which: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = convert(llama(), "ssmax", wrapper=MADE[which], s=0.3)
    model.config.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    for name, x in model.state_dict().items():
        if "vectors" in name or "mlp.0" in name:  # drawn at random
            assert 0 < loaded.state_dict()[name].std() < (0.3 if "vectors" in name else 1)
        else:
            assert torch.equal(loaded.state_dict()[name], x), name


@pytest.mark.parametrize("which", ["mixture", "gate per element"])
def test_models_are_copied_and_pickled(which: str) -> None:
    model = wrapped(which)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(other), outputs(model))
        children(other)[0].gate.weight.data.add_(1)  # pyright: ignore
        assert not torch.equal(outputs(other), outputs(model))


# ------------------------------------------------------------------------- errors


def olmo() -> Olmo2ForCausalLM:
    """Its norm of the queries has one factor per feature of all heads."""
    torch.manual_seed(0)
    return Olmo2ForCausalLM(Olmo2Config(**GQA)).eval()


def tied() -> Any:
    model = llama()
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    second.weight = first.weight
    return model


def videomae() -> VideoMAEModel:
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    config = VideoMAEConfig(**sizes, image_size=16, patch_size=4, num_frames=2, tubelet_size=2)
    return VideoMAEModel(config).eval()


def frames(model: Any) -> dict[str, Any]:
    """Inputs for models without a minimal batch."""
    return {"inputs": {"pixel_values": torch.zeros(1, 2, 3, 16, 16)}} if model is videomae else {}


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "name": (llama, {"wrapper": "lasr"}, ValueError, "wrapper must be one of .* got 'lasr'"),
    "argument": (
        llama,
        {"wrapper": ("laser", {"layer": 3})},
        TypeError,
        "wrapper 'laser' has no argument 'layer'; it has: clamp",
    ),
    "value": (
        llama,
        {"wrapper": ("laser", {"clamp": -1})},
        ValueError,
        "clamp must be a number > 0",
    ),
    "start": (
        llama,
        {"wrapper": "laser", "start": "identity"},
        ValueError,
        "start must be None with a wrapper, got 'identity' with 'laser'",
    ),
    "fused": (
        gpt2,
        {"wrapper": "mixture"},
        ValueError,
        r"wrapper must use one query per head, because GPT2Attention has no torch.nn.Linear with "
        "32 rows named q_proj, query, q_lin, wq, q; wrappers that do: differential, laser, output",
    ),
    "norm": (
        olmo,
        {"wrapper": "differential_v2"},
        ValueError,
        "model must run after the conversion, but Olmo2ForCausalLM raised: .*must match.*"
        "; a model that computes with .* needs a wrapper with one query per head: differential, l",
    ),
    "gain": (
        inkling2,
        {"variant": "sink", "wrapper": "mixture"},
        ValueError,
        "Inkling2ForCausalLM raised: .* needs a wrapper with one query per head: differential,",
    ),
    "tied": (
        lambda: tied(),
        {"wrapper": "mixture"},
        ValueError,
        r"because model.layers.0.self_attn.q_proj and model.layers.1.self_attn.q_proj share the",
    ),
    "no keywords": (
        videomae,
        {"wrapper": "output_gate"},
        ValueError,
        "wrapper must have no gate, because VideoMAESelfAttention takes no further keywords",
    ),
    "half": (
        lambda: llama().half(),
        {"wrapper": "laser"},
        ValueError,
        "model must run after the conversion, but LlamaForCausalLM raised: clamp must be at most 9",
    ),
    "not causal": (
        bert,
        {"variant": "forgetting", "wrapper": "mixture", "log_gates": -0.1},
        ValueError,
        "model must run after the conversion, but BertModel raised: ",
    ),
    "sinks": (
        gpt_oss,
        {"variant": "sink", "wrapper": "differential"},
        ValueError,
        "the sinks of GptOssAttention are scores of whole heads, got 'differential'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_leave_the_model_unchanged(what: str) -> None:
    make, options, error, message = WRONG[what]
    model = make()
    before, implementation = model.state_dict(), model.config._attn_implementation
    with pytest.raises(error, match=message):
        convert(model, **{"variant": "ssmax", **frames(make), **options})
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == x.data_ptr() for name, x in before.items())
    assert model.config._attn_implementation == implementation
    assert not hasattr(model.config, "attnzoo")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_revert_that_fails_changes_nothing() -> None:
    model = wrapped("mixture")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj = torch.nn.Sequential(second.q_proj)  # as PEFT wraps a layer
    with pytest.raises(
        ValueError, match="because LlamaAttention has no torch.nn.Linear with 96 rows"
    ):
        revert(model)
    assert first.attnzoo.queries == 3
    assert first.q_proj.out_features == 96


def test_convert_keeps_the_modes_of_modules() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    convert(model, "softmax", wrapper="laser")
    assert [layer.training for layer in model.model.layers] == [False, True]
    assert [child.training for child in children(model)] == [False, True]


def test_numpy_numbers_are_saved(tmp_path: Path) -> None:
    wrapper = ("laser", {"clamp": np.float32(9)})
    model = convert(llama(), "ssmax", s=np.float32(0.4), wrapper=wrapper)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.equal(outputs(loaded), outputs(model))


def test_arguments_of_a_wrapper_are_copied(tmp_path: Path) -> None:
    arguments = {"components": 3}
    model = convert(llama(), "softmax", wrapper=("mixture", arguments))
    arguments["components"] = 2
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


def test_wrong_entries_of_a_config_raise(tmp_path: Path) -> None:
    wrapped("laser").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["attnzoo"]["layers"]["model.layers.0.self_attn"]["wrapper"]["qk_dim"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"wrapper of layer 'model\.layers\.0\.self_attn' must"):
        from_pretrained(AutoModelForCausalLM, tmp_path)


def test_a_second_call_needs_no_wrapper_to_stay() -> None:
    model = convert(llama(), "ssmax", wrapper="differential_v2")
    convert(model, "entmax", layers=[0], wrapper="output_gate")
    first, second = children(model)
    assert [type(first).__name__, type(second).__name__] == ["OutputGate", "DifferentialV2"]
    assert attnzoo.nn.parameter_groups(model, 0.1)[1]["params"]
    assert outputs(model).isfinite().all()
