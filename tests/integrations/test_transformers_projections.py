"""Parameters that a converted layer makes from the hidden states."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, logsigmoid, softplus
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    DynamicCache,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    VideoMAEConfig,
    VideoMAEModel,
)

import attnzoo
from attnzoo.integrations.transformers import convert, from_config, from_pretrained, revert
from helpers.cases import rand
from helpers.hf_models import (
    SMALL,
    bart,
    bert,
    generate,
    gpt2,
    ids,
    left_padding,
    llama,
    outputs,
    quiet,
    qwen,
)

pytestmark = quiet

PROJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "per key": ("forgetting", {}),
    "per query": ("asentmax", {"beta": "projected", "gamma": "projected", "extra": 1}),
    "in a wrapper": ("forgetting", {"wrapper": "mixture"}),
    "beside a gate": ("forgetting", {"wrapper": "output_gate"}),
}


def projecting(which: str, make: Any = llama, **options: Any) -> Any:
    """A converted model whose children have other parameters than initially."""
    variant, arguments = PROJECTED[which]
    torch.manual_seed(1)
    model = convert(make(), variant, **arguments, **options)
    with torch.no_grad():
        for child in children(model):
            for index, x in enumerate(child.parameters()):
                x.add_(0.3 * rand(*x.shape, seed=index).to(x))
    return model


def children(model: Any) -> list[Any]:
    return [module.attnzoo for module in model.modules() if "attnzoo" in module._modules]


def calls_of(model: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
    """(hidden states, (q, k, v), keywords, output) of each converted layer in one run."""
    hidden, calls, hooks = [], [], []
    for module in model.modules():
        if "attnzoo" in module._modules:
            hooks += [
                module.register_forward_pre_hook(
                    lambda _, args, kw: hidden.append(kw["hidden_states"]), with_kwargs=True
                ),
                module.attnzoo.register_forward_hook(
                    lambda _, qkv, kw, out: calls.append((hidden[-1], qkv, kw, out)),
                    with_kwargs=True,
                ),
            ]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return calls


# ------------------------------------------------------------------------- outputs


def test_forget_gates_are_those_of_the_hidden_states() -> None:
    model = projecting("per key")
    for child, (x, (q, k, v), _, out) in zip(children(model), calls_of(model, ids()), strict=True):
        projection = child.projections["log_gates"]
        gates = logsigmoid(linear(x, projection.weight, projection.bias)).transpose(1, 2)
        c = gates.double().cumsum(-1)
        k, v = (y.double().repeat_interleave(2, 1) for y in (k, v))
        scores = q.double() @ k.mT / 8**0.5 + c[..., None] - c[..., None, :]
        scores += torch.full((12, 12), -torch.inf).triu(1)
        assert torch.allclose(out.double(), scores.softmax(-1) @ v, atol=1e-5)


def test_gains_are_those_of_the_hidden_states() -> None:
    model = projecting("per query")
    for child, (x, qkv, _, out) in zip(children(model), calls_of(model, ids()), strict=True):
        made = {
            name: linear(x, projection.weight, projection.bias).transpose(1, 2)
            for name, projection in child.projections.items()
        }
        params = {"beta": softplus(made["beta"]), "gamma": 2 * made["gamma"].tanh(), "extra": 1}
        expected = attnzoo.attention(*qkv, "asentmax", is_causal=True, enable_gqa=True, **params)
        assert torch.allclose(out, expected, atol=1e-6)


def test_projections_start_with_the_values_of_the_variant() -> None:
    """A bias of 5 for forgetting; β = log 2 and γ = 0 for asentmax."""
    model = convert(llama(), "forgetting")
    gate = float(logsigmoid(torch.tensor(5.0)))
    expected = outputs(convert(llama(), "forgetting", log_gates=gate))
    assert torch.allclose(outputs(model), expected, atol=1e-6)
    model = convert(llama(), "asentmax", beta="projected", gamma="projected")
    assert torch.allclose(outputs(model), outputs(convert(llama(), "asentmax")), atol=1e-6)


@pytest.mark.parametrize("which", ["per query", "in a wrapper"])
def test_padding_does_not_change_the_outputs(which: str) -> None:
    model = projecting(which)
    padded = model(ids(), attention_mask=left_padding()).logits[1, 4:]
    alone = model(ids()[1:, 4:]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize("which", PROJECTED)
def test_all_parameters_get_gradients(which: str) -> None:
    """Also with checkpointing, where layers run twice, and beside a cache, as by default."""
    gradients = []
    for options in ({}, {"use_cache": False}, {"checkpointing": True}):
        model = projecting(which).train()
        if options.pop("checkpointing", False):
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids(), **options).loss.backward()
        named = {name: x.grad for name, x in model.named_parameters()}
        assert all(g is not None and bool(g.any()) for g in named.values())
        gradients.append(named)
    first, *others = gradients
    for other in others:
        assert all(torch.allclose(first[name], other[name], atol=1e-6) for name in first)


# ------------------------------------------------------------------------- caches


@pytest.mark.parametrize(("which", "make"), [*((w, llama) for w in PROJECTED), ("per key", qwen)])
def test_generates_the_same_with_and_without_a_cache(which: str, make: Any) -> None:
    """``qwen`` has a sliding window, whose cache drops keys."""
    model = projecting(which, make)
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, **static), expected)
    if which == "per key":  # the cache is then allocated before the first call
        assert torch.equal(generate(model, prefill_chunk_size=5, **static), expected)
    beams = generate(model, num_beams=3, use_cache=False)
    assert torch.equal(generate(model, num_beams=3), beams)


SIZES = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OTHER_KEYWORD: dict[str, Any] = {
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, initializer_range=0.3)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**SIZES)),
    "ctrl": lambda: CTRLLMHeadModel(CTRLConfig(**SIZES, dff=64)),
}


@pytest.mark.parametrize("which", OTHER_KEYWORD)
def test_goes_on_where_the_cache_has_another_keyword(which: str) -> None:
    model = projecting("per key", lambda: OTHER_KEYWORD[which]().eval())
    with torch.no_grad():
        full = model(ids()).logits
        cache = model(ids()[:, :7], use_cache=True).past_key_values
        continued = model(ids()[:, 7:], past_key_values=cache).logits
    assert torch.allclose(continued, full[:, 7:], atol=1e-5)


def test_a_cropped_cache_goes_on() -> None:
    model, cache = projecting("per key"), DynamicCache()
    with torch.no_grad():
        full = model(ids()).logits
        model(torch.cat([ids()[:, :6], ids()[:, :5]], 1), past_key_values=cache)
        cache.crop(-5)
        continued = model(ids()[:, 6:], past_key_values=cache).logits
    assert torch.allclose(continued, full[:, 6:], atol=1e-5)


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float64, False),
     (torch.bfloat16, True), (torch.float16, True)],
)  # fmt: skip
def test_a_cache_does_not_round(dtype: torch.dtype, autocast: bool, kv: int) -> None:
    """The gates of earlier tokens are those of the call that made them, in fp32 or fp64.

    Under autocast the keys are in fp32, because of the rotary encoding, and the values are not.
    """
    of_model = torch.float32 if autocast else dtype
    model = projecting("per key", lambda: llama(num_key_value_heads=kv).to(of_model))
    cache = DynamicCache()
    with torch.autocast("cpu", dtype, enabled=autocast):
        first = [call[2]["log_gates"] for call in calls_of(model, ids(), past_key_values=cache)]
        second = calls_of(model, ids(1), past_key_values=cache)
    for before, (_, (_, _, values), options, _) in zip(first, second, strict=True):
        gates = options["log_gates"]
        assert gates.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert gates.shape == (2, 4, 13)
        assert torch.equal(gates[..., :12], before)
        assert values.shape == (2, kv, 13, 8)


# ------------------------------------------------------------------ other conversions


@pytest.mark.parametrize("which", PROJECTED)
def test_models_are_saved_loaded_and_reverted(which: str, tmp_path: Path) -> None:
    model = projecting(which, layers=[1])
    model.save_pretrained(tmp_path)
    expected = outputs(model)
    for load in (
        AutoModelForCausalLM.from_pretrained,
        lambda path: from_pretrained(AutoModelForCausalLM, path),
    ):
        loaded = load(tmp_path)
        assert torch.equal(outputs(loaded), expected)
        generated = generate(loaded)
        assert torch.equal(generated, generate(model))
        assert torch.equal(outputs(revert(loaded)), outputs(llama()))
        assert not any(module._forward_pre_hooks for module in loaded.modules())
        assert loaded.state_dict().keys() == llama().state_dict().keys()
    made = from_config(AutoModelForCausalLM, model.config)
    assert made.state_dict().keys() == model.state_dict().keys()
    other = copy.deepcopy(model)
    assert torch.equal(outputs(other), expected)


def test_missing_values_become_initial_values(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = convert(llama(), "forgetting")
    model.config.save_pretrained(tmp_path)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path)
    names = [name for name in model.state_dict() if "attnzoo" in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(loaded.state_dict()[name], model.state_dict()[name])


def test_projections_have_the_dtype_of_the_model() -> None:
    model = convert(llama().bfloat16(), "forgetting")
    assert {x.dtype for x in children(model)[0].parameters()} == {torch.bfloat16}
    assert model(ids()).logits.dtype == torch.bfloat16
    decayed, constant = attnzoo.nn.parameter_groups(model, 0.1)
    assert {x.shape for x in constant["params"]} == {(4,)}
    assert any(x.shape == (4, 32) for x in decayed["params"])


def test_a_value_replaces_the_projection() -> None:
    model = convert(llama(), "forgetting")
    convert(model, "forgetting", log_gates=-0.1)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [child.projections for child in children(model)] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["per key", "per query"])
def test_compiles_as_one_graph(which: str) -> None:
    model = projecting(which)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(ids()).logits, model(ids()).logits, atol=1e-5)
    torch.compiler.reset()


# ------------------------------------------------------------------------- errors


def videomae() -> VideoMAEModel:
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    config = VideoMAEConfig(**sizes, image_size=16, patch_size=4, num_frames=2, tubelet_size=2)
    return VideoMAEModel(config).eval()


@pytest.mark.parametrize(
    ("make", "variant", "params", "message"),
    [
        (bert, "forgetting", {}, "must run .*, but BertModel raised: forgetting .*is_causal must"),
        (
            bart, "forgetting", {"layers": [-1]},
            "forgetting does not support the cross-attention of BartAttention",
        ),
        (
            videomae, "asentmax", {"beta": "projected"},
            r"asentmax's beta must be given to convert, as a number or a tensor \(H,\), because "
            "VideoMAESelfAttention takes no further keywords",
        ),
    ],
)  # fmt: skip
def test_unsupported_hosts_raise_and_stay_unchanged(
    make: Any, variant: str, params: dict[str, Any], message: str
) -> None:
    model = make()
    frames = {"inputs": {"pixel_values": torch.zeros(1, 2, 3, 16, 16)}} if make is videomae else {}
    before = set(model.state_dict()), model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        convert(model, variant, **params, **frames)
    assert (set(model.state_dict()), model.config._attn_implementation) == before
    assert not hasattr(model.config, "attnzoo")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_unsupported_caches_raise() -> None:
    model, plain = projecting("per key"), DynamicCache()
    filled, quantized = DynamicCache(), DynamicCache()
    with torch.no_grad():
        llama()(ids(), past_key_values=plain)
        with pytest.raises(ValueError, match="filled by the converted model, with 10 feat.* 8"):
            model(ids(1), past_key_values=plain)
        model(ids(), past_key_values=filled)
    with pytest.raises(ValueError, match="log_gates requires a gradient, which a cache of earlier"):
        model(ids(1), past_key_values=filled)
    kind = type("QuantizedLayer", (type(filled.layers[0]),), {})
    quantized.layers = [kind(), kind()]
    with pytest.raises(ValueError, match="keep all digits of log_gates, got a Quantized"):
        model(ids(), past_key_values=quantized)


def test_a_cache_in_another_dtype_raises() -> None:
    """Autocast to another dtype would convert the bits to other numbers."""
    model, cache = projecting("per key", gpt2), DynamicCache()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(ids(), past_key_values=cache)
        message = "values in torch.float16, as this call, because it keeps bits of log_gates"
        with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=message):
            model(ids(1), past_key_values=cache)


def test_a_half_of_an_encoder_decoder_decodes_without_a_cache() -> None:
    """Transformers takes that half by the class of the whole cache."""
    model = convert(bart(), "forgetting", layers=["decoder.layers.0.self_attn"])
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(5)}
    with torch.no_grad():
        cache = model(**inputs).past_key_values
        inputs["decoder_input_ids"] = ids(1)
        with pytest.raises(ValueError, match="log_gates must be known for all 6 keys of BartAtt"):
            model(**inputs, past_key_values=cache)


def test_wrong_entries_of_a_config_raise(tmp_path: Path) -> None:
    convert(gpt2(), "forgetting").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for entry in config["attnzoo"]["layers"].values():
        del entry["embed_dim"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must have embed_dim of type int, because"):
        from_pretrained(AutoModelForCausalLM, tmp_path)
