"""Hosts with a learned bias by relative position: T5 and its relatives."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.t5.modeling_t5 import T5Attention, T5Block

import attnzoo
from attnzoo.integrations.transformers import convert, revert
from helpers.cases import rand
from helpers.hf_models import quiet, transformers

SIZES: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2,
    "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
}  # fmt: skip
FAMILIES = {
    "T5": {}, "MT5": {}, "UMT5": {}, "LongT5": {"local_radius": 4}, "Pop2Piano": {},
    "SwitchTransformers": {"num_experts": 2, "num_decoder_layers": 2},
    "Udop": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
}  # fmt: skip


def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for module in model.modules():
        if isinstance(bias := getattr(module, "relative_attention_bias", None), torch.nn.Embedding):
            torch.nn.init.normal_(bias.weight)
    return model


def inputs_of(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {
        "input_ids": torch.randint(2, 99, (2, 12), generator=generator), "attention_mask": mask,
        "labels": torch.randint(2, 99, (2, 7), generator=generator),
    }  # fmt: skip
    if family == "Udop":
        inputs["bbox"] = torch.zeros(2, 12, 4)
    elif family == "Pop2Piano":  # its tokens are sounds
        inputs["inputs_embeds"] = rand(2, 12, 32).float()
        del inputs["input_ids"]
    return inputs


def gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "family",
    [f if f in ("T5", "UMT5") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_softmax_equals_the_host(family: str) -> None:
    host, inputs = model_of(family), inputs_of(family)
    model = convert(copy.deepcopy(host), "softmax", inputs=inputs)
    torch.testing.assert_close(model(**inputs).logits, host(**inputs).logits, rtol=1e-5, atol=1e-5)
    expected = gradients(host, inputs)
    assert any("relative_attention_bias" in name for name in expected)
    torch.testing.assert_close(gradients(model, inputs), expected, rtol=1e-5, atol=1e-5)
    if family != "Pop2Piano":
        tokens = {name: x for name, x in inputs.items() if name != "labels"}
        options = {**tokens, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(**options), host.generate(**options))


def test_the_bias_comes_after_the_gain_as_a_relative_bias_does() -> None:
    model = convert(model_of("T5"), "ssmax", s=0.4)
    layer = model.encoder.block[0].layer[0].SelfAttention
    x = rand(2, 200, 32).float()
    bias = attnzoo.nn.RelativeBias(num_heads=4, num_buckets=8, max_distance=6)
    with torch.no_grad():
        bias.weight.copy_(layer.relative_attention_bias.weight)
    q, k, v = (
        project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in (layer.q, layer.k, layer.v)
    )
    out = attnzoo.attention(q, k, v, "ssmax", scale=1.0, s=0.4, relative_bias=bias())
    expected = layer.o(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_converted_model_trains_and_loads(tmp_path: Path) -> None:
    model, inputs = convert(model_of("T5"), "ssmax"), inputs_of("T5")
    optimizer = torch.optim.Adam(attnzoo.nn.parameter_groups(model), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    loaded = attnzoo.integrations.transformers.from_pretrained(
        transformers.T5ForConditionalGeneration, tmp_path
    )
    tables = tables_of(first_of(loaded).attnzoo)
    assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)
    assert tables[0] is not None


def test_variants_that_take_no_bias_raise_and_leave_the_model_unchanged() -> None:
    model = model_of("T5")
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(
        ValueError, match="variant must support the position_bias of T5Attention, got 'taylor'"
    ):
        convert(model, "taylor")
    assert [name for name, _ in model.named_modules()] == names
    assert model.config._attn_implementation == "eager"


def first_of(model: Any, half: str = "encoder") -> Any:
    """The attention module that makes the bias of a half of T5."""
    return getattr(model, half).block[0].layer[0].SelfAttention


def tables_of(child: torch.nn.Module) -> list[Tensor | None]:
    """The tables that a converted layer gets from now on, None for a matrix."""
    tables = []

    def record(child: Any, args: Any, options: dict[str, Any]) -> None:
        tables.append(options.get("relative_bias"))

    child.register_forward_pre_hook(record, with_kwargs=True)
    return tables


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        self.size = max([self.size, *(x.numel() for x in made if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_the_table_holds_the_numbers_of_the_host(half: str) -> None:
    model = convert(model_of("T5"), "ssmax")
    layers = [block.layer[0].SelfAttention for block in getattr(model, half).block]
    tables = [tables_of(layer.attnzoo) for layer in layers]
    tokens = torch.ones(1, 20, dtype=torch.long)
    model(input_ids=tokens, decoder_input_ids=tokens)
    matrix = first_of(model_of("T5"), half).compute_bias(20, 20)
    at = torch.arange(20) - torch.arange(20)[:, None]
    for table in (tables[0][0], tables[1][0]):
        assert table is not None
        assert table.shape == (4, 13)
        assert torch.equal(table[:, 6 + at.clamp(-6, 6)], matrix[0])


def test_no_matrix_is_made_in_training() -> None:
    model, tokens = convert(model_of("T5").train(), "ssmax"), torch.ones(1, 64, dtype=torch.long)
    with LargestTensor() as largest, attnzoo.use_backend("tiled"):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert largest.size < 4 * 64 * 64
    assert first_of(model).relative_attention_bias.weight.grad.abs().max() > 0


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_prompt_of_the_decoder_gets_the_same_bias_with_any_cache(cache: str | None) -> None:
    host = model_of("T5")
    inputs = {n: x for n, x in inputs_of("T5").items() if n != "labels"}
    prompt = torch.randint(2, 99, (2, 9), generator=torch.Generator().manual_seed(2))
    options = {**inputs, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    model = convert(copy.deepcopy(host), "softmax")
    tables = tables_of(first_of(model, "decoder").attnzoo)
    tokens = model.generate(**options, decoder_input_ids=prompt)
    assert torch.equal(tokens, host.generate(**options, decoder_input_ids=prompt))
    assert tables[0] is not None


@pytest.mark.parametrize("queries", [1, 3])
def test_queries_behind_a_cache_get_the_same_bias(queries: int) -> None:
    host = model_of("T5")
    model = convert(copy.deepcopy(host), "softmax")
    tokens = torch.randint(2, 99, (1, 15), generator=torch.Generator().manual_seed(2))
    states = host.encoder(tokens)
    options = {"encoder_outputs": states, "use_cache": True}
    logits = []
    for one in (host, model):
        start = one(decoder_input_ids=tokens[:, :-queries], **options)
        options["past_key_values"] = start.past_key_values
        logits.append(one(decoder_input_ids=tokens[:, -queries:], **options).logits)
        del options["past_key_values"]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    expected = host(decoder_input_ids=tokens, **options).logits[:, -queries:]
    torch.testing.assert_close(logits[1], expected, rtol=1e-5, atol=1e-5)


@quiet
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_does_not_change_the_gradients(use_reentrant: bool) -> None:
    model, inputs = convert(model_of("T5"), "ssmax"), inputs_of("T5")
    for module in model.modules():  # no dropout
        if hasattr(module, "dropout"):
            module.dropout = 0.0 if isinstance(module.dropout, float) else torch.nn.Identity()
    expected = gradients(model.train(), inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tables = tables_of(first_of(model).attnzoo)
    torch.testing.assert_close(gradients(model, inputs), expected, rtol=1e-5, atol=1e-6)
    assert tables[0] is not None


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda model: pickle.loads(pickle.dumps(model)), id="pickle"),
        pytest.param(lambda model: convert(model, "softmax"), id="converted twice"),
    ],
)
def test_copies_get_tables_and_revert_restores_the_host(copied: Any) -> None:
    host, inputs = model_of("T5"), inputs_of("T5")
    model = copied(convert(copy.deepcopy(host), "softmax"))
    tables = tables_of(first_of(model).attnzoo)
    expected = host(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    assert tables[0] is not None
    assert torch.equal(revert(model)(**inputs).logits, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_a_compiled_model_gets_tables() -> None:
    model, inputs = convert(model_of("T5"), "ssmax"), inputs_of("T5")
    expected = gradients(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    actual = gradients(compiled, inputs)
    actual = {name.removeprefix("_orig_mod."): x for name, x in actual.items()}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class NotByDifference(T5Attention):
    def compute_bias(self, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        bias = super().compute_bias(query_length, key_length, *args, **kwargs)
        return bias * torch.linspace(0, 1, key_length)


class NotSharedUnchanged(T5Block):
    def forward(self, states: Tensor, mask: Any, bias: Tensor | None, *args: Any, **kw: Any) -> Any:
        if bias is not None:
            bias = bias * torch.linspace(0, 1, bias.shape[-1])
        return super().forward(states, mask, bias, *args, **kw)


@pytest.mark.parametrize("changed", [NotByDifference, NotSharedUnchanged])
def test_a_host_that_computes_with_its_bias_makes_a_matrix(changed: type) -> None:
    host, inputs = model_of("T5"), inputs_of("T5")
    convert(copy.deepcopy(host), "softmax")  # the class of the attention makes rows now
    for block in host.encoder.block:
        module = block if changed is NotSharedUnchanged else block.layer[0].SelfAttention
        module.__class__ = changed
    model = convert(copy.deepcopy(host), "softmax")
    tables = tables_of(first_of(model).attnzoo)
    torch.testing.assert_close(model(**inputs).logits, host(**inputs).logits, rtol=1e-5, atol=1e-5)
    assert tables == [None]


# ---- hosts with other biases -------------------------------------------------------------------

LAYERS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
}  # fmt: skip
INKLING: dict[str, Any] = {
    **LAYERS, "vocab_size": 99, "num_key_value_heads": 2, "head_dim": 8, "swa_head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 4,
    "d_rel": 4, "rel_extent": 6, "mlp_layer_types": ["dense"] * 2, "log_scaling_n_floor": 4,
    "layer_types": ["hybrid", "hybrid_sliding"],
}  # fmt: skip
SEAMLESS: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "pad_token_id": 0, "decoder_start_token_id": 3,
    "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3, "num_adapter_layers": 1,
    "adaptor_kernel_size": 2, "adaptor_stride": 2,
    **{f"{half}_layers": 2 for half in ("encoder", "decoder", "speech_encoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder", "speech_encoder")},
    **{f"{half}_ffn_dim": 64 for half in ("encoder", "decoder")},
    "speech_encoder_intermediate_size": 64,
}  # fmt: skip


def speech(*shape: int) -> dict[str, Tensor]:
    return {"input_features": rand(*shape).float()}


def pix2struct() -> tuple[Any, dict[str, Tensor]]:
    vision = {**LAYERS, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 8, "seq_len": 8}
    config = transformers.Pix2StructConfig(text_config=TEXT, vision_config=vision)
    at = torch.arange(16.0).view(2, 8, 1).expand(2, 8, 2) % 8
    inputs = {
        "flattened_patches": torch.cat([at, rand(2, 8, 12).float()], -1),
        "decoder_input_ids": torch.arange(20).view(2, 10) + 2,
    }
    return transformers.Pix2StructForConditionalGeneration(config), inputs


def wav2vec2_conformer() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.Wav2Vec2ConformerConfig(
        **LAYERS, position_embeddings_type="relative", conv_dim=(8, 8), conv_stride=(4, 2),
        conv_kernel=(4, 2), num_feat_extract_layers=2,
    )  # fmt: skip
    return transformers.Wav2Vec2ConformerModel(config), {"input_values": rand(2, 160).float()}


def wav2vec2_bert() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.Wav2Vec2BertConfig(
        **LAYERS, position_embeddings_type="relative_key", feature_projection_input_dim=16,
        conv_depthwise_kernel_size=3,
    )  # fmt: skip
    return transformers.Wav2Vec2BertModel(config), speech(2, 12, 16)


def seamless(version: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    config = getattr(transformers, f"SeamlessM4T{version}Config")(**SEAMLESS, **options)
    model = getattr(transformers, f"SeamlessM4T{version}ForSpeechToText")(config)
    tokens = torch.arange(14).view(2, 7) + 4
    return model, {**speech(2, 16, 16), "decoder_input_ids": tokens}


def inkling() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.InklingTextConfig(**INKLING)
    return transformers.InklingTextModel(config), {"input_ids": torch.arange(20).view(2, 10)}


def granite_speech5() -> tuple[Any, dict[str, Tensor]]:
    config = transformers.GraniteSpeech5EncoderConfig(
        **LAYERS, num_mel_bins=32, max_position_embeddings=8, context_size=4, vocab_size=50
    )
    return transformers.GraniteSpeech5Encoder(config), speech(2, 32, 128)


HOSTS = {
    "Pix2Struct": (pix2struct, "relative_attention_bias"),
    "Wav2Vec2Conformer": (wav2vec2_conformer, "pos_bias_v"),
    "Wav2Vec2Bert": (wav2vec2_bert, "distance_embedding"),
    "SeamlessM4T": (lambda: seamless(""), "pos_bias_v"),
    "SeamlessM4Tv2": (
        lambda: seamless("v2", left_max_position_embeddings=4, right_max_position_embeddings=2),
        "distance_embedding",
    ),
    "Inkling": (inkling, "rel_logits_proj"),
    "GraniteSpeech5": (granite_speech5, "rel_pos_emb"),
}


@pytest.mark.parametrize(
    "family",
    [f if f == "Wav2Vec2Bert" else pytest.param(f, marks=pytest.mark.slow) for f in HOSTS],
)
def test_hosts_with_other_biases_keep_them(family: str) -> None:
    make, bias = HOSTS[family]
    torch.manual_seed(0)
    host, inputs = make()
    for parameter in host.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    host.eval().double().set_attn_implementation("eager")
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    model = convert(copy.deepcopy(host), "softmax", inputs=inputs)
    outputs, all_gradients = [], []
    for one in (host, model):
        out = one(**inputs)[0]
        (out * rand(*out.shape)).sum().backward()
        outputs.append(out)
        all_gradients.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    expected, actual = all_gradients
    assert max(x.abs().max() for name, x in expected.items() if bias in name) > 0.01
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
