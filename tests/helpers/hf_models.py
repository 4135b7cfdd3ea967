"""Small transformers models with random weights, and inputs for them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of third-party packages
    import transformers
    from transformers import (
        BartConfig,
        BartModel,
        BertConfig,
        BertModel,
        CLIPConfig,
        CLIPForImageClassification,
        CLIPModel,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GptOssConfig,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        ViTConfig,
        ViTModel,
    )


transformers.logging.set_verbosity_error()
SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**GQA, **options})).eval()


def qwen() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=8, **window)).eval()


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SMALL)).eval()


def bart() -> BartModel:
    sizes = {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64}
    layers = {f"{who}_{what}": n for who in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return BartModel(BartConfig(**sizes, **layers)).eval()


def vit() -> ViTModel:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    return ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).eval()


# Weights large enough that a wrong attention changes the outputs. Layers 0 and 1 differ in masks.
WINDOWS = {**GQA, "head_dim": 8, "initializer_range": 0.3, "sliding_window": 5}


def clip() -> CLIPModel:
    text = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"image_size": 32, "patch_size": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4}  # fmt: skip
    return CLIPModel(CLIPConfig(text_config={**text, **sizes}, vision_config={**vision, **sizes}))


def image_classifier() -> CLIPForImageClassification:
    return CLIPForImageClassification(clip().config).eval()


def large_llama() -> LlamaForCausalLM:
    return llama(initializer_range=0.3)


def gemma2(**options: Any) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    scores = {"attn_logit_softcapping": 0.8, "query_pre_attn_scalar": 16}
    return Gemma2ForCausalLM(Gemma2Config(**{**WINDOWS, **scores, **options})).eval()


def gpt_oss(**options: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "attention_dropout": 0.0}
    return GptOssForCausalLM(GptOssConfig(**{**WINDOWS, **experts, **options})).eval()


def mistral(**options: Any) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**WINDOWS, **options})).eval()


def llama4() -> Llama4ForCausalLM:
    torch.manual_seed(0)
    sizes = {k: v for k, v in WINDOWS.items() if k != "sliding_window"}
    config = Llama4TextConfig(
        **sizes, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=5,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


def eager(model: Any) -> Any:
    """The model with transformers' eager attention."""
    model.set_attn_implementation("eager")
    return model


DECODERS = {"llama": llama, "qwen3": qwen, "gpt2": gpt2}
MODELS = {**DECODERS, "bert": bert, "vit": vit}


def ids(n: int = 12) -> Tensor:
    return torch.randint(1, 99, (2, n), generator=torch.Generator().manual_seed(n))


def left_padding(n: int = 12) -> Tensor:
    return (torch.arange(n) >= torch.tensor([[0], [4]])).long()


def batch(model: Any) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels}
    padding = left_padding() if model.config.model_type != "bert" else left_padding().flip(1)
    return {"input_ids": ids(), "attention_mask": padding}


def outputs(model: Any, **options: Any) -> Tensor:
    """The model's first output at all tokens that are not padding."""
    given = batch(model)
    out = model(**given, **options)[0]
    return out if "attention_mask" not in given else out[given["attention_mask"].bool()]


def generate(model: Any, **options: Any) -> Tensor:
    options = {"attention_mask": left_padding(), **options}
    return model.generate(
        ids(), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options
    )


# A pytest mark that ignores deprecation warnings of third-party packages
quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
