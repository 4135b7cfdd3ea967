"""Tiny random models of any family of transformers, and inputs for them, made by general rules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
MOST_PARAMETERS = 40_000_000
WIDTH, HEADS, HEAD_DIM, POSITIONS, VOCABULARY = 64, 4, 16, 64, 128
PREFERRED = (
    "ForConditionalGeneration", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model",
    "ForPreTraining",
)  # fmt: skip

# (pattern of the name of a field, largest value). The first pattern that matches counts.
# None stands for the number of layers.
LIMITS = [
    (r"num_kv_shared_layers", 0),
    (r".*(layers|blocks|depths?)|n_layer", None),
    (r"(.*_)?(num_)?(key_value|kv)_heads", 2),
    (r".*heads|n_head", HEADS),
    (r"(n|top_?k)_groups?", 1),
    (r".*groups?", 4),
    (r".*experts_per_tok.*|(.*_)?top_?k.*|moe_k", 2),
    (r".*experts.*|.*num_codebooks", 4),
    (r".*head_dim|d_kv|.*head_size|dim_head|.*_rank|rotary_dim", HEAD_DIM),
    (r".*vocab.*|.*codebook_size|num_embeddings", VOCABULARY),
    (r".*window_sizes?", 2),
    (r".*(window|chunk_size|local_size|chunk_length)(_size)?", 4),
    (r".*patch_sizes?", 8),
    (r".*resolution", 64),
    (r".*(position|len|n_ctx).*", POSITIONS),
    (r".*frames", 4),
    (r"feature_size|.*mel_bins", 16),
    (r".*(size|dim|width|channels|inner|d_model|n_embd|d_ff|units|features|latents|queries).*",
     WIDTH),
]  # fmt: skip

# Values of fields without a default.
IF_NONE = {
    "vocab_size": VOCABULARY, "head_dim": HEAD_DIM, "num_experts_per_tok": 2, "num_experts": 4,
    "n_routed_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDTH, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip

# Values that no rule gives, by the class of the config.
CHOSEN: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 4}},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "Emu3Config": {"vocabulary_map": {"<image>": 4}},
    "EsmConfig": {"pad_token_id": 1, "mask_token_id": 2},
    "Glm5NextTextConfig": {"index_kpool": 2},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "LayoutLMv3Config": {"coordinate_size": 8, "shape_size": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 96},
    "Mamba2Config": {"num_heads": 8},
    "Mask2FormerConfig": {"feature_size": WIDTH, "mask_feature_size": WIDTH},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PaddleOCRTextConfig": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "Qwen2_5_VLVisionConfig": {"window_size": 32},
    "Qwen2_5OmniVisionEncoderConfig": {"window_size": 32},
    "Exaone4_5_VisionConfig": {"window_size": 32},
}  # fmt: skip


def families() -> list[str]:
    """The directories of models of the installed transformers."""
    return sorted(path.name for path in MODELS.iterdir() if (path / "__init__.py").exists())


def model_classes(family: str) -> dict[type, list[type]]:
    """The classes of a family's models by the class of their config, the usual ones first."""
    classes: dict[type, list[Any]] = {}
    for path in sorted((MODELS / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        for name, one in vars(module).items():
            is_model = inspect.isclass(one) and issubclass(one, PreTrainedModel)
            if not is_model or one.__module__ != module.__name__ or "PreTrained" in name:
                continue
            if one.config_class is not None and one.forward is not PreTrainedModel.forward:
                classes.setdefault(one.config_class, []).append(one)
    ranked = [sorted(models, key=_rank) for models in classes.values()]
    return {models[0].config_class: models for models in sorted(ranked, key=lambda x: _rank(x[0]))}


def _rank(model: type) -> tuple[int, int]:
    name = model.__name__
    ranks = [i for i, ending in enumerate(PREFERRED) if name.endswith(ending)]
    return (min(ranks, default=len(PREFERRED)), len(name))


def tiny_config(kind: type, layers: int = 2, default: Any = None) -> Any:
    """A config with small sizes. A field that the class derives from others stays derived."""
    default = kind() if default is None else default
    chosen: dict[str, Any] = {}
    for field in fields(kind):
        value = field.default if field.default is not MISSING else None
        if field.default_factory is not MISSING:
            value = field.default_factory()
        if field.name in getattr(kind, "sub_configs", {}):
            part = getattr(default, field.name, None)
            if part is not None:
                chosen[field.name] = tiny_config(type(part), layers, part)
        elif value is None and vars(default).get(field.name) is None and field.name in IF_NONE:
            chosen[field.name] = IF_NONE[field.name]
        elif value is not None and (small := _small(field.name, value, layers)) != value:
            chosen[field.name] = small
    heads = vars(default).get("num_attention_heads"), vars(default).get("num_key_value_heads")
    if None not in heads and heads[0] == heads[1]:
        chosen["num_key_value_heads"] = HEADS
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()):
        rope = {"rope_type": "default", "rope_theta": 10000.0, **(default.rope_parameters or {})}
        sections = rope.get("mrope_section", (22, 22, 20))
        half = round(HEAD_DIM // 2 * rope.get("partial_rotary_factor", 1))
        small = [round(x * half / sum(sections)) for x in sections[:-1]]
        chosen["rope_parameters"] = {**rope, "mrope_section": [*small, half - sum(small)]}
    return kind(**chosen | CHOSEN.get(kind.__name__, {}))


def _small(name: str, value: Any, layers: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_small(name, one, layers) for one in value)
    if type(value) is not int:
        return value
    if re.fullmatch(r".*(token_id|token_index|token_ids|_token|_id)", name):
        return value if value < 100 else 100 + sum(map(ord, name)) % 28
    most = next((most for pattern, most in LIMITS if re.fullmatch(pattern, name)), value)
    small = min(value, layers if most is None else most)
    return 2 if small == 3 and "heads" in name else small


def tiny_model(kind: Any, layers: int = 2, redrawn: bool = True) -> PreTrainedModel:
    """A model with random weights in evaluation mode; redrawn weights give scores of usual size."""
    config = tiny_config(kind.config_class, layers)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(x.numel() for x in kind(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the rules for sizes leave {count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for parameter in model.parameters() if redrawn else ():
        with torch.no_grad():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
                parameter.normal_(0, fan_in**-0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batches(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs by the names of the arguments of forward, the most usual first."""
    torch.manual_seed(1)
    names = inspect.signature(model.forward).parameters
    setting = partial(_setting, model.config)
    first, main = next(iter(names)), model.main_input_name
    size, channels = setting(64, "image_size"), setting(3, "num_channels")
    height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
    mels = setting(16, "num_mel_bins", "feature_size", "input_feat_per_channel")
    steps = 2 * setting(0, "max_source_positions") or setting(64, "max_length")
    image = torch.randn(2, channels, height, width)
    film = torch.randn(2, setting(4, "num_frames"), channels, height, width)
    sound = [torch.randn(2, *x) for x in ((mels, steps), (steps, mels), (2000,), (1, 2000))]
    text, ids = _text(names), torch.randint(3, 60, (8, 7, 4))
    decoder = {"decoder_input_ids": ids[:2, :5, 0]} if "decoder_input_ids" in names else {}
    patches = dict.fromkeys(("image_grid_thw", "grid_thw"), torch.tensor([[1, 4, 4]] * 2))
    masks = {x: torch.ones(2, steps, dtype=torch.bool) for x in names if "_mask" in x}
    required = {x for x, y in names.items() if y.default is y.empty and y.kind != y.VAR_KEYWORD}
    more = {x: y for x, y in (patches | masks).items() if x in required}
    if "bbox" in names:
        more["bbox"] = torch.zeros(2, 7, 4, dtype=torch.long)
    values: dict[str, list[Any]] = {
        "pixel_values": [image, film], "pixel_values_videos": [film], "input_values": sound[::-1],
        "input_features": sound, "inputs_embeds": [torch.randn(2, 7, WIDTH)],
    }  # fmt: skip
    for value in values.get(main, []) if main in names else []:
        for extra in ({}, decoder, text):
            yield {main: value, **extra, **more}
    if text:
        images = [{}, {"pixel_values": image}] if "pixel_values" in names else [{}]
        for extra in images:
            yield {**text, **decoder, **extra, **more}
            yield {"input_ids": text["input_ids"], **decoder, **extra, **more}
        yield {"input_ids": ids[:, :, 0]}
        yield {"input_ids": ids[:2]}
        yield {**text, **decoder, "use_cache": False}
    if required & patches.keys():
        temporal, patch = setting(1, "temporal_patch_size"), setting(1, "patch_size")
        channels = setting(channels, "in_channels")
        yield {first: torch.randn(32, channels * temporal * patch**2), **more}
        yield {first: torch.randn(32, channels, patch, patch), **more}
    if first == "flattened_patches":  # row, column and pixels
        yield {first: torch.ones(2, 7, 2 + setting(64, "patch_embed_hidden_size")), **decoder}
    if first == "past_values":
        series = setting(1, "num_input_channels")
        yield {first: torch.randn(2, setting(32, "context_length"), series)}
    short = {x: y[:, :7] if "_mask" in x else y for x, y in more.items()}
    yield {first: torch.randn(2, 7, WIDTH), **short}
    for value in (image, *sound):
        yield {first: value, **more}


def _text(names: Any) -> dict[str, Tensor]:
    """Token ids, and a mask that hides the end of the second row."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    text = {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": mask}
    return {name: x for name, x in text.items() if name in names} if "input_ids" in names else {}


def _setting(config: Any, default: Any, *names: str) -> Any:
    """The first value of these names in a config or in those of its parts."""
    configs = [config]
    for config in configs:  # the list grows
        configs += [getattr(config, x) for x in config.sub_configs if getattr(config, x, None)]
    values = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in values if value is not None), default)
