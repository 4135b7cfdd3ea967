"""Loading of converted models: from_pretrained(), from_config() and transformers' own loaders.

`register` patches transformers: a model whose config has an attnzoo entry gets its variants when it
is constructed, before its weights are loaded. Every loader of transformers therefore loads the
learned values like all other weights. The saved config names "attnzoo" as attention implementation.
Transformers raises for this name in a process that has not imported this package, so the model
never runs with softmax unnoticed.
"""

from __future__ import annotations

import copy
import os
from functools import wraps
from typing import Any

import torch
from torch import nn

from attnzoo.core.registry import list_variants
from attnzoo.integrations.transformers.convert import (
    VERSION,
    attach,
    possible_names,
    write_spec,
)
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.wrapped import new_child
from attnzoo.nn import Attention, Wrapper

# Arguments of from_pretrained that select the files, also needed to load the config.
LOCATION = (
    "revision", "cache_dir", "token", "subfolder", "local_files_only", "force_download", "proxies",
)  # fmt: skip
# Required keys of a layer's entry in the spec, and their types.
ENTRY = {"variant": str, "num_heads": int, "params": dict}
OPTIONS = ("learn", "given", "softcap", "head_dim")  # optional keys, arguments of `Attention`
WRAPPER = {
    "name": str, "arguments": dict, "embed_dim": int, "qk_dim": int, "v_dim": int, "layer": int,
}  # fmt: skip  # keys of the optional entry "wrapper"


def from_config(auto_class: Any, config: Any) -> Any:
    """Creates a model with new weights and with the variants that its config names.

    Args:
        auto_class: a class of transformers, e.g. `AutoModelForCausalLM` or `LlamaForCausalLM`.
        config: the config of a converted model.

    Returns:
        The converted model.

    Raises:
        ValueError: the config has no attnzoo entry, or one that this version does not support.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import convert, from_config
        >>> config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4)
        >>> trained = convert(transformers.GPT2LMHeadModel(config), "ssmax")
        >>> model = from_config(transformers.AutoModelForCausalLM, trained.config)
        >>> model.transformer.h[0].attn.attnzoo
        Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)
    """
    check_spec(config)
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    return _check_complete(make(copy.deepcopy(config), attn_implementation=NAME))


def from_pretrained(auto_class: Any, path: Any, **kwargs: Any) -> Any:
    """Loads a converted model from `save_pretrained`: variants, layers and learned values.

    The class's own from_pretrained does the same once this package is imported. This function also
    raises if the checkpoint is not of a converted model. Learned parameters that are missing in the
    checkpoint get their initial values.

    Args:
        auto_class: a class of transformers, e.g. `AutoModelForCausalLM` or `LlamaForCausalLM`.
        path: a folder, or a name on the Hugging Face hub.
        **kwargs: arguments of the class's own from_pretrained.

    Returns:
        The converted model; with ``output_loading_info=True`` a pair (model, info).

    Raises:
        ValueError: the config has no attnzoo entry, or one that this version does not support.

    Example:
        >>> import tempfile, transformers
        >>> from attnzoo.integrations.transformers import convert, from_pretrained
        >>> config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4)
        >>> trained = convert(transformers.GPT2LMHeadModel(config), "ssmax", start="identity")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trained.save_pretrained(folder)
        ...     model = from_pretrained(transformers.AutoModelForCausalLM, folder)
        >>> model.transformer.h[0].attn.attnzoo
        Attention('ssmax', num_heads=4, s=0 (learned), b=1 (learned))
    """
    from transformers import AutoConfig

    location = {name: kwargs[name] for name in LOCATION if name in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config or path, **location)
    check_spec(config)
    loaded = auto_class.from_pretrained(path, **{"attn_implementation": NAME, **kwargs})
    _check_complete(loaded[0] if kwargs.get("output_loading_info") else loaded)
    return loaded


def check_spec(config: Any) -> dict[str, Any]:
    """The attnzoo entry of a config, after checking it."""
    spec = getattr(config, NAME, None)
    if not spec:
        raise ValueError(
            f"config must be of a converted model, got one without {NAME!r}: load the model with "
            "its own class and call convert()"
        )
    version = spec.get("version") if isinstance(spec, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"config.{NAME} must have a version >= 1, got {spec!r}")
    if version > VERSION:
        raise ValueError(
            f"config.{NAME} must be of version {VERSION} or older, got {version}: upgrade attnzoo"
        )
    layers = spec.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f"config.{NAME} must have layers, got {spec!r}")
    for name, entry in layers.items():
        for key, kind in ENTRY.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise ValueError(
                    f"config.{NAME}: layer {name!r} must have {key} of type {kind.__name__}, got "
                    f"{entry!r}"
                )
        if entry["variant"] not in list_variants():
            raise ValueError(
                f"config.{NAME}: layer {name!r} has the variant {entry['variant']!r}, which is not "
                "registered: call attnzoo.load_plugin(file) with the file that registers it first"
            )
        if unknown := sorted(set(entry) - {*ENTRY, *OPTIONS, "wrapper"}):
            raise ValueError(f"config.{NAME}: layer {name!r} has unknown entries: {unknown}")
        wrapper = entry.get("wrapper")
        if wrapper is not None and not (
            isinstance(wrapper, dict)
            and set(wrapper) == {*WRAPPER}
            and all(isinstance(wrapper[key], kind) for key, kind in WRAPPER.items())
        ):
            raise ValueError(
                f"config.{NAME}: wrapper of layer {name!r} must have {', '.join(WRAPPER)}, got "
                f"{wrapper!r}"
            )
    return spec


def attach_configured(model: Any) -> None:
    """Adds the variants that the config names to the model's layers, with initial values."""
    if getattr(model.config, NAME, None) is None:
        return
    spec = check_spec(model.config)
    entries = {}
    for name, entry in spec["layers"].items():
        # A sub-model is constructed before the whole model and may have only some of the layers.
        entries |= {n: entry for n in possible_names(model, name) if _has(model, n)}
    if not entries:
        return
    requested = model.config._attn_implementation
    if requested != NAME:
        raise ValueError(
            f"attn_implementation must be {NAME!r}, because config.{NAME} sets the variants of "
            f"{len(entries)} layers of {type(model).__name__}, got {requested!r}: for softmax call "
            f"revert(model) or model.set_attn_implementation({requested!r}) after loading"
        )
    with torch.device("cpu"):  # initial values are needed even if the model is on meta
        children = {
            name: _child(entry)
            for name, entry in entries.items()
            if NAME not in model.get_submodule(name)._modules
        }
    attach(model, children)
    write_spec(model.config, spec)


def _child(entry: dict[str, Any]) -> Attention | Wrapper:
    params: dict[str, Any] = {
        key: _stored(value) if isinstance(value, list) else value
        for key, value in entry["params"].items()
    }
    options = {name: entry[name] for name in OPTIONS if name in entry}
    wrapper = entry.get("wrapper")
    return new_child(entry["variant"], entry["num_heads"], wrapper, {**options, **params})


def _stored(values: list[Any]) -> torch.Tensor:
    """A tensor of the spec in fp32, or in fp64 if fp32 would round it.

    Without a dtype it would have the dtype of the model that transformers is loading.
    """
    exact = torch.tensor(values, dtype=torch.float64)
    single = exact.float()
    return single if torch.equal(single.double(), exact) else exact


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _check_complete(model: Any) -> Any:
    """The model; raises if it lacks a layer that its config names."""
    for name in check_spec(model.config)["layers"]:
        if not any(_has(model, f"{n}.{NAME}") for n in possible_names(model, name)):
            raise ValueError(f"config.{NAME}: {type(model).__name__} has no module {name!r}")
    return model


def register() -> None:
    """Patches two methods of `PreTrainedModel` at import; transformers has no hooks for them."""
    from transformers import PreTrainedModel

    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights

    @wraps(post_init)
    def with_variants(self: Any) -> None:
        post_init(self)
        attach_configured(self)

    @wraps(initialize)
    def with_initial_values(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Transformers calls this if weights are missing; loaded tensors have _is_hf_initialized.
        if not isinstance(module, (Attention, Wrapper)):
            return initialize(self, module, *args, **kwargs)
        if not getattr(module, "_is_hf_initialized", False):
            tensors = module.state_dict(keep_vars=True).values()
            loaded = [x for x in tensors if getattr(x, "_is_hf_initialized", False)]
            values = [x.detach().clone() for x in loaded]
            module.reset_parameters()
            with torch.no_grad():
                for x, value in zip(loaded, values, strict=True):
                    x.copy_(value)
            module._is_hf_initialized = True  # pyright: ignore

    PreTrainedModel.post_init = with_variants
    PreTrainedModel._initialize_weights = with_initial_values
