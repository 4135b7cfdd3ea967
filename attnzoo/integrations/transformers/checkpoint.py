"""Converted models are loaded again: by transformers' own loader, from_pretrained(), from_config().

What is registered with transformers here: a model whose config has an attnzoo entry gets its
variants when it is made, before its weights are loaded. So each loader of transformers finds the
learned values of a checkpoint as it finds all others. The saved config names "attnzoo" as the
attention implementation: a process that has not imported this package cannot load the checkpoint
and compute softmax, because transformers does not know that name and raises.
"""

from __future__ import annotations

import copy
import os
from functools import wraps
from typing import Any

import torch
from torch import nn

from attnzoo.integrations.transformers.convert import (
    VERSION,
    attach,
    describe,
    spellings,
)
from attnzoo.integrations.transformers.interface import NAME
from attnzoo.nn import Attention

WHERE = (
    "revision", "cache_dir", "token", "subfolder", "local_files_only", "force_download", "proxies",
)  # fmt: skip
ENTRY = {"variant": str, "num_heads": int, "params": dict}


def from_config(auto_class: Any, config: Any) -> Any:
    """A model with new weights, converted as ``config.attnzoo`` says.

    Args:
        auto_class: `transformers.AutoModelForCausalLM`, say, or a model's own class.
        config: of a converted model.

    Raises:
        ValueError: if the config says nothing of attnzoo, or what this version does not know.
    """
    checked(config)
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    return _complete(make(copy.deepcopy(config), attn_implementation=NAME))


def from_pretrained(auto_class: Any, path: Any, **kwargs: Any) -> Any:
    """A converted model as `save_pretrained` has written it: variants, layers, learned values.

    The class's own from_pretrained does this too, once this package is imported. This function
    raises for a checkpoint that is not of a converted model. A value that the checkpoint does not
    hold is its documented initial value.

    Args:
        auto_class: `transformers.AutoModelForCausalLM`, say, or a model's own class.
        path: a folder, or a name on the hub.
        **kwargs: for the class's own from_pretrained.

    Raises:
        ValueError: if its config says nothing of attnzoo, or what this version does not know.
    """
    from transformers import AutoConfig

    where = {name: kwargs[name] for name in WHERE if name in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config or path, **where)
    checked(config)
    found = auto_class.from_pretrained(path, **{"attn_implementation": NAME, **kwargs})
    _complete(found[0] if kwargs.get("output_loading_info") else found)
    return found


def checked(config: Any) -> dict[str, Any]:
    """The spec of a config, if all of it is known."""
    spec = getattr(config, NAME, None)
    if not spec:
        raise ValueError(
            f"config has no {NAME!r}: it is not of a converted model. Load it with its own class "
            "and convert() it"
        )
    version = spec.get("version") if isinstance(spec, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"config.{NAME}: no version in {spec!r}")
    if version > VERSION:
        raise ValueError(
            f"config.{NAME} is of version {version}, this attnzoo knows up to {VERSION}: upgrade it"
        )
    layers = spec.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f"config.{NAME}: no layers in {spec!r}")
    for name, entry in layers.items():
        for key, kind in ENTRY.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise ValueError(f"config.{NAME}: layer {name!r} has no {key}: {entry!r}")
        if unknown := sorted(set(entry) - {*ENTRY, "learn"}):
            raise ValueError(f"config.{NAME}: layer {name!r} has unknown entries: {unknown}")
    return spec


def attach_configured(model: Any) -> None:
    """Gives the layers that the model's config names their variants, with initial values."""
    if getattr(model.config, NAME, None) is None:
        return
    spec = checked(model.config)
    entries = {}
    for name, entry in spec["layers"].items():
        # A part of the model, made before the whole, need not have all of them.
        entries |= {n: entry for n in spellings(model, name) if _has(model, n)}
    if not entries:
        return
    asked = model.config._attn_implementation
    if asked != NAME:
        raise ValueError(
            f"attn_implementation is {asked!r}, but config.{NAME} gives variants to "
            f"{len(entries)} layers of {type(model).__name__}: pass attn_implementation={NAME!r}; "
            f"for softmax call revert(model) or model.set_attn_implementation({asked!r}) afterwards"
        )
    with torch.device("cpu"):  # initial values are kept also where the model is on meta
        made = {
            name: _attention(entry)
            for name, entry in entries.items()
            if NAME not in model.get_submodule(name)._modules
        }
    attach(model, made, loading=True)
    describe(model.config, spec)


def _attention(entry: dict[str, Any]) -> Attention:
    params = {
        key: torch.tensor(value) if isinstance(value, list) else value
        for key, value in entry["params"].items()
    }
    return Attention(entry["variant"], entry["num_heads"], learn=entry.get("learn"), **params)


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _complete(model: Any) -> Any:
    """The model, if it has all layers that its config names."""
    for name in checked(model.config)["layers"]:
        if not any(_has(model, f"{n}.{NAME}") for n in spellings(model, name)):
            raise ValueError(f"config.{NAME}: {type(model).__name__} has no module {name!r}")
    return model


def register() -> None:
    """Once, when the package is imported. Transformers offers no hook for either of the two."""
    from transformers import PreTrainedModel

    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights

    @wraps(post_init)
    def with_variants(self: Any) -> None:
        post_init(self)
        attach_configured(self)

    @wraps(initialize)
    def with_initial_values(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Called for each module of which a checkpoint lacks something; what it has, has this mark.
        if not isinstance(module, Attention):
            return initialize(self, module, *args, **kwargs)
        if not getattr(module, "_is_hf_initialized", False):
            held = module.held().items()
            module.reset_parameters(n for n, x in held if not getattr(x, "_is_hf_initialized", 0))
            module._is_hf_initialized = True

    PreTrainedModel.post_init = with_variants
    PreTrainedModel._initialize_weights = with_initial_values
