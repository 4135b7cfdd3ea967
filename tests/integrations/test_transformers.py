"""attnzoo.integrations.transformers on small models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BigBirdPegasusConfig, BigBirdPegasusForCausalLM, DynamicCache

import attnzoo
from attnzoo import get_variant
from attnzoo.integrations.transformers import convert, revert
from attnzoo.integrations.transformers.interface import attend
from attnzoo.integrations.transformers.masks import Mask, make_mask
from helpers.cases import CASES, VARIANTS, params_of
from helpers.hf_models import (
    DECODERS,
    MODELS,
    bert,
    eager,
    generate,
    gpt2,
    ids,
    left_padding,
    llama,
    mistral,
    outputs,
    quiet,
    qwen,
)
from helpers.kernel_paths import quick_variants

pytestmark = quiet
ROOT = Path(__file__).parents[2]
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)
every_variant = pytest.mark.parametrize("variant", quick_variants(VARIANTS, ("pairwise", "linear")))


# ---- softmax changes nothing ------------------------------------------------------------------


@every_model
def test_softmax_keeps_outputs_and_gradients(make: Any) -> None:
    """Inputs are padded if the model's forward accepts a mask."""
    results = []
    for model in (make(), convert(make(), "softmax")):
        out = outputs(model)
        out.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((out, gradients))
    (expected, expected_gradients), (actual, gradients) = results
    assert torch.allclose(actual, expected, atol=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = float(expected_gradients[name].abs().max())
        assert float((gradient - expected_gradients[name]).abs().max()) <= 1e-5 * max(scale, 1.0), (
            name
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=["dynamic", "beams", "no cache", "static"],
)
@every_decoder
def test_softmax_keeps_generated_tokens(make: Any, options: dict[str, Any]) -> None:
    options = {**options, "disable_compile": True}
    assert torch.equal(generate(convert(make(), "softmax"), **options), generate(make(), **options))


# ---- every variant ----------------------------------------------------------------------------


@every_variant
def test_every_variant_generates_the_same_with_and_without_cache(variant: str) -> None:
    """The prompts have left padding. Caches are dynamic, static, or those of a beam search."""
    model = convert(llama(), variant, **params_of(variant))
    uncached = generate(model, use_cache=False)
    assert torch.equal(generate(model), uncached)
    static = generate(model, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, uncached)
    beams = {"num_beams": 2}
    assert torch.equal(generate(model, **beams), generate(model, **beams, use_cache=False))


@every_variant
def test_left_padding_does_not_change_the_logits(variant: str) -> None:
    """Tokens keep their position ids, because cosformer depends on absolute RoPE positions."""
    model = convert(llama(), variant, **params_of(variant))
    positions = (left_padding().cumsum(-1) - 1).clamp(min=0)
    padded = model(ids(), attention_mask=left_padding(), position_ids=positions).logits[1, 4:]
    alone = model(ids()[1:, 4:], position_ids=torch.arange(8)[None]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "make"),
    # Each model and each variant has a quick test.
    [pytest.param(v, make, id=f"{v}-{name}", marks=[pytest.mark.slow] * (
        make is not llama and v != "softmax"))
     for name, make in MODELS.items() for v in CASES
     if (v in VARIANTS or name in DECODERS) and not (get_variant(v).absolute and make is qwen)],
)  # fmt: skip
def test_every_variant_trains_in_every_model(variant: str, make: Any) -> None:
    model = make()
    convert(model, variant, **params_of(variant)).train()
    out = outputs(model)
    assert bool(out.isfinite().all())
    out.square().sum().backward()
    learned = [p for n, p in model.named_parameters() if ".attnzoo." in n]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in learned)


def test_layers_may_have_different_variants() -> None:
    model = llama(num_hidden_layers=3)
    convert(model, "ssmax", layers=[0, -1], s=0.3)
    convert(model, "entmax", layers=["model.layers.1.self_attn"], alpha=1.3)
    variants = [layer.self_attn.attnzoo.variant for layer in model.model.layers]
    assert variants == ["ssmax", "entmax", "ssmax"]
    partial = llama()
    convert(partial, "sigmoid", layers=[1])
    assert "attnzoo" not in partial.model.layers[0].self_attn._modules
    assert not torch.allclose(outputs(partial), outputs(llama()), atol=1e-3)


def test_revert_restores_the_model() -> None:
    model = llama()
    before, expected = set(model.state_dict()), outputs(model)
    convert(model, "ssmax", s=1.0)
    assert not torch.allclose(outputs(model), expected, atol=1e-3)
    assert revert(model) is model
    assert set(model.state_dict()) == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(outputs(model), expected, atol=1e-6)
    with pytest.raises(ValueError, match="model must be a converted model, got LlamaForCausalLM"):
        revert(model)


def test_calibrate_sets_the_mean_gain_to_one() -> None:
    model, batch = llama(), {"input_ids": ids(40)}
    original = model(**batch).logits
    distance = {}
    for name, options in {"default": {}, "calibrated": {"calibrate": batch}}.items():
        logits = convert(llama(), "ssmax", **options)(**batch).logits
        distance[name] = float((logits - original).detach().norm())
    assert distance["calibrated"] < 0.7 * distance["default"]
    model = convert(llama(), "ssmax", calibrate=batch)
    log_n = torch.arange(1, 41).float().log().mean()
    assert torch.allclose(model.model.layers[0].self_attn.attnzoo.s, 1 / log_n.expand(4))
    model = convert(llama(), "log_n", calibrate=batch)
    assert model.model.layers[0].self_attn.attnzoo.train_length == pytest.approx(log_n.exp().item())


# ---- masks ------------------------------------------------------------------------------------


def test_padding_becomes_a_key_mask() -> None:
    """Padding must not become a dense mask, which the backend `linear` does not support."""
    padded = make_mask(2, 12, 12, attention_mask=left_padding().bool())
    assert isinstance(padded, Mask)
    assert padded.attn_mask is not None
    assert padded.attn_mask.shape == (2, 1, 1, 12)


def test_linear_variants_run_on_the_linear_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(q: Tensor, k: Tensor, v: Tensor, variant: str, **options: Any) -> Any:
        masks.append(options["attn_mask"])
        plan = attnzoo.explain(q, k, v, variant, backend="linear", **options)
        assert plan.chosen == "linear"
        return real(q, k, v, variant, **options)

    masks: list[Tensor | None] = []
    real = attnzoo.attention
    model = convert(llama(), "cosformer", max_length=64)
    monkeypatch.setattr("attnzoo.nn.attention.attention", spy)
    generate(model)
    assert all(mask is not None and mask.shape[2] == 1 for mask in masks)


def test_four_dimensional_mask_is_used_without_causality() -> None:
    dense = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    dense[:, :, :, 0] = False
    for mask in (dense, torch.zeros(2, 1, 12, 12).masked_fill(~dense, -3e38)):
        expected = llama()(ids(), attention_mask=mask).logits
        actual = convert(llama(), "softmax")(ids(), attention_mask=mask).logits
        assert torch.allclose(actual, expected, atol=1e-6)
    # A mask entry near the lowest fp32 number hides a key, like −∞. n does not count this key.
    later = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -3e38)
    model = convert(llama(), "ssmax", s=0.9)
    later = later.expand(2, -1, -1, -1)
    expected = model(ids(), attention_mask=later).logits
    assert torch.allclose(expected, model(ids()).logits, atol=1e-6)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(ids(), attention_mask=later).logits, expected, atol=1e-6)


@pytest.mark.parametrize("variant", ["softmax", "ssmax", "sigmoid"])
def test_a_bias_with_hidden_keys_shows_no_later_token(variant: str) -> None:
    """Models write the lowest number of the dtype over the bias of hidden keys."""
    distance = (torch.arange(12)[:, None] - torch.arange(12)).float()
    lowest = torch.finfo(torch.float32).min
    bias = torch.where(distance >= 0, -0.1 * distance, lowest).expand(2, 1, 12, 12)
    model = convert(llama(), variant)
    full = model(ids(), attention_mask=bias).logits
    start = model(ids()[:, :5], attention_mask=bias[:, :, :5, :5]).logits
    assert torch.allclose(full[:, :5], start, atol=1e-6)


def test_packed_sequences_do_not_see_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1)
    expected = llama()(ids(), position_ids=positions, use_cache=False).logits
    actual = convert(llama(), "softmax")(ids(), position_ids=positions, use_cache=False).logits
    assert torch.allclose(actual, expected, atol=1e-6)


def test_decoder_whose_flag_says_that_it_is_not_causal() -> None:
    """In eager attention the mask alone makes the model causal, and the flag is not read."""
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    config = BigBirdPegasusConfig(vocab_size=99, d_model=32, max_position_embeddings=64, **sizes)
    model = BigBirdPegasusForCausalLM(config).eval()
    assert not model.model.decoder.layers[0].self_attn.is_causal
    expected, generated = outputs(model), generate(model)
    convert(model, "softmax")
    assert torch.allclose(outputs(model), expected, atol=1e-6)
    assert torch.equal(generate(model), generated)


# ---- weights, training, dtypes ----------------------------------------------------------------


def test_output_attentions_equal_those_of_softmax() -> None:
    original = llama(attn_implementation="eager")
    original.set_attn_implementation("eager")
    model = convert(llama(), "softmax")
    actual = model(ids(), output_attentions=True).attentions
    expected = original(ids(), output_attentions=True).attentions
    assert len(actual) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))


def test_output_attentions_have_a_column_for_every_key_of_the_cache() -> None:
    """Also for keys that the window hides."""
    attentions = []
    for model in (eager(mistral()), convert(mistral(), "softmax")):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids()[:, :9], past_key_values=cache)
            last = model(ids()[:, 9:10], past_key_values=cache, output_attentions=True)
        attentions.append(last.attentions[0])
    assert torch.allclose(*attentions, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_output_attentions_collected_with_hooks_equal_those_of_softmax(make: Any) -> None:
    original = make()
    original.set_attn_implementation("eager")
    expected = original(ids(), output_attentions=True).attentions
    actual = convert(make(), "softmax")(ids(), output_attentions=True).attentions
    assert len(actual) == len(expected) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actual, expected, strict=True))


def test_gradient_checkpointing_does_not_change_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = convert(llama(), "ssmax").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    first, second = gradients
    assert all(torch.allclose(first[n], second[n], atol=1e-7) for n in first)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("variant", ["ssmax", "cosformer", "entmax"])
def test_compiles_as_one_graph(variant: str, layers: list[int] | None) -> None:
    model = convert(llama(), variant, layers, **params_of(variant))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        mask = left_padding()
        actual, expected = (
            run(input_ids=ids(), attention_mask=mask).logits[mask.bool()]
            for run in (compiled, model)
        )
    assert torch.allclose(actual, expected, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_layers_are_converted_too() -> None:
    """A graph does not show their calls."""
    model, plain = bert(), convert(bert(), "ssmax")
    model.encoder.layer[0] = torch.compile(model.encoder.layer[0], backend="eager")
    with torch.no_grad():
        outputs(model)
        convert(model, "ssmax")
        assert torch.allclose(outputs(model), outputs(plain), atol=1e-6)
    torch.compiler.reset()


def test_bf16_model_generates_the_same_with_and_without_cache() -> None:
    model = convert(llama(), "ssmax").to(torch.bfloat16)
    assert model(ids()).logits.dtype == torch.bfloat16
    assert torch.equal(generate(model), generate(model, use_cache=False))


def test_attention_dropout_applies_in_training_only() -> None:
    torch.manual_seed(1)
    model = convert(llama(attention_dropout=0.5), "ssmax")
    assert torch.equal(outputs(model), outputs(model))
    model.train()
    assert not torch.equal(outputs(model), outputs(model))


def test_parameter_groups_exclude_scales_from_weight_decay() -> None:
    model = convert(llama(), "ssmax")
    network, scales = attnzoo.nn.parameter_groups(model, 0.1)
    assert (network["weight_decay"], scales["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in scales["params"]] == [(4,), (4,)]
    assert len(network["params"]) + 2 == len(list(model.parameters()))


@pytest.mark.parametrize("gradients", [False, True])
def test_convert_does_not_append_to_a_cache_of_the_inputs(gradients: bool) -> None:
    model, cache = llama(), DynamicCache()
    with torch.set_grad_enabled(gradients):
        model(ids()[:, :4], past_key_values=cache)
    keys = cache.layers[0].keys
    convert(model, "ssmax", inputs={"input_ids": ids()[:, 4:6], "past_key_values": cache})
    assert cache.get_seq_length() == 4
    assert cache.layers[0].keys is keys


def test_a_model_and_its_sub_model_can_be_converted_and_reverted_separately() -> None:
    model = llama()
    convert(model.model, "ssmax")
    assert revert(model).config._attn_implementation == "sdpa"
    convert(model, "ssmax")
    revert(model.model)
    assert not any(".attnzoo." in name for name, _ in model.named_parameters())


def test_unknown_keywords_of_transformers_are_ignored() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    module = torch.nn.Identity()
    module.add_module("attnzoo", attnzoo.nn.Attention("softmax", 2))
    out, weights = attend(module, q, k, v, None, something_new=3)
    assert (out.shape, weights) == ((1, 5, 2, 8), None)
    assert torch.allclose(out.transpose(1, 2), attnzoo.attention(q, k, v, is_causal=True))
