"""Tiny random models of any family of transformers, and inputs for them, made by general rules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
MOST_PARAMETERS = 12_000_000
WIDTH, HEADS, POSITIONS, VOCABULARY = 64, 4, 64, 128
PREFERRED = (
    "ForConditionalGeneration", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model", "ForPreTraining",
)  # fmt: skip

# (pattern of the name of a field, largest value). The first pattern that matches counts.
LIMITS = [
    (r"(.*_)?(num_)?(key_value|kv)_heads|num_kv_groups|multi_query_group_num", 2),
    (r".*heads|n_head|.*num_head", HEADS),
    (r".*(layers|blocks)|n_layer|.*depths?|.*layers_per_block", 2),
    (r"(.*_)?(n|topk)_groups?", 1),
    (r".*experts_per_tok.*|(.*_)?top_?k.*|.*topk|num_selected_experts", 2),
    (r".*experts.*|.*num_codebooks|codebook_num", 4),
    (r".*head_dim|d_kv|.*head_size|dim_head|.*_rank|key_length|value_length|rotary_dim", 16),
    (r".*vocab.*|.*codebook_size|num_embeddings|audio_vocab.*", VOCABULARY),
    (r"window_size|.*window_sizes?", 2),
    (r".*(window|chunk_size|local_size|chunk_length)(_size)?", 4),
    (r".*patch_size|.*patch_sizes", 8),
    (r".*image_size|.*resolution|img_size|spatial_size", 64),
    (r".*(position|length|len|n_ctx|seq).*", POSITIONS),
    (r".*(frames)", 4),
    (r"num_mel_bins|n_mels|feature_size|.*mel_bins", 16),
    (r".*(size|dim|width|channels|hidden|inner|d_model|filters|ffn|n_embd|d_ff|sizes|dims|planes|"
     r"units|features|latents|queries).*", WIDTH),
]  # fmt: skip


def families() -> list[str]:
    """The directories of models of the installed transformers."""
    return sorted(path.name for path in MODELS.iterdir() if (path / "__init__.py").exists())


def model_classes(family: str) -> dict[type, list[type]]:
    """The classes of a family's models by the class of their config, the usual ones first."""
    classes: dict[type, list[type]] = {}
    for path in sorted((MODELS / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        for name, one in vars(module).items():
            is_model = inspect.isclass(one) and issubclass(one, PreTrainedModel)
            if not is_model or one.__module__ != module.__name__ or "PreTrained" in name:
                continue
            if one.config_class is not None and one.forward is not PreTrainedModel.forward:
                classes.setdefault(one.config_class, []).append(one)
    return {config: sorted(models, key=_rank) for config, models in classes.items()}


def _rank(model: type) -> tuple[int, int]:
    name = model.__name__
    ranks = [i for i, ending in enumerate(PREFERRED) if name.endswith(ending)]
    return (min(ranks, default=len(PREFERRED)), len(name))


def tiny_config(kind: type, layers: int = 2, default: Any = None) -> Any:
    """A config with small sizes. Fields without a default keep their rule of the class."""
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
        elif value is not None and (small := _small(field.name, value, layers)) != value:
            chosen[field.name] = small
    heads = [
        getattr(default, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    ]
    if heads[0] is not None and heads[0] == heads[1] and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = HEADS
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()):
        rope = default.rope_parameters or {}
        half = round(rope.get("partial_rotary_factor", 1) * 8)  # of the head dimension
        chosen["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3] if half == 8 else [2, 1, 1]}
    return kind(**chosen)


def _small(name: str, value: Any, layers: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_small(name, one, layers) for one in value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if re.fullmatch(r".*(token_id|token_index|token_ids|_token|_id)", name):
        return value if value < 100 else 100 + sum(map(ord, name)) % 28
    for pattern, most in LIMITS:
        if re.fullmatch(pattern, name):
            if "layer" in name and "heads" not in name:
                most = layers
            small = min(value, most)
            return 2 if small == 3 and "heads" in name else small
    return value


def tiny_model(kind: Any, layers: int = 2) -> PreTrainedModel:
    """A model with random weights whose scores are not small, in evaluation mode."""
    config = tiny_config(kind.config_class, layers)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(x.numel() for x in kind(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the rules for sizes leave {count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for parameter in model.parameters():
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
    main = model.main_input_name
    size, channels = _setting(model, "image_size", 32), _setting(model, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
    frames = _setting(model, "num_frames", 4)
    mels = _setting(model, "num_mel_bins", None) or _setting(model, "feature_size", 16)
    steps = _setting(model, "max_source_positions", None)
    steps = 2 * steps if steps else _setting(model, "max_length", 64)
    image, film = (
        torch.randn(2, channels, height, width),
        torch.randn(2, frames, channels, height, width),
    )
    text = _text(names)
    sound = [
        torch.randn(2, mels, steps),
        torch.randn(2, steps, mels),
        torch.randn(2, 2000),
        torch.randn(2, 1, 2000),
    ]
    decoder = (
        {"decoder_input_ids": torch.randint(3, 60, (2, 5))} if "decoder_input_ids" in names else {}
    )
    shapes: dict[str, list[Any]] = {
        "pixel_values": [image, film], "pixel_values_videos": [film], "input_values": sound[::-1],
        "input_features": sound, "inputs_embeds": [torch.randn(2, 7, WIDTH)],
    }  # fmt: skip
    for value in shapes.get(main, []) if main in names else []:
        for extra in ({}, decoder, text):
            yield {main: value, **extra}
    if "input_ids" in names:
        for extra in (
            {**decoder},
            {**decoder, "pixel_values": image} if "pixel_values" in names else {},
        ):
            yield {**text, **extra}
            yield {"input_ids": text["input_ids"], **extra}
    if "grid_thw" in names:
        temporal, patch = (_setting(model, f"{x}patch_size", 1) for x in ("temporal_", ""))
        channels = _setting(model, "in_channels", channels)
        patches = torch.randn(32, channels * temporal * patch**2)
        yield {next(iter(names)): patches, "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    first = next(iter(names))
    for value in (torch.randn(2, 7, WIDTH), image, *sound):
        yield {first: value}


def _text(names: Any) -> dict[str, Tensor]:
    """Token ids, and a mask that hides the end of the second row."""
    if "input_ids" not in names:
        return {}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    masked = {"attention_mask": mask} if "attention_mask" in names else {}
    return {"input_ids": torch.randint(3, 60, (2, 7)), **masked}


def _setting(model: nn.Module, name: str, default: Any) -> Any:
    """The first value of this name in a config of the model or of a part."""
    queue: list[Any] = [model.config]
    while queue:
        config = queue.pop(0)
        if getattr(config, name, None) is not None:
            return getattr(config, name)
        queue += [getattr(config, key) for key in config.sub_configs if getattr(config, key, None)]
    return default
