"""attnzoo.integrations.transformers on small models with random weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import sliding_window_causal_mask_function

import attnzoo
from attnzoo.integrations.transformers import convert, revert
from attnzoo.integrations.transformers.interface import attend, make_mask
from helpers.cases import CASES, params_of
from helpers.hf_models import (
    DECODERS,
    GQA,
    MODELS,
    bert,
    generate,
    gpt2,
    ids,
    left_padding,
    llama,
    outputs,
    quiet,
)

pytestmark = quiet
ROOT = Path(__file__).parents[2]
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)
every_variant = pytest.mark.parametrize("variant", CASES)


# ---- the same with softmax --------------------------------------------------------------------


@every_model
def test_softmax_is_what_the_model_had(make: Any) -> None:
    """Outputs and gradients, left-padded where there is a mask."""
    found = []
    for model in (make(), convert(make(), "softmax")):
        out = outputs(model)
        out.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((out, gradients))
    (have, grads), (want, expected) = found
    assert torch.allclose(have, want, atol=1e-6)
    assert grads.keys() == expected.keys()
    for name, gradient in grads.items():
        scale = float(expected[name].abs().max())
        assert float((gradient - expected[name]).abs().max()) <= 1e-5 * max(scale, 1.0), name


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=["dynamic", "beams", "no cache", "static"],
)
@every_decoder
def test_it_generates_what_the_model_did(make: Any, options: dict[str, Any]) -> None:
    options = {**options, "disable_compile": True}
    assert torch.equal(generate(convert(make(), "softmax"), **options), generate(make(), **options))


# ---- every variant ----------------------------------------------------------------------------


@every_variant
def test_every_variant_decodes_what_it_computes(variant: str) -> None:
    """With a dynamic and a static cache, and by beams, as without any; left-padded."""
    model = convert(llama(), variant, **params_of(variant))
    plain = generate(model, use_cache=False)
    assert torch.equal(generate(model), plain)
    assert torch.equal(generate(model, cache_implementation="static", disable_compile=True), plain)
    beams = {"num_beams": 2}
    assert torch.equal(generate(model, **beams), generate(model, **beams, use_cache=False))


@every_variant
def test_padding_changes_nothing(variant: str) -> None:
    """With the same positions: cosFormer's ReLU is of what they have rotated."""
    model = convert(llama(), variant, **params_of(variant))
    at = (left_padding().cumsum(-1) - 1).clamp(min=0)
    padded = model(ids(), attention_mask=left_padding(), position_ids=at).logits[1, 4:]
    alone = model(ids()[1:, 4:], position_ids=torch.arange(8)[None]).logits[0]
    assert torch.allclose(padded, alone, atol=1e-4)


@every_model
@every_variant
def test_every_variant_trains_in_every_model(variant: str, make: Any) -> None:
    model = make()
    convert(model, variant, **params_of(variant)).train()
    out = outputs(model)
    assert bool(out.isfinite().all())
    out.square().sum().backward()
    learned = [p for n, p in model.named_parameters() if ".attnzoo." in n]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in learned)


def test_layers_may_differ() -> None:
    model = llama(num_hidden_layers=3)
    convert(model, "ssmax", layers=[0, -1], s=0.3)
    convert(model, "entmax", layers=["model.layers.1.self_attn"], alpha=1.3)
    found = [layer.self_attn.attnzoo.variant for layer in model.model.layers]
    assert found == ["ssmax", "entmax", "ssmax"]
    one = llama()
    convert(one, "sigmoid", layers=[1])
    assert "attnzoo" not in one.model.layers[0].self_attn._modules
    assert not torch.allclose(outputs(one), outputs(llama()), atol=1e-3)


def test_there_and_back() -> None:
    model = llama()
    before, expected = set(model.state_dict()), outputs(model)
    convert(model, "ssmax", s=1.0)
    assert not torch.allclose(outputs(model), expected, atol=1e-3)
    model.set_attn_implementation("sdpa")
    assert torch.allclose(outputs(model), expected, atol=1e-6)
    model.set_attn_implementation("attnzoo")
    assert revert(model) is model
    assert set(model.state_dict()) == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(outputs(model), expected, atol=1e-6)
    with pytest.raises(ValueError, match="model was not converted: LlamaForCausalLM"):
        revert(model)


def test_a_calibrated_model_begins_close_to_itself() -> None:
    """The mean temperature over the batch is 1: s · mean log n."""
    model, given = llama(), {"input_ids": ids(40)}
    plain = model(**given).logits
    distance = {}
    for name, options in {"given": {}, "calibrated": {"calibrate": given}}.items():
        found = convert(llama(), "ssmax", **options)(**given).logits
        distance[name] = float((found - plain).detach().norm())
    assert distance["calibrated"] < 0.7 * distance["given"]
    model = convert(llama(), "ssmax", calibrate=given)
    log_n = torch.arange(1, 41).float().log().mean()
    assert torch.allclose(model.model.layers[0].self_attn.attnzoo.s, 1 / log_n.expand(4))
    model = convert(llama(), "log_n", calibrate=given)
    assert model.model.layers[0].self_attn.attnzoo.train_length == pytest.approx(log_n.exp().item())


# ---- masks ------------------------------------------------------------------------------------


def test_padding_that_is_all_there_is_to_say_is_a_mask_of_keys() -> None:
    """Linear variants then stay linear: a dense mask they would refuse in `linear`."""
    padded = make_mask(2, 12, 12, attention_mask=left_padding().bool())
    assert (padded.shape, padded.dtype) == ((2, 1, 1, 12), torch.uint8)
    assert make_mask(2, 12, 12) is None
    assert make_mask(2, 12, 20) is None  # a static cache's first call: what follows is room
    assert make_mask(2, 1, 20, q_offset=torch.tensor(7)).shape == (2, 1, 1, 8)
    assert make_mask(2, 3, 10, q_offset=7).shape == (2, 1, 1, 10)
    window = sliding_window_causal_mask_function(4)
    assert make_mask(2, 12, 12, mask_function=window).shape == (2, 1, 12, 12)


def test_linear_variants_stay_linear(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_mask_of_ones_own_says_everything_by_itself() -> None:
    """4 dimensions, bool or float: no causality is added to it."""
    own = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    own[:, :, :, 0] = False
    for mask in (own, torch.zeros(2, 1, 12, 12).masked_fill(~own, -3e38)):
        want = llama()(ids(), attention_mask=mask).logits
        have = convert(llama(), "softmax")(ids(), attention_mask=mask).logits
        assert torch.allclose(have, want, atol=1e-6)
    # The least number hides a key as −∞ does, and it is not counted.
    later = torch.zeros(1, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -3e38)
    model = convert(llama(), "ssmax", s=0.9)
    have = model(ids(), attention_mask=later.expand(2, -1, -1, -1)).logits
    assert torch.allclose(have, model(ids()).logits, atol=1e-6)


def test_packed_sequences_do_not_see_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1)
    want = llama()(ids(), position_ids=positions, use_cache=False).logits
    have = convert(llama(), "softmax")(ids(), position_ids=positions, use_cache=False).logits
    assert torch.allclose(have, want, atol=1e-6)


# ---- training and the rest --------------------------------------------------------------------


def test_weights_are_returned_on_demand() -> None:
    want = llama(attn_implementation="eager")
    want.set_attn_implementation("eager")
    model = convert(llama(), "softmax")
    have = model(ids(), output_attentions=True).attentions
    expected = want(ids(), output_attentions=True).attentions
    assert len(have) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(have, expected, strict=True))


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_weights_are_returned_by_models_that_collect_them(make: Any) -> None:
    expected = make()
    expected.set_attn_implementation("eager")
    want = expected(ids(), output_attentions=True).attentions
    have = convert(make(), "softmax")(ids(), output_attentions=True).attentions
    assert len(have) == len(want) == 2
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(have, want, strict=True))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        model = convert(llama(), "ssmax").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.allclose(found[0][n], found[1][n], atol=1e-7) for n in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("variant", ["ssmax", "cosformer", "entmax"])
def test_it_compiles_whole(variant: str, layers: list[int] | None) -> None:
    model = convert(llama(), variant, layers, **params_of(variant))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        given = {"input_ids": ids(), "attention_mask": left_padding()}
        assert torch.allclose(compiled(**given).logits, model(**given).logits, atol=1e-5)
    torch.compiler.reset()


def test_bf16_as_a_whole() -> None:
    model = convert(llama(), "ssmax").to(torch.bfloat16)
    assert model(ids()).logits.dtype == torch.bfloat16
    assert torch.equal(generate(model), generate(model, use_cache=False))


def test_dropout_of_the_attention_is_attnzoos() -> None:
    torch.manual_seed(1)
    model = convert(llama(attention_dropout=0.5), "ssmax")
    assert torch.equal(outputs(model), outputs(model))
    model.train()
    assert not torch.equal(outputs(model), outputs(model))


def test_scales_are_not_decayed() -> None:
    model = convert(llama(), "ssmax")
    network, scales = attnzoo.nn.parameter_groups(model, 0.1)
    assert (network["weight_decay"], scales["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in scales["params"]] == [(4,), (4,)]
    assert len(network["params"]) + 2 == len(list(model.parameters()))


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "args", "options", "error", "message"),
    [
        (llama, ("softmaxx",), {}, ValueError, "'softmaxx'"),
        (llama, ("cosformer",), {}, TypeError, "requires the parameter 'max_length'"),
        (llama, ("ssmax",), {"layers": [2]}, ValueError, "layers must be from 0 to 1, got 2"),
        (llama, ("ssmax",), {"layers": "0"}, TypeError, "layers must be a list of numbers"),
        (llama, ("ssmax",), {"layers": ["x"]}, ValueError, "layers must be of model.layers.0"),
        (llama, ("entmax",), {"calibrate": {}}, ValueError, "'entmax' has no temperature"),
        (lambda: torch.nn.Linear(2, 2), ("ssmax",), {}, TypeError, "PreTrainedModel, got Linear"),
    ],
)
def test_wrong_use(make: Any, args: tuple, options: dict, error: type, message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        convert(model, *args, **options)
    if isinstance(model, LlamaForCausalLM):
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model.config, "attnzoo")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**GQA, head_dim=8)), "softcap.*Gemma2Attention"),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
            ),
            "position_bias.*T5Attention",
        ),
    ],
    ids=["gemma2", "t5"],
)
def test_what_no_variant_has_is_refused(make: Any, what: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"attnzoo has no {what}"):
        convert(model, "ssmax")
    assert model.config._attn_implementation == before


def test_distances_from_another_sequence_are_refused() -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64}
    layers = {f"{who}_{what}": n for who in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    model = BartModel(BartConfig(**sizes, **layers)).eval()
    convert(model, "cosformer", layers=[-1], max_length=64)
    with pytest.raises(ValueError, match="cosformer cannot be BartAttention's: 5 queries"):
        model(input_ids=ids(), decoder_input_ids=ids(5))


def test_a_refusal_leaves_sub_configs_as_they_were() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="layers must be"):
        convert(model, "ssmax", layers=[99])
    assert model.config._attn_implementation == "eager"
    convert(model.model, "ssmax")
    assert revert(model).config._attn_implementation == "eager"
    convert(model, "ssmax")
    revert(model.model)
    assert not any(".attnzoo." in name for name, _ in model.named_parameters())


def test_a_model_without_attention_is_refused() -> None:
    model = MambaModel(
        MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="model.*MambaModel"):
        convert(model, "ssmax")
    assert not hasattr(model.config, "attnzoo")


def test_keywords_that_mean_nothing_are_let_through() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    out, weights = attend(torch.nn.Identity(), q, k, v, None, something_new=3)
    assert (out.shape, weights) == ((1, 5, 2, 8), None)
    assert torch.allclose(out.transpose(1, 2), attnzoo.attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("sys.modules['transformers'] = None; importlib.util.find_spec = lambda n, *a: None",
         "pip install 'attnzoo[hf]'"),
        ("importlib.metadata.version = lambda name: '4.57.1'", "5 or later, found 4.57.1"),
    ],
)  # fmt: skip
def test_without_transformers_or_with_an_old_one(setup: str, message: str) -> None:
    code = (
        f"import importlib.metadata, importlib.util, sys, attnzoo\n{setup}\n"
        "try: import attnzoo.integrations.transformers\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert message in done.stdout, done.stderr
