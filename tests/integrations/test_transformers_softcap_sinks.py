"""Converted models with a softcap (Gemma 2) and learned sinks (gpt-oss)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.core import registry
from attnzoo.core.variant import no_forms
from attnzoo.integrations.transformers import convert, from_pretrained, revert
from attnzoo.integrations.transformers.interface import attend
from helpers.cases import NO_LOGITS, params_of
from helpers.hf_checks import (
    assert_equal_gradients,
    assert_generates_as_eager,
    every_way_to_generate,
)
from helpers.hf_models import (
    eager,
    gemma2,
    gpt_oss,
    ids,
    left_padding,
    llama,
    quiet,
)

pytestmark = quiet
HOSTS = {"gemma2": (gemma2, "softmax"), "gpt_oss": (gpt_oss, "sink")}
every_host = pytest.mark.parametrize(("make", "variant"), HOSTS.values(), ids=HOSTS)


def logits(model: Any, **options: Any) -> Tensor:
    """The logits of all tokens that are not padding."""
    mask = options.get("attention_mask")
    out = model(ids(), **options).logits
    return out if mask is None else out[mask.bool()]


# ---- outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@every_host
def test_outputs_and_gradients_equal_those_of_eager(make: Any, variant: str, padded: bool) -> None:
    """Of all parameters, the sinks and the projections before the softcap among them."""
    options = {"attention_mask": left_padding()} if padded else {}
    models = eager(make()), convert(make(), variant)
    expected, actual = (logits(model, **options) for model in models)
    assert float((actual - expected).detach().abs().max()) <= 1e-5
    for out in (expected, actual):
        out.square().mean().backward()
    assert_equal_gradients(models[1], models[0], 1e-5)


def test_softcap_and_sinks_change_the_outputs() -> None:
    """Otherwise the tests of this file would say nothing."""
    plain, capped = gemma2(attn_logit_softcapping=None), gemma2()
    assert not torch.allclose(logits(eager(plain)), logits(eager(capped)), atol=0.05)
    model = eager(gpt_oss())
    before = logits(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks.add_(2.0)
    assert not torch.allclose(logits(model), before, atol=0.05)


@pytest.mark.slow
@every_way_to_generate
@every_host
def test_generated_tokens_equal_those_of_eager(make: Any, variant: str, options: dict) -> None:
    assert_generates_as_eager(make, variant, options)


@every_host
def test_layers_that_are_not_converted_keep_softcap_and_sinks(make: Any, variant: str) -> None:
    model = convert(make(), variant, layers=[0])
    assert "attnzoo" not in model.model.layers[1].self_attn._modules
    expected = eager(make())(ids(), output_attentions=True)
    actual = model(ids(), output_attentions=True)
    assert torch.allclose(actual.logits, expected.logits, atol=1e-5)
    for one, other in zip(actual.attentions, expected.attentions, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("variant", ["ssmax", "entmax", "sigmoid", "topk"])
def test_softcap_with_other_variants_equals_the_definition(variant: str) -> None:
    """The gain of a variant comes after the softcap, as in `attention`."""
    seen: list[tuple[Any, Tensor]] = []
    model = convert(gemma2(), variant, **params_of(variant))
    child = model.model.layers[1].self_attn.attnzoo
    child.register_forward_hook(
        lambda module, args, keywords, out: seen.append((args, out)), with_kwargs=True
    )
    model(ids())
    (q, k, v), out = seen[0][0], seen[0][1]
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.25}
    params = {p.name: getattr(child, p.name) for p in attnzoo.get_variant(variant).params}
    weights = attnzoo.attention_weights(q, k, v, variant, softcap=0.8, **options, **params)
    assert torch.allclose(out, weights @ v.repeat_interleave(2, 1), atol=1e-5)
    uncapped = attnzoo.attention(q, k, v, variant, **options, **params)
    assert not torch.allclose(out, uncapped, atol=1e-3)


# ---- training and checkpoints -----------------------------------------------------------------


@every_host
def test_trained_model_is_saved_and_loaded(make: Any, variant: str, tmp_path: Path) -> None:
    model = convert(make(), variant).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(attnzoo.nn.parameter_groups(model, 0.1), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = model(ids(), labels=ids()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    sinks = [name for name in before if name.endswith("self_attn.sinks")]
    assert len(sinks) == (2 if make is gpt_oss else 0)
    assert all(not torch.equal(model.get_parameter(name), before[name]) for name in sinks)
    expected = logits(model.eval())
    model.save_pretrained(tmp_path)
    for loaded in (
        from_pretrained(AutoModelForCausalLM, tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert torch.equal(logits(loaded), expected)
        assert repr(loaded.model.layers[0].self_attn.attnzoo) == repr(
            model.model.layers[0].self_attn.attnzoo
        )
    assert torch.allclose(logits(eager(revert(loaded))), expected, atol=1e-5)


def test_sinks_stay_parameters_of_the_host() -> None:
    model = gpt_oss()
    names = [name for name, _ in model.named_parameters()]
    convert(model, "sink")
    assert [name for name, _ in model.named_parameters()] == names
    attention = model.model.layers[0].self_attn
    assert repr(attention.attnzoo) == "Attention('sink', num_heads=4, given=('b',))"


def test_identity_start_keeps_the_sinks_of_the_host() -> None:
    model = convert(gpt_oss(), "sink", start="identity")
    assert torch.allclose(logits(model), logits(eager(gpt_oss())), atol=1e-5)
    model = convert(gemma2(), "ssmax", start="identity")
    assert torch.allclose(logits(model), logits(eager(gemma2())), atol=1e-5)


def test_a_variant_of_a_user_can_take_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameter takes them is a field of the parameter, not the name of a variant."""
    sink = attnzoo.get_variant("sink")

    def renamed(q: Tensor, k: Tensor, call: attnzoo.Call, logits: Any) -> Tensor:
        return sink.weights(q, k, call, logits)

    param = attnzoo.Param("logits", 0.0, host_sink=True, doc="score of the sink")
    variant = replace(sink, name="own_sink", params=(param,), weights=renamed, forms=no_forms)
    monkeypatch.setitem(registry._VARIANTS, "own_sink", variant)
    model = convert(gpt_oss(), "own_sink")
    assert torch.allclose(logits(model), logits(eager(gpt_oss())), atol=1e-5)


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "variant", "params", "message"),
    [
        (
            gpt_oss, "ssmax", {},
            "variant must take the learned sinks of GptOssAttention, got 'ssmax'; variants that "
            "do: sink",
        ),
        (gpt_oss, "sink", {"b": 1.0}, "b must not be given, because GptOssAttention passes its"),
        *[
            (gemma2, name, params_of(name),
             f"variant must support the softcap of Gemma2Attention, got '{name}': .*softcap")
            for name in NO_LOGITS
        ],
        (llama, "forgetting", {"start": "identity"}, "start must be None: .*'forgetting'"),
    ],
)  # fmt: skip
def test_unsupported_hosts_raise_and_stay_unchanged(
    make: Any, variant: str, params: dict, message: str
) -> None:
    model = make()
    before = set(model.state_dict()), model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        convert(model, variant, **params)
    assert (set(model.state_dict()), model.config._attn_implementation) == before
    assert not hasattr(model.config, "attnzoo")


@pytest.mark.parametrize("name", ["softcap", "given", "num_heads"])
def test_arguments_that_come_from_the_host_raise(name: str) -> None:
    with pytest.raises(TypeError, match=f"convert does not accept {name}, which comes from the"):
        convert(gemma2(), "softmax", **{name: 3})


def test_changed_softcap_of_a_converted_host_raises() -> None:
    model = convert(gemma2(), "softmax")
    model.model.layers[0].self_attn.attn_logit_softcapping = 50.0
    with pytest.raises(ValueError, match=r"softcap of Gemma2Attention must be 0\.8.*, got 50\.0"):
        model(ids())


def test_forgetting_with_fixed_gates_is_a_decay_by_distance() -> None:
    model = convert(llama(), "forgetting", log_gates=-0.5)
    with_alibi = convert(llama(), "softmax")
    slopes = torch.full((4,), 0.5)
    for layer in with_alibi.model.layers:
        layer.self_attn.attnzoo.register_forward_pre_hook(
            lambda module, args, keywords: (args, {**keywords, "alibi": slopes}), with_kwargs=True
        )
    assert torch.allclose(logits(model), logits(with_alibi), atol=1e-5)


def test_sinks_of_a_model_that_supports_only_its_own_attention_raise() -> None:
    """Such a model, as DeepSeek-V4, adds keys that its masks do not show."""
    model = gpt_oss()
    for kind in ("sdpa", "flash_attn", "flex_attn"):
        setattr(model, f"_supports_{kind}", False)
    with pytest.raises(ValueError, match="model must support another attention than its own eager"):
        convert(model, "sink")


@pytest.mark.parametrize("name", ["cache", "head_mask"])
def test_unsupported_keywords_raise(name: str) -> None:
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ValueError, match=f"attnzoo does not support {name}, which Identity uses"):
        attend(torch.nn.Identity(), q, q, q, None, **{name: torch.zeros(1)})


@pytest.mark.parametrize("name", ["k", "is_causal"])
def test_names_that_are_not_parameters_raise(name: str) -> None:
    with pytest.raises(TypeError, match=f"variant 'topk' has no parameter '{name}'; it has: top_k"):
        convert(gemma2(), "topk", **{name: 3})
