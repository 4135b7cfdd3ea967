"""Models whose modules select the keys of each query, and hand over their indices."""

from __future__ import annotations

import copy
import math
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM

import attnzoo
from attnzoo.integrations.transformers import convert
from attnzoo.integrations.transformers.interface import attend, observe_calls
from helpers.hf_checks import assert_equal_gradients
from helpers.hf_models import eager, generate, ids, quiet

pytestmark = quiet

TINY: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "initializer_range": 0.3, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
DSA: dict[str, Any] = {
    **TINY, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4,
    "index_head_dim": 16, "index_n_heads": 2, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    **TINY, "num_key_value_heads": 2, "head_dim": 8, "dense_intermediate_size": 32,
    "shared_intermediate_size": 16, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
    "index_block_size": 2, "index_topk_blocks": 2, "num_local_experts": 4,
    "layer_types": ["minimax_m3_sparse", "full_attention"],
}  # fmt: skip
POOLS: dict[str, Any] = {
    **DSA, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2, "linear_head_dim": 8,
    "layer_types": ["deepseek_sparse_attention", "linear_attention"], "linear_num_heads": 4,
}  # fmt: skip
GROUPS: dict[str, Any] = {
    **TINY, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
    "layer_types": ["indexed_attention", "linear_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "hc_lowrank": 8,
}  # fmt: skip
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
# Module, class, options of the config, and the keyword with which it hands over its selection.
# The last two apply their selection to the mask themselves.
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", DSA, "indices"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**DSA, **SHARED}, "indices"),
    "axk2": ("AXK2ForCausalLM", DSA, "indices"),
    "dots3_note": ("Dots3NoteForCausalLM", DSA, "indices"),
    "hy_v4": ("HYV4ForCausalLM", {**DSA, **SHARED}, "indices"),
    "mistral_large4": ("MistralLarge4TextModel", DSA, "indices"),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", BLOCKS, "block_indices"),
    "glm5_next": ("Glm5NextTextModel", POOLS, None),
    "qwen4_exp": ("Qwen4ExpForCausalLM", GROUPS, None),
}


def model_of(name: str, kind: str, options: dict[str, Any]) -> Any:
    """A small model; skips the test if transformers is older than it."""
    if find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"this version of transformers has no {name}")
    model_class = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), kind)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**options)).eval()


def family(name: str) -> Any:
    model = model_of(name, *FAMILIES[name][:2])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def variant_of(name: str) -> str:
    return "sink" if name == "hy_v4" else "softmax"


QUICK = ("deepseek_v32", "minimax_m3_vl")


def families(*without: str) -> Any:
    """A parametrization over the families; all but two are slow."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
            for name in FAMILIES
            if name not in without
        ],
    )


@families()
def test_outputs_and_gradients_are_those_of_the_model(name: str) -> None:
    """Both batches are longer than the selection, and the second has padding."""
    host, model = eager(family(name)), convert(family(name), variant_of(name))
    mask = torch.ones_like(ids())
    mask[1, :3] = 0
    expected, actual = host(ids())[0], model(ids())[0]
    assert torch.allclose(actual, expected, atol=1e-5)
    padded = [one(ids(), attention_mask=mask)[0][mask.bool()] for one in (model, host)]
    assert torch.allclose(*padded, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for result in (expected, actual):
        (result * weights).mean().backward()
    assert_equal_gradients(model, host, 1e-5)


@families("mistral_large4", "glm5_next")  # whose parts for text do not generate
def test_generates_as_the_model(name: str) -> None:
    host = eager(family(name))
    model = convert(family(name), variant_of(name))
    mask = torch.ones_like(ids())
    if name != "minimax_m3_vl":  # whose blocks are those of the tokens with padding
        mask[1, :3] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False,
                               "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        expected = host.generate(ids(), **options, **cache)
        assert torch.equal(model.generate(ids(), **options, **cache), expected)


def test_doge_generates_as_the_model() -> None:
    """It selects keys by adding to its mask, which it reads as a tensor."""
    torch.manual_seed(0)
    config = DogeConfig(**TINY, num_key_value_heads=2, keep_window_size=6)
    host = DogeForCausalLM(config).eval()
    host.set_attn_implementation("eager")
    model = convert(copy.deepcopy(host), "softmax")
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(generate(model, **cache), generate(host, **cache))


@families()
def test_n_counts_the_selected_keys(name: str) -> None:
    model = convert(family(name), variant_of(name))
    with observe_calls() as calls, torch.no_grad():
        model(ids())
    keyword = FAMILIES[name][2]
    sparse = [call for call in calls if call.selects or keyword is None]
    assert sparse
    for call in sparse:
        if keyword == "indices":  # rows with 1, 2, 3, 4, 4, … keys
            mean = sum(math.log(min(i, 4)) for i in range(1, 13)) / 12
            assert call.log_n == pytest.approx(mean, rel=1e-6)
        else:
            assert call.log_n < sum(map(math.log, range(1, 13))) / 12


def test_the_queries_of_a_head_share_its_selection() -> None:
    """A mixture of equal queries is the model."""
    model = convert(family("minimax_m3_vl"), "softmax", wrapper="mixture")
    with torch.no_grad():
        for layer in (x for x in model.modules() if "attnzoo" in x._modules):
            first, second = layer.q_proj.weight.view(4, 2, 8, 32).unbind(1)
            second.copy_(first)
        expected = eager(family("minimax_m3_vl"))(ids())[0]
        assert torch.allclose(model(ids())[0], expected, atol=1e-5)


def test_a_model_that_adds_keys_raises() -> None:
    """DeepSeek-V4 concatenates compressed keys, which its mask shows only to its own attention."""
    options: dict[str, Any] = {
        **TINY, "moe_intermediate_size": 16, "n_routed_experts": 4, "q_lora_rank": 16,
        "head_dim": 16, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16,
    }  # fmt: skip
    model = model_of("deepseek_v4", "DeepseekV4ForCausalLM", options)
    with pytest.raises(ValueError, match="model must support another attention than its own"):
        convert(model, "sink")


# ---- the attention function -------------------------------------------------------------------


class Sparse(torch.nn.Module):
    """A layer of a converted model that selects blocks of 3 keys."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.attnzoo = attnzoo.nn.Attention("ssmax", 4, s=0.7)
        self.indexer = SimpleNamespace(block_size=3)


def selected(indices: Tensor, size: int, keys: int, groups: int) -> Tensor:
    """Bool (B, 4, Nq, Nk), by loops."""
    batch, _, queries, _ = indices.shape
    mask = torch.zeros(batch, 4, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(4):
            for i in range(queries):
                for index in indices[b, h // (4 // groups), i].tolist():
                    if index >= 0:
                        mask[b, h, i, index * size : (index + 1) * size] = True
    return mask


@pytest.mark.parametrize("mask", ["none", "bool", "float", "keys"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_selection_is_a_mask(name: str, groups: int, mask: str) -> None:
    """With padding (−1), repeated indices, keys that other masks hide, and rows without keys."""
    generator = torch.Generator().manual_seed(groups)
    draw = partial(torch.randn, generator=generator)
    q, k, v = draw(2, 4, 8, 5), draw(2, 2, 8, 5), draw(2, 2, 8, 6)
    size = 3 if name == "block_indices" else 1
    indices = torch.randint(-1, -(-8 // size), (2, groups, 8, 3), generator=generator)
    indices[0, :, 2] = -1
    visible = draw(2, 1, 8, 8) > -1
    visible[..., 0] = True
    attn_mask: Any = {
        "none": None,
        "bool": visible,
        "float": torch.where(visible, draw(2, 1, 8, 8), torch.finfo(torch.float32).min),
        "keys": visible[:, :, :1],
    }[mask]
    both = selected(indices, size, 8, groups)
    both = both & (visible[:, :, :1] if mask == "keys" else visible) if mask != "none" else both
    expected_mask: Tensor = both
    if mask == "float":
        expected_mask = attn_mask.expand_as(both).masked_fill(~both, -torch.inf)
    layer = Sparse()
    actual, _ = attend(layer, q, k, v, attn_mask, **{name: indices.int()})
    expected = attnzoo.attention(
        q, k, v, "ssmax", s=0.7, b=0.0, attn_mask=expected_mask, is_causal=mask == "none",
        enable_gqa=True,
    )  # fmt: skip
    assert torch.allclose(actual, expected.transpose(1, 2), atol=1e-6)
    if groups == 1 and name == "indices":
        assert torch.equal(attend(layer, q, k, v, attn_mask, indices=indices[:, 0])[0], actual)


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        (r"indices of Sparse must be integers .* got \(1, 3, 5, 2\)",
         {"indices": torch.zeros(1, 3, 5, 2).int()}),
        (r"\(B, G, 5, K\) .* got \(1, 1, 4, 2\)", {"indices": torch.zeros(1, 4, 2).int()}),
        ("got .* in torch.float32", {"indices": torch.zeros(1, 5, 2)}),
        ("got list", {"block_indices": [1]}),
        ("indices or block_indices, got both",
         {"indices": torch.zeros(1, 5, 2).int(), "block_indices": torch.zeros(1, 1, 5, 2).int()}),
    ],
)  # fmt: skip
def test_wrong_selections_raise(text: str, selection: dict[str, Any]) -> None:
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ValueError, match=text):
        attend(Sparse(), q, q, q, None, **selection)


def test_blocks_of_unknown_size_raise() -> None:
    q, layer = torch.zeros(1, 4, 5, 8), Sparse()
    del layer.indexer
    with pytest.raises(ValueError, match="Sparse must have indexer.block_size"):
        attend(layer, q, q, q, None, block_indices=torch.zeros(1, 1, 5, 2).int())


def test_a_sharded_sequence_raises() -> None:
    q, layer = torch.zeros(1, 4, 5, 8), Sparse()
    layer.attnzoo.sharding = object()
    with pytest.raises(ValueError, match="Sparse must not select keys when its sequence is shard"):
        attend(layer, q, q, q, None, indices=torch.zeros(1, 5, 2).int())
