"""Small models whose attention does more than softmax: sinks, selected keys, gains and gates.

Weights are large enough that a wrong attention changes the outputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.hf_models import transformers

TOKENS: dict[str, Any] = {
    "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZES: dict[str, Any] = {
    **TOKENS, "hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.3,
}  # fmt: skip
DENSE: dict[str, Any] = {
    **SIZES, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 1}
# Low-rank keys and values, and an indexer that selects four keys per query.
SELECTING = {
    **DENSE, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2,
}  # fmt: skip
del SELECTING["head_dim"]


def _class(name: str) -> Any:
    """A class of transformers; skips the test if the installed version is older than the class."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def _made(model: str, config: str, options: dict[str, Any], *names: str) -> Any:
    """The model; parameters with one of the names get values in which a factor or sink matters."""
    made_config = _class(config)(**options)
    torch.manual_seed(0)
    made = _class(model)(made_config).eval()
    for name, x in made.named_parameters():
        if any(part in name for part in names):
            torch.nn.init.uniform_(x, 0.3, 0.9)
    return made


def inkling2() -> Any:
    """Sinks, a bias and an output gate from the hidden states, and a gain in half of the layers."""
    config = {
        **SIZES, **EXPERTS, "unpadded_vocab_size": 99, "num_hidden_layers": 4,
        "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 5, "d_rel": 4,
        "rel_extent": 6, "log_scaling_n_floor": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_routed_experts": 2, "n_layers_per_attn_res_block": 2,
    }  # fmt: skip
    return _made("Inkling2ForCausalLM", "Inkling2TextConfig", config)


def mistral_large4() -> Any:
    """Selected keys and Scalable-Softmax."""
    text = {**SELECTING, "no_rope_layers": [1, 0], "model_type": "mistral_large4_text"}
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
    }  # fmt: skip
    config = {"vision_config": vision, "text_config": text, "image_token_index": 98}
    name = "MistralLarge4ForConditionalGeneration"
    return _made(name, "MistralLarge4Config", config, "softmax_scaling")


def deepseek_v32() -> Any:
    """Selected keys."""
    config = {**SELECTING, "q_lora_rank": 16}
    return _made("DeepseekV32ForCausalLM", "DeepseekV32Config", config)


def hy_v4() -> Any:
    """Selected keys and sinks per head."""
    return _made("HYV4ForCausalLM", "HYV4Config", {**SELECTING, "q_lora_rank": 16}, "sinks")


def laguna() -> Any:
    """An output gate per head."""
    config = {
        **DENSE, **EXPERTS, "sliding_window": 5, "shared_expert_intermediate_size": 16,
        "num_experts": 2, "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    return _made("LagunaForCausalLM", "LagunaConfig", config)


def muse_spark() -> Any:
    """An output gate after a norm of the output."""
    text = {
        **DENSE, **EXPERTS, "sliding_window": 5, "moe_hidden_size": 16, "num_local_experts": 2,
        "num_hidden_layers": 4,
    }  # fmt: skip
    vision = {
        "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16,
        "intermediate_size": 16,
    }  # fmt: skip
    audio = {
        "patch_sizes": (4, 4), "hidden_sizes": (8, 8), "depths": (1, 1), "num_hidden_layers": 2,
        "out_hidden_size": 32,
    }  # fmt: skip
    config = {
        "text_config": text, "vision_config": vision, "audio_config": audio, "out_hidden_size": 32,
        "projector_hidden_size": 16, "image_token_id": 95, "video_token_id": 96,
        "audio_token_id": 97,
    }  # fmt: skip
    return _made("MuseSparkForConditionalGeneration", "MuseSparkConfig", config)


def llama4_with_gain(**options: Any) -> Any:
    """A gain by position in the second layer, which has no rotary encoding."""
    config = {
        **DENSE, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 5,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "floor_scale": 2, "attn_scale": 0.5, **options,
    }  # fmt: skip
    return _made("Llama4ForCausalLM", "Llama4TextConfig", config)


def ministral3(beta: float = 0.5) -> Any:
    """A gain by position in all layers."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta,
        "original_max_position_embeddings": 4,
    }  # fmt: skip
    config = {**DENSE, "sliding_window": None, "rope_parameters": rope}
    return _made("Ministral3ForCausalLM", "Ministral3Config", config)


def beam() -> Any:
    """A gain by position in the second layer, which has no window."""
    config = {
        **DENSE, **EXPERTS, "sliding_window": 5, "num_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return _made("BeamForCausalLM", "BeamConfig", config)


def mpnet() -> Any:
    """Attention that the model computes itself, and a bias by relative position."""
    config = {
        **SIZES, "pad_token_id": 1, "intermediate_size": 64, "num_hidden_layers": 2,
        "max_position_embeddings": 300,
    }  # fmt: skip
    return _made("MPNetForMaskedLM", "MPNetConfig", config)


def bloom() -> Any:
    """Attention that the model computes itself, which nothing replaces."""
    config = {**TOKENS, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    return _made("BloomForCausalLM", "BloomConfig", config)
