"""Wrappers in transformers models."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

import attnzoo
from attnzoo.integrations.transformers import convert, from_config, from_pretrained, revert
from attnzoo.nn import WRAPPERS, Wrapper
from helpers.cases import rand
from helpers.hf_models import (
    GQA,
    batch,
    bert,
    generate,
    gpt2,
    gpt_oss,
    ids,
    left_padding,
    llama,
    outputs,
    quiet,
    qwen,
    vit,
)
from helpers.wrappers import MADE, definition

pytestmark = quiet
# The other wrappers are tested more often by `make test-slow`.
QUICK = ("differential", "mixture", "gate per head")
EACH = [pytest.param(w, marks=[] if w in QUICK else [pytest.mark.slow]) for w in MADE]
ONE_QUERY = [which for which, (name, _) in MADE.items() if WRAPPERS[name].queries == 1]


def wrapped(which: str, make: Any = llama, variant: str = "ssmax", **options: Any) -> Any:
    """A converted model with other parameters than initially."""
    torch.manual_seed(1)
    model = convert(make(), variant, wrapper=MADE[which], **options)
    with torch.no_grad():
        for child in children(model):
            for index, x in enumerate(child.parameters()):
                x.add_(0.3 * rand(*x.shape, seed=index).to(x))
    return model


def children(model: Any) -> list[Wrapper]:
    return [module.attnzoo for module in model.modules() if "attnzoo" in module._modules]


def recorded(model: Any) -> list[tuple[Tensor, ...]]:
    """(hidden states, q, k, v, output) of each converted layer in one run."""
    calls, hooks = [], []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        calls.append([args[0] if args else kwargs["hidden_states"]])

    def after(child: Any, args: Any, kwargs: Any, out: Any) -> None:
        calls[-1] += [*args, out]

    for module in model.modules():
        if "attnzoo" in module._modules:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.attnzoo.register_forward_hook(after, with_kwargs=True))
    with torch.no_grad():
        model(**{k: x for k, x in batch(model).items() if k != "attention_mask"})
    for hook in hooks:
        hook.remove()
    return [tuple(x.double() for x in call) for call in calls]


# ------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("make", [llama, qwen, bert, vit])
def test_layers_compute_the_definition(which: str, make: Any) -> None:
    """From the hidden states, the queries, keys and values of the model; ``qwen`` has windows."""
    model = wrapped(which, make)
    plain = recorded(convert(make(), "softmax"))
    calls = recorded(model)
    assert len(calls) == 2
    for layer, (child, (hidden, q, k, v, out)) in enumerate(zip(children(model), calls)):
        options: dict[str, Any] = {"is_causal": True} if make in (llama, qwen) else {}
        if make is qwen and layer == 1:
            options["window"] = 5
        if "differential" in which:
            assert child.layer == layer
        if layer == 0:
            expected, _ = definition(copy.deepcopy(child).double(), q, k, v, hidden, **options)
            assert torch.allclose(out, expected, atol=1e-4, rtol=1e-4)
    # The first query of each head is that of the model.
    q, theirs = calls[0][1], plain[0][1]
    assert torch.allclose(q.unflatten(1, (4, -1))[:, :, 0], theirs, atol=1e-6)


def test_a_gate_of_one_half_halves_the_output() -> None:
    model = convert(llama(), "softmax", wrapper="output_gate")
    half = llama()
    with torch.no_grad():
        for layer in half.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
    assert torch.allclose(outputs(model), outputs(half), atol=1e-6)


def test_a_mixture_of_one_is_the_model() -> None:
    model = convert(bert(), "softmax", wrapper=("mixture", {"components": 1}))
    assert torch.allclose(outputs(model), outputs(bert()), atol=1e-6)


@pytest.mark.parametrize("which", EACH)
def test_generates_the_same_with_and_without_a_cache(which: str) -> None:
    model = wrapped(which, variant="softmax")
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model, cache_implementation="static", disable_compile=True),
                       expected)  # fmt: skip


@pytest.mark.parametrize("which", ["differential", "mixture", "gate per head"])
def test_padding_does_not_change_the_outputs(which: str) -> None:
    model = wrapped(which)
    padded = model(ids(), attention_mask=left_padding()).logits[1, 4:]
    alone = model(ids()[1:, 4:]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, qwen])
@pytest.mark.parametrize("which", ONE_QUERY)
def test_models_with_other_projections(which: str, make: Any) -> None:
    """GPT-2 makes queries, keys and values with one matrix."""
    model = wrapped(which, make, layers=[1])
    assert not torch.allclose(outputs(model), outputs(make()), atol=1e-3)
    assert torch.equal(outputs(revert(model)), outputs(make()))


def test_weights_are_returned() -> None:
    model = wrapped("differential_v2")
    weights = model(ids(), output_attentions=True).attentions
    child, (hidden, q, k, v, _) = children(model)[0], recorded(model)[0]
    _, expected = definition(copy.deepcopy(child).double(), q, k, v, hidden, is_causal=True)
    assert torch.allclose(weights[0].double(), expected, atol=1e-5)


# ------------------------------------------------------------------------- training


@pytest.mark.parametrize("which", EACH)
def test_all_parameters_get_gradients(which: str) -> None:
    """Also with checkpointing, where layers run twice."""
    gradients = []
    for checkpointing in (False, True):
        model = wrapped(which).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        found = {name: x.grad for name, x in model.named_parameters()}
        assert all(g is not None and bool(g.any()) for g in found.values())
        gradients.append(found)
    first, second = gradients
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("which", MADE)
def test_compiles_as_one_graph(which: str) -> None:
    model = wrapped(which)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(ids()).logits, model(ids()).logits, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("which", MADE)
def test_bf16(which: str) -> None:
    """The gate has the dtype of the model, other parameters are fp32."""
    model = convert(llama().bfloat16(), "ssmax", wrapper=MADE[which])
    assert model(ids()).logits.dtype == torch.bfloat16
    for name, x in children(model)[0].named_parameters():
        assert x.dtype == (torch.bfloat16 if name == "gate.weight" else torch.float32), name


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
        if "vectors" in name:  # drawn at random
            assert 0 < loaded.state_dict()[name].std() < 0.3
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


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "name": (llama, {"wrapper": "lasr"}, ValueError, "wrapper must be one of .* got 'lasr'"),
    "argument": (
        llama,
        {"wrapper": ("laser", {"layer": 3})},
        TypeError,
        "wrapper 'laser' has no argument 'layer'; it has: clamp",
    ),
    "value": (llama, {"wrapper": ("laser", {"clamp": -1})}, ValueError, "clamp must be > 0"),
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
        r"wrapper must use one query per head, because GPT2Attention has no torch.nn.Linear that "
        "makes only the queries; wrappers that do: differential, laser, output_gate",
    ),
    "norm": (
        olmo,
        {"wrapper": "differential_v2"},
        ValueError,
        "wrapper must use one query per head, because Olmo2ForCausalLM does not run with more: ",
    ),
    "sinks": (
        gpt_oss,
        {"variant": "sink", "wrapper": "output_gate"},
        ValueError,
        "wrapper must be None, because GptOssAttention has learned sinks, got 'output_gate'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_leave_the_model_unchanged(what: str) -> None:
    make, options, error, message = WRONG[what]
    model = make()
    before, implementation = model.state_dict(), model.config._attn_implementation
    with pytest.raises(error, match=message):
        convert(model, **{"variant": "ssmax", **options})
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == x.data_ptr() for name, x in before.items())
    assert model.config._attn_implementation == implementation
    assert not hasattr(model.config, "attnzoo")
    assert not any(module._forward_pre_hooks for module in model.modules())


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
