"""from_pretrained() and from_config(): converted models from what save_pretrained has written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnzoo.integrations.transformers.convert import VERSION, attach, spellings
from attnzoo.integrations.transformers.interface import NAME
from attnzoo.nn import Attention

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
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
    spec = checked(config)
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    return _converted(make(config), spec)


def from_pretrained(auto_class: Any, path: Any, **kwargs: Any) -> Any:
    """A converted model as `save_pretrained` has written it: variants, layers, learned values.

    What a checkpoint does not hold of them has its documented initial value.

    Args:
        auto_class: `transformers.AutoModelForCausalLM`, say, or a model's own class.
        path: a folder, or a name on the hub.
        **kwargs: for the class's own from_pretrained.

    Raises:
        ValueError: if its config says nothing of attnzoo, or what this version does not know.
    """
    from transformers import AutoConfig

    for name in ("output_loading_info", "variant"):
        if kwargs.get(name):
            raise ValueError(f"{name} is not supported here, got {kwargs[name]!r}")
    where = {name: kwargs[name] for name in WHERE if name in kwargs}
    config = kwargs.get("config")
    if config is None or isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config or path, **where)
    spec = checked(config)
    # What the class itself does not know of it leaves out, and says so.
    model = _converted(auto_class.from_pretrained(path, **kwargs), spec)
    own = {name: x for name, x in model.state_dict().items() if f".{NAME}." in name}
    found = {}
    for name, tensor in stored(path, where):
        for fitting in spellings(model, name):
            if fitting in own:
                found[fitting] = tensor
    model.load_state_dict(found, strict=False)
    return model


def checked(config: Any) -> dict[str, Any]:
    """The spec of a config, if all of it is known."""
    spec = getattr(config, NAME, None)
    if not spec:
        raise ValueError(
            f"config has no {NAME!r}: it is of no converted model. Load it with its own class and "
            "convert() it"
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


def _converted(model: Any, spec: dict[str, Any]) -> Any:
    made = {}
    for name, entry in spec["layers"].items():
        fitting = [n for n in spellings(model, name) if _has(model, n)]
        if not fitting:
            raise ValueError(f"config.{NAME}: {type(model).__name__} has no module {name!r}")
        params = {
            key: torch.tensor(value) if isinstance(value, list) else value
            for key, value in entry["params"].items()
        }
        made[fitting[0]] = Attention(
            entry["variant"], entry["num_heads"], learn=entry.get("learn"), **params
        )
    attach(model, made)
    layers = dict(zip(made, spec["layers"].values()))
    setattr(model.config, NAME, {**spec, "layers": layers})
    return model


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def stored(path: Any, where: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of attnzoo, in one file or in shards."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    given: dict[str, Any] = {**where, "_raise_exceptions_for_missing_entries": False}
    if index := cached_file(path, INDEX, **given):
        with open(index) as file:
            shards: dict[str, str] = json.load(file)["weight_map"]
        names = sorted({shard for key, shard in shards.items() if f".{NAME}." in key})
        files = [cached_file(path, name, **where) for name in names]
    elif (whole := cached_file(path, WHOLE, **given)) is not None:
        files = [whole]
    else:
        raise ValueError(f"{path} has no {WHOLE}: save it as safetensors")
    for name in filter(None, files):
        with safe_open(name, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if f".{NAME}." in key:
                    yield key, tensors.get_tensor(key)
