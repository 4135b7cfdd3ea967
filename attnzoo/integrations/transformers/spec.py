"""The attnzoo entry of a config, which describes the converted layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.core.checks import is_int, plain
from attnzoo.core.registry import get_variant, list_variants
from attnzoo.integrations.transformers.interface import HOST, ObservedCall
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.modules import implementations, parts_of
from attnzoo.integrations.transformers.wrapped import inner, new_child
from attnzoo.nn import WRAPPERS, Attention, Wrapper
from attnzoo.nn.projections import PROJECTED

VERSION = 1
# Required keys of a layer's entry in the spec, and their types.
ENTRY = {"variant": str, "num_heads": int, "params": dict}
OPTIONS = ("learn", "given", "softcap", "head_dim")  # optional keys, arguments of `Attention`
WRAPPER = {
    "name": str, "arguments": dict, "embed_dim": int, "qk_dim": int, "v_dim": int, "layer": int,
}  # fmt: skip  # keys of the optional entry "wrapper"
# Parts of module names that torch adds when it wraps a module.
ADDED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
# Wrappers of a child that do not change the names of its tensors in a state dict
WRAPPING = ("original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # PEFT, torch
# Attributes that a child may change without changing what it computes.
FREE = ("training", "num_heads")  # shard_heads divides num_heads


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
        if unknown := sorted(set(entry) - {*ENTRY, *OPTIONS, "wrapper", "embed_dim"}):
            raise ValueError(f"config.{NAME}: layer {name!r} has unknown entries: {unknown}")
        wrapper, size = entry.get("wrapper"), entry.get("embed_dim")
        if PROJECTED in entry["params"].values() and wrapper is None and not is_int(size):
            raise ValueError(
                f"config.{NAME}: layer {name!r} must have embed_dim of type int, because it makes "
                f"parameters from the hidden states, got {size!r}"
            )
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


def possible_names(model: Any, name: str) -> Iterator[str]:
    """A module name with and without the prefix of the base model, e.g. "model."."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix)
    yield prefix + name


# ---- entries and children ---------------------------------------------------------------------


def new_entry(
    child: Attention | Wrapper,
    call: ObservedCall,
    params: Mapping[str, Any],
    wrapper: Mapping[str, Any] | None,
    embed_dim: int,
) -> dict[str, Any]:
    """The entry of a new child; ``params`` are those given to it."""
    attention = inner(child)
    specs = get_variant(attention.variant).params
    matrices = any(x.kind == "tensor" and x.name in attention.learned for x in specs)
    projected = tuple(attention.projections or ())
    return {
        "variant": child.variant,
        "num_heads": child.num_heads,
        "learn": list(attention.learned),
        "given": [name for name in attention.given if name not in projected],
        "softcap": child.softcap,
        "params": {
            **{name: _json(value) for name, value in params.items()},
            **dict.fromkeys(projected, PROJECTED),
        },
        **({"embed_dim": embed_dim} if projected and wrapper is None else {}),
        **({"head_dim": call.qk_dim} if matrices else {}),
        **({} if wrapper is None else {"wrapper": dict(wrapper)}),
    }


def child_of(entry: dict[str, Any], dtype: torch.dtype) -> Attention | Wrapper:
    """The child that an entry describes, with initial values in the dtype. It keeps the entry."""
    params: dict[str, Any] = {
        key: _stored(value) if isinstance(value, list) else value
        for key, value in entry["params"].items()
    }
    options = {name: entry[name] for name in OPTIONS if name in entry}
    wrapper = entry.get("wrapper")
    child = new_child(
        entry["variant"], entry["num_heads"], wrapper, {**options, **params}, dtype,
        entry.get("embed_dim"),
    )  # fmt: skip
    return keep_entry(child, entry)


def keep_entry(child: Attention | Wrapper, entry: dict[str, Any]) -> Attention | Wrapper:
    """The child, which carries its entry wherever its layer is copied or moved to."""
    child.spec_entry = entry  # pyright: ignore
    return child


def present_entry(name: str, child: Any) -> dict[str, Any]:
    """The entry of a child with its present settings.

    Raises:
        ValueError: a child made from this entry would not be the same.
    """
    for key in WRAPPING:
        child = child._modules.get(key, child)
    if "_orig_mod" in child._modules:
        raise _not_saved(name, "a compiled child: compile it in place, with its method compile()")
    entry = getattr(child, "spec_entry", None)
    if entry is None:
        raise _not_saved(name, "a child that convert() did not make")
    attention = inner(child)
    params, learn = dict(entry["params"]), list(entry.get("learn", attention.learned))
    for spec in get_variant(attention.variant).params:
        if spec.name in attention.given:
            continue
        value = getattr(attention, spec.name)
        in_checkpoint = spec.name in {**attention._parameters, **attention._buffers}
        if spec.name in attention.learned:
            if not isinstance(value, Tensor):
                raise _not_saved(name, f"{spec.name}={value!r}, but learns {spec.name}")
        elif not isinstance(value, Tensor):
            if spec.name in params or value != spec.default:
                params[spec.name] = plain(value)
        elif not in_checkpoint:
            raise _not_saved(name, f"a tensor {spec.name} that is neither parameter nor buffer")
        elif type(value) in (Tensor, nn.Parameter) and not value.is_meta:
            params[spec.name] = value.tolist()
        if spec.name in attention._parameters and spec.name not in learn:
            learn.append(spec.name)
    entry = {**entry, "params": params, "learn": learn}
    if wrapper := entry.get("wrapper"):
        possible = WRAPPERS[wrapper["name"]].own_arguments()
        arguments = {x: plain(vars(child)[x]) for x in possible if x in vars(child)}
        entry["wrapper"] = {**wrapper, "arguments": {**wrapper["arguments"], **arguments}}
    _check_equal(name, child, entry)
    return entry


def _check_equal(name: str, child: Any, entry: dict[str, Any]) -> None:
    """Raises if a child made from the entry has other settings or fewer tensors."""
    with torch.random.fork_rng(devices=()), torch.device("cpu"):  # initial values may be random
        new = child_of(entry, torch.float64)
    for current, other in ((child, new), (inner(child), inner(new))):
        for key, value in vars(other).items():
            if key in FREE or key.startswith("_") or key == "learned":
                continue
            present = vars(current).get(key, "nothing")
            if isinstance(value, (int, float, str, tuple, type(None))) and present != value:
                raise _not_saved(name, f"{key}={present!r} instead of {value!r}")
    if more := sorted(_tensors(child) - _tensors(new)):
        raise _not_saved(name, f"tensors that are new: {', '.join(more)}")


def _tensors(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _not_saved(name: str, has: str) -> ValueError:
    return ValueError(
        f"convert(model, variant, layers=[{name!r}]) must be called before saving: the layer was "
        f"changed by hand and has {has}"
    )


def _json(value: Any) -> Any:
    return value.detach().tolist() if isinstance(value, Tensor) else plain(value)


def _stored(values: list[Any]) -> Tensor:
    """A tensor of the spec in fp32, or in fp64 if fp32 would round it.

    Without a dtype it would have the dtype of the model that transformers is loading.
    """
    exact = torch.tensor(values, dtype=torch.float64)
    single = exact.float()
    return single if torch.equal(single.double(), exact) else exact


# ---- the specs of a model's configs -----------------------------------------------------------


def plain_names(model: Any) -> dict[str, nn.Module]:
    """All modules of a model by name, without what wrappers of torch add to names."""
    return {
        ".".join(x for x in name.split(".") if x not in ADDED): module
        for name, module in model.named_modules(remove_duplicate=False)
    }


def former_implementations(model: Any) -> dict[int, dict[str, str | None]]:
    """The attention implementations of each part of a model, by the id of its config."""
    return {
        # A model that was made with the name "attnzoo" computes nothing without a conversion.
        id(part.config): {k: "eager" if x == NAME else x for k, x in implementations(part).items()}
        for _, part in parts_of(model)
    }


def write_specs(model: Any, before: Mapping[int, dict[str, str | None]] | None = None) -> None:
    """Writes the layers that are converted now into all configs of a model.

    Args:
        model: the model.
        before: what `former_implementations` returned before the conversion. The configs of a model
            that was converted earlier know it.

    Raises:
        ValueError: a layer was changed by hand, such that its entry cannot describe it.
    """
    layers = {
        name: present_entry(name, module._modules[NAME])
        for name, module in plain_names(model).items()
        if NAME in module._modules
    }
    parts = {
        name: part for name, part in plain_names(model).items() if isinstance(part, PreTrainedModel)
    }
    outer = [  # the parts that are not inside another one with the same config
        (name, part) for name, part in parts.items()
        if not any(_inside(name, x) and y.config is part.config for x, y in parts.items())
    ]  # fmt: skip
    specs: dict[int, tuple[Any, list[Any]]] = {}
    for prefix, part in outer:
        inside = {n.removeprefix(f"{prefix}."): e for n, e in layers.items() if _inside(n, prefix)}
        spec = getattr(part.config, NAME, None)
        former = spec.get("before", {}) if spec else (before or {}).get(id(part.config), {})
        described = {"version": VERSION, "before": former, "layers": inside}
        specs.setdefault(id(part.config), (part.config, []))[1].append(described)
    for config, (first, *others) in specs.values():
        # Parts that share a config and differ are described by the config of the model.
        if first["layers"] and all(other["layers"] == first["layers"] for other in others):
            write_spec(config, first)
        else:
            clear_spec(config)


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def write_spec(config: Any, spec: dict[str, Any]) -> None:
    """Writes the variants of the layers into a config.

    ``attn_implementation``, unlike ``_attn_implementation``, is saved, and transformers reads it
    when it loads the config. A process that has not imported this package then gets an error.
    """
    setattr(config, NAME, spec)
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    others = {key: x._attn_implementation for key, x in parts.items() if x is not None}
    same = all(value == NAME for value in others.values())
    config.attn_implementation = NAME if same else {"": NAME, **others}


def clear_spec(config: Any) -> None:
    """Removes what `write_spec` wrote."""
    for name in (NAME, "attn_implementation"):
        config.__dict__.pop(name, None)


def needs_spec(model: Any) -> bool:
    """Whether a model has converted layers, or had them when its config was written.

    A model that was not converted may share the config of one that was. It has no mark.
    """
    return any(
        NAME in module._modules
        or (
            isinstance(module, PreTrainedModel)
            and HOST in vars(module)
            and getattr(module.config, NAME, None)
        )
        for module in model.modules()
    )


def owns_spec(model: Any) -> bool:
    """Whether the names in the spec are those of this model, not of one that contains it."""
    spec = getattr(model.config, NAME, None)
    return not spec or not plain_names(model).keys().isdisjoint(spec["layers"])
