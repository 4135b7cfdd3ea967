"""Loading of converted models: from_pretrained(), from_config() and transformers' own loaders.

`register` patches transformers: a model whose config has an attnzoo entry gets its variants when it
is constructed, before its weights are loaded. Every loader of transformers therefore loads the
learned values like all other weights, and every way to save a model writes the layers that are
converted then into its config. The saved config names "attnzoo" as attention implementation.
Transformers raises for this name in a process that has not imported this package, so the model
never runs with softmax unnoticed.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Collection
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from attnzoo.integrations.transformers.convert import attach, undone
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.modules import parts_of, restorer
from attnzoo.integrations.transformers.spec import (
    check_spec,
    child_of,
    needs_spec,
    owns_spec,
    possible_names,
    write_spec,
    write_specs,
)
from attnzoo.integrations.transformers.wrapped import dtype_of
from attnzoo.nn import Attention, Wrapper

# Arguments of from_pretrained that select the files, also needed to load the config.
LOCATION = (
    "revision", "cache_dir", "token", "subfolder", "local_files_only", "force_download", "proxies",
)  # fmt: skip


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
    return _check_complete(make(copy.deepcopy(config), **_implementation(config)))


def from_pretrained(auto_class: Any, path: Any, **kwargs: Any) -> Any:
    """Loads a converted model from `save_pretrained`: variants, layers and learned values.

    The class's own from_pretrained does the same once this package is imported. This function also
    raises if the checkpoint is not of a converted model. If the checkpoint has no learned values of
    variants at all, they are the initial ones.

    Args:
        auto_class: a class of transformers, e.g. `AutoModelForCausalLM` or `LlamaForCausalLM`.
        path: a folder, or a name on the Hugging Face hub.
        **kwargs: arguments of the class's own from_pretrained.

    Returns:
        The converted model; with ``output_loading_info=True`` a pair (model, info).

    Raises:
        ValueError: the config has no attnzoo entry, one that this version does not support, or one
            that does not describe the layers in the checkpoint.

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
    location = {name: kwargs[name] for name in LOCATION if name in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config or path, **location)
    check_spec(config)
    loaded = auto_class.from_pretrained(path, **{**_implementation(config), **kwargs})
    _check_complete(loaded[0] if kwargs.get("output_loading_info") else loaded)
    return loaded


def _implementation(config: Any) -> dict[str, str]:
    """The argument that selects attnzoo, unless the config does, which may exclude parts."""
    return {} if config._attn_implementation == NAME else {"attn_implementation": NAME}


def attach_configured(model: Any) -> None:
    """Adds the variants that the config names to the model's layers, with initial values."""
    if getattr(model.config, NAME, None) is None:
        return
    spec = check_spec(model.config)
    entries: dict[str, Any] = {}
    for name, entry in spec["layers"].items():
        # A sub-model is constructed before the whole model and may have only some of the layers.
        names = [n for n in possible_names(model, name) if _has(model, n)]
        entries |= dict.fromkeys(names, entry)
        if not names:
            _check_number(model, name)
    if not entries:
        return
    requested = model.config._attn_implementation
    if requested != NAME:
        raise _not_converted(model, len(entries), requested, "after loading without this argument")
    with torch.device("cpu"):  # initial values are needed even if the model is on meta
        children = {
            name: child_of(entry, dtype_of(model.get_submodule(name)))
            for name, entry in entries.items()
            if NAME not in model.get_submodule(name)._modules
        }
    undo = [restorer(model)]
    with undone(undo):
        attach(model, children, undo)
        # The names in this model, unless it is a part that has not all of them.
        layers = entries if len(entries) == len(spec["layers"]) else spec["layers"]
        write_spec(model.config, {**spec, "layers": layers})


def _not_converted(model: Any, layers: int, requested: Any, when: str) -> ValueError:
    """The error for another attention implementation, which would compute softmax."""
    return ValueError(
        f"attn_implementation must be {NAME!r}, because {layers} layers of {type(model).__name__} "
        f"have variants, got {requested!r}: for softmax call revert(model) {when}".rstrip()
    )


def check_still_converted(parts: list[Any]) -> None:
    """Raises if a part, which had the implementation "attnzoo", has variants but another one."""
    for part in parts:
        inside = sum(NAME in module._modules for module in part.modules())
        # Two halves share a config, and so the implementation.
        named = len((getattr(part.config, NAME, None) or {}).get("layers", ()))
        requested = part.config._attn_implementation
        if requested != NAME and (inside or named):
            raise _not_converted(part, inside or named, requested, "")


def _check_number(model: Any, name: str) -> None:
    """Raises if a layer that the config names lies beyond the last layer of a list."""
    for possible in possible_names(model, name):
        outer = possible.rpartition(".")[0]
        while outer and not _has(model, outer):
            outer = outer.rpartition(".")[0]
        stack = model.get_submodule(outer)
        if isinstance(stack, nn.ModuleList):
            raise ValueError(
                f"config.{NAME} must name layers of the model, got {name!r}, but {outer} of "
                f"{type(model).__name__} has {len(stack)} layers"
            )


def check_loaded_keys(model: Any, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raises if the layers in a checkpoint are not those that the config describes.

    Args:
        model: the loaded model.
        missing: names of the tensors that the checkpoint lacks.
        unexpected: names of the tensors that only the checkpoint has.
    """
    mark = f".{NAME}."
    for key in unexpected:
        layer = key.partition(mark)[0]
        if mark in key and any(_has(model, name) for name in possible_names(model, layer)):
            raise ValueError(
                f"config.{NAME} must describe the layers of the checkpoint, but it does not have "
                f"{key}: save the model with save_pretrained, which writes the config too"
            )
    tensors = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    learned = {name for name in tensors if mark in name}
    absent = learned & set(missing)
    if absent and absent != learned:
        raise ValueError(
            f"the checkpoint must have the learned values of all layers in config.{NAME} or of "
            f"none, but lacks {min(absent)}"
        )
    converted = [name for name, module in model.named_modules() if NAME in module._modules]
    for stack, length in {_stack(model, name) for name in converted}:
        numbers = range(length)
        inside = [{x for x in tensors if x.startswith(f"{stack}.{n}.")} for n in numbers]
        lacking = [n for n in numbers if inside[n] and inside[n] <= set(missing)]
        if lacking and len(lacking) < length:
            raise ValueError(
                f"config must have as many layers as the checkpoint, which has no weights of "
                f"{stack}.{lacking[0]}"
            )


def _stack(model: Any, name: str) -> tuple[str, int]:
    """The name and the length of the outermost list of layers that has a module."""
    names = name.split(".")
    for end in range(1, len(names)):
        outer = model.get_submodule(".".join(names[:end]))
        if isinstance(outer, nn.ModuleList):
            return ".".join(names[:end]), len(outer)
    return "", 0


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
    """Patches methods of `PreTrainedModel` at import; transformers has no hooks for them."""
    post_init, initialize = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys
    save, state_dict = PreTrainedModel.save_pretrained, PreTrainedModel.state_dict
    set_implementation = PreTrainedModel.set_attn_implementation
    check_implementation = PreTrainedModel._check_and_adjust_attn_implementation

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

    @wraps(adjust)
    def with_check(self: Any, loading_info: Any) -> None:
        check_loaded_keys(self, loading_info.missing_keys, loading_info.unexpected_keys)
        adjust(self, loading_info)

    @wraps(save)
    def with_spec(self: Any, *args: Any, **kwargs: Any) -> None:
        if not needs_spec(self):
            return save(self, *args, **kwargs)
        # A part of a model may be saved: its names must not stay in a config that the model shares.
        undo = [] if owns_spec(self) else [restorer(self)]
        try:
            write_specs(self)
            save(self, *args, **kwargs)
        finally:
            for function in undo:
                function()

    @wraps(state_dict)
    def with_present_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The config may be saved beside this state dict. Modules that contain the model call this
        # with their own dict.
        outermost = not args and kwargs.get("destination") is None
        if outermost and needs_spec(self) and owns_spec(self):
            try:
                write_specs(self)
            except ValueError as error:  # the tensors are right, and training may need them
                warnings.warn(
                    f"config.{NAME} does not describe the layers of this state dict: {error}",
                    stacklevel=2,
                )
        return state_dict(self, *args, **kwargs)

    @wraps(check_implementation)
    def with_default(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        # None is the default, which the config sets.
        if attn_implementation is None and getattr(self.config, NAME, None):
            attn_implementation = NAME
        return check_implementation(self, attn_implementation, *args, **kwargs)

    @wraps(set_implementation)
    def only_attnzoo(self: Any, *args: Any, **kwargs: Any) -> None:
        # Transformers calls this too: continuous batching selects flash attention.
        parts = [x for _, x in parts_of(self) if x.config._attn_implementation == NAME]
        with undone([restorer(self)]):
            set_implementation(self, *args, **kwargs)
            check_still_converted(parts)

    PreTrainedModel.post_init = with_variants
    PreTrainedModel.set_attn_implementation = only_attnzoo
    PreTrainedModel._check_and_adjust_attn_implementation = with_default
    PreTrainedModel._initialize_weights = with_initial_values
    PreTrainedModel._adjust_missing_and_unexpected_keys = with_check
    PreTrainedModel.save_pretrained = with_spec
    PreTrainedModel.state_dict = with_present_spec
