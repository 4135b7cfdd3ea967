"""Converted models that come with sinks per query, keys that they select, gains or gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo.integrations.transformers import convert, revert
from attnzoo.integrations.transformers.interface import attend
from attnzoo.nn import WRAPPERS
from helpers.hf_checks import (
    assert_equal_gradients,
    assert_generates_as_eager,
    every_way_to_generate,
    state,
)
from helpers.hf_hosts import (
    beam,
    bloom,
    deepseek_v32,
    hy_v4,
    inkling2,
    laguna,
    llama4_with_gain,
    ministral3,
    mistral_large4,
    mpnet,
    muse_spark,
)
from helpers.hf_models import eager, gpt_oss, ids, left_padding, quiet

pytestmark = quiet
# With the variant that computes what the model does
HOSTS = {
    "inkling2": (inkling2, "sink"),
    "mistral_large4": (mistral_large4, "softmax"),
    "deepseek_v32": (deepseek_v32, "softmax"),
    "hy_v4": (hy_v4, "sink"),
    "laguna": (laguna, "softmax"),
    "muse_spark": (muse_spark, "softmax"),
    "llama4": (llama4_with_gain, "softmax"),
    "ministral3": (ministral3, "softmax"),
    "beam": (beam, "softmax"),
    "mpnet": (mpnet, "softmax"),
}
DECODERS = {name: host for name, host in HOSTS.items() if name != "mpnet"}
every_host = pytest.mark.parametrize(("make", "variant"), HOSTS.values(), ids=HOSTS)


def logits(model: Any, padded: bool = False) -> Tensor:
    """The logits of all tokens that are not padding."""
    mask = left_padding() if padded else None
    out = model(ids(), attention_mask=mask, use_cache=False)[0]
    return out if mask is None else out[mask.bool()]


@pytest.mark.parametrize(("padded", "backend"), [(False, "eager"), (True, "tiled")])
@every_host
def test_outputs_and_gradients_equal_those_of_eager(
    make: Any, variant: str, padded: bool, backend: str
) -> None:
    models = eager(make()), convert(make(), variant)
    expected = logits(models[0], padded)
    with attnzoo.use_backend(backend):
        actual = logits(models[1], padded)
    bound = 1e-5 * max(float(expected.detach().abs().max()), 1.0)  # as for the gradients
    assert float((actual - expected).detach().abs().max()) <= bound
    for out in (expected, actual):
        out.square().mean().backward()
    assert_equal_gradients(models[1], models[0], 1e-5)


@pytest.mark.slow
@every_host
def test_trained_models_are_saved_loaded_and_reverted(
    make: Any, variant: str, tmp_path: Path
) -> None:
    model = convert(make(), variant).train()
    optimizer = torch.optim.AdamW(attnzoo.nn.parameter_groups(model, 0.1), lr=3e-3)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(logits(model).flatten(0, 1), ids().flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    expected = logits(model.eval())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), expected)
    assert torch.allclose(logits(eager(revert(loaded))), expected, atol=1e-5)


@pytest.mark.slow
@every_way_to_generate
@pytest.mark.parametrize(("make", "variant"), DECODERS.values(), ids=DECODERS)
def test_generated_tokens_equal_those_of_eager(make: Any, variant: str, options: dict) -> None:
    if make is inkling2 and "cache_implementation" in options:
        pytest.skip("the model itself does not run with a static cache")
    assert_generates_as_eager(make, variant, options)


def test_attention_that_a_model_computes_itself_raises() -> None:
    model = bloom()
    before = state(model)
    with pytest.raises(ValueError, match="use transformers' AttentionInterface, which BloomForCau"):
        convert(model, "softmax")
    assert state(model) == before


# ---- selected keys ----------------------------------------------------------------------------


def test_positions_among_selected_keys_raise() -> None:
    with pytest.raises(ValueError, match="or the selected keys of DeepseekV32Attention"):
        convert(deepseek_v32(), "position_temperature")


def test_selected_keys_of_a_sharded_sequence_raise() -> None:
    module, q = torch.nn.Identity(), torch.zeros(1, 4, 6, 8)
    module.attnzoo = attnzoo.nn.Attention("softmax", 4)
    module.attnzoo.sharding = object()
    with pytest.raises(ValueError, match="Identity must not select keys when its sequence is sha"):
        attend(module, q, q, q, None, indices=torch.zeros(1, 6, 1, dtype=torch.int32))


# ---- gains of hosts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "start"),
    [("ssmax", None), ("ssmax", "identity"), ("log_n", None), ("position_temperature", None)],
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mistral_large4, r"MistralLarge4TextAttention already .* by scale·log\(position \+ 1\) \+"),
        (llama4_with_gain, r"Llama4TextAttention already .* by 1 \+ attn_scale.*_tuning=False"),
        (ministral3, r"Ministral3Attention already .* by 1 \+ llama_4_scaling_beta.*_beta=0 in"),
        (beam, r"BeamAttention already multiplies its queries by \(1 \+ \(position \+ 1\) / 2048"),
    ],
)
def test_a_second_gain_raises(make: Any, message: str, variant: str, start: Any) -> None:
    model = make()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        convert(model, variant, start=start)
    assert state(model) == before


def test_a_wrapper_with_a_second_gain_raises() -> None:
    model = ministral3()
    before = state(model)
    message = r"wrapper must have no gain .* got .qassmax.; softmax and variants"
    with pytest.raises(ValueError, match=message):
        convert(model, "softmax", wrapper="qassmax")
    assert state(model) == before


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama4_with_gain, {"layers": [0]}),
        (lambda: llama4_with_gain(attn_temperature_tuning=False), {}),
        (beam, {"layers": [0]}),
        (lambda: ministral3(0.0), {}),
    ],
)  # fmt: skip
def test_layers_without_a_gain_take_one(make: Any, options: dict[str, Any]) -> None:
    model = convert(make(), "ssmax", start="identity", **options)
    assert torch.allclose(logits(model), logits(eager(make())), atol=1e-5)


@pytest.mark.parametrize("variant", ["entmax", "sigmoid"])
def test_other_variants_keep_the_gain_of_the_host(variant: str) -> None:
    """The factor of Mistral Large 4 is in the queries, and so in the scores of the variant."""
    seen: list[tuple[Any, Tensor]] = []
    model = convert(mistral_large4(), variant)
    layer = model.model.language_model.layers[0].self_attn
    layer.attnzoo.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    logits(model)
    with torch.no_grad():
        layer.softmax_scaling.scale.mul_(2)
        layer.softmax_scaling.bias.mul_(2)
    logits(model)
    (before, out), (after, other) = seen
    assert torch.allclose(after, 2 * before, atol=1e-5)
    assert not torch.allclose(out, other, atol=1e-3)


# ---- wrappers on hosts with sinks -------------------------------------------------------------


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: dict[str, Any]) -> Tensor:
    options = {name: mask[name] for name in ("attn_mask", "is_causal", "window", "scale")}
    return attnzoo.attention(q, k, v, "sink", enable_gqa=True, b=sinks, **options)


# The outputs at the initial values of gates from what the attention of one query gives
WRAPPED = {
    "output_gate": lambda each, v: each[0] / 2,
    "mixture": lambda each, v: (each[0] + each[1]) / 2,
    "differential_v2": lambda each, v: each[0] - each[1] / 2,
}


@pytest.mark.parametrize(
    ("make", "wrapper"), [*((gpt_oss, name) for name in WRAPPED), (inkling2, "output_gate")]
)
def test_each_attention_of_a_wrapper_has_the_sink_of_its_head(make: Any, wrapper: str) -> None:
    queries = WRAPPERS[wrapper].queries
    seen: list[tuple[Any, dict[str, Any], Tensor]] = []
    model = convert(make(), "sink", wrapper=wrapper)
    child = model.model.layers[1].self_attn.attnzoo
    child.register_forward_hook(
        lambda module, args, keywords, out: seen.append((args, keywords, out)), with_kwargs=True
    )
    loss = logits(model).square().mean()
    ((q, k, v), keywords, out), *others = seen
    assert not others
    each = [with_sinks(q[:, i::queries], k, v, keywords["b"], keywords) for i in range(queries)]
    assert torch.allclose(out, WRAPPED[wrapper](each, v), atol=1e-5)
    loss.backward()
    sinks = [x for name, x in model.named_parameters() if "sink" in name]
    assert all(x.grad is not None and float(x.grad.abs().max()) > 0 for x in sinks)


@pytest.mark.parametrize("make", [gpt_oss, inkling2])
def test_a_wrapper_on_sinks_is_saved_and_loaded(make: Any, tmp_path: Path) -> None:
    model = convert(make(), "sink", wrapper="output_gate")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))
