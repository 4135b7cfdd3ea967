"""The registry of variants, both shipped and registered by users."""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch

from attnzoo.core.arguments import ARGUMENTS
from attnzoo.core.checks import (
    check_callable,
    check_type,
    did_you_mean,
    is_finite,
    is_number,
    shown,
)
from attnzoo.core.parameters import check_value
from attnzoo.core.variant import REQUIRED, Param, Projection, Variant

# Names that a variant's parameter may not have: arguments of functions, modules and wrappers that
# accept parameters, and attributes of modules that own them. `bias` is an exception for sigmoid.
RESERVED = ARGUMENTS | frozenset(
    "self q k v call variant state cache backend num_heads head_dim learn learned training "
    "scores dim mask input logits target linear_weight linear_bias class_mask softcap weight "
    "label_smoothing lse_penalty ignore_index reduction return_stats in_features num_classes "
    "device dtype output given projected projections query key value cu_seq_q cu_seq_k max_q "
    "max_k seqused_k block_table window_size return_aux num_splits mesh method layout need_weights "
    "gate embed_dim dropout kdim vdim batch_first add_bias_kv add_zero_attn num_kv_heads wrapper "
    "layer vocab_size depth positions mlp_dim rope_base rope_scaling rope_share output_params "
    "qk_norm layer_scale qk_dim v_dim key_dim components mix per hidden clamp gated activation "
    "norm model layers start calibrate inputs warn temperature max_logits needs_positions "
    "new_cache parameter_tensors queries reset_parameters settings shard_heads shards_heads "
    "sharding uses_hidden_states bias_start has_zeros log_prob loss predict shard_classes "
    "shards_classes".split()
)

KINDS = ("per_head", "tensor", "int", "float", "bool", "str")
_VARIANTS: dict[str, Variant] = {}
_MODULES: dict[str, str] = {}  # the module that registered a variant, by the variant's name


def register_variant(variant: Variant) -> Variant:
    """Register a variant under its name, for use in the whole library.

    Args:
        variant: A `Variant`. Its parameters must not have the names of arguments of `attention`.

    Returns:
        The variant.

    Raises:
        TypeError: A field has a wrong type, or a function does not accept the arguments that the
            library passes.
        ValueError: The name is taken or is not an identifier, the name of a parameter is reserved,
            or a default is out of range.

    Example:
        >>> import attnzoo
        >>> def weights(q, k, call):  # ReLU attention, Wortsman et al. 2023, arXiv:2309.08586
        ...     s = (call.scores(q, k) + call.bias).relu() / call.counts.clamp(min=1)[..., None]
        ...     return s.masked_fill(~call.visible, 0.0)
        >>> relu = attnzoo.Variant("relu_n", "ReLU(z)/n", "arXiv:2309.08586", weights,
        ...                        normalized=False)
        >>> attnzoo.register_variant(relu).name
        'relu_n'
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be an attnzoo.Variant, got {type(variant).__name__}")
    _check_name("variant name", variant.name)
    if variant.name in _VARIANTS:
        raise ValueError(f"variant name {variant.name!r} is taken")
    params = variant.params
    if not isinstance(params, tuple) or not all(isinstance(x, Param) for x in params):
        raise TypeError(
            f"variant {variant.name!r}: params must be a tuple of Param, got {shown(params)}"
        )
    names = [param.name for param in variant.params]
    if len(set(names)) < len(names):
        raise ValueError(
            f"variant {variant.name!r}: params must have distinct names, got {', '.join(names)}"
        )
    for param in variant.params:
        _check_name(f"variant {variant.name!r}: parameter name", param.name)
        if param.name in RESERVED or hasattr(torch.nn.Module, param.name):
            raise ValueError(
                f"variant {variant.name!r}: parameter {param.name!r} must not have a reserved "
                f"name ({', '.join(sorted(RESERVED))}) or the name of a torch.nn.Module attribute"
            )
        _check_param(f"variant {variant.name!r}: parameter {param.name!r}", param)
    if len(sinks := [param.name for param in variant.params if param.host_sink]) > 1:
        raise ValueError(
            f"variant {variant.name!r}: one parameter at most may have host_sink, got "
            f"{', '.join(sinks)}"
        )
    _check_fields(variant)
    _VARIANTS[variant.name] = variant
    _MODULES[variant.name] = sys._getframe(1).f_globals.get("__name__", "")
    return variant


def remove_variants(module: str) -> None:
    """Remove the variants that a module has registered, because it failed."""
    for name in [name for name in _VARIANTS if _MODULES.get(name) == module]:
        del _VARIANTS[name]


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {shown(name)}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{what} must be an identifier, got {shown(name)}")


def _check_param(what: str, param: Param) -> None:
    if param.kind not in KINDS:
        raise ValueError(
            f"{what}: kind must be one of {', '.join(map(repr, KINDS))}, got {shown(param.kind)}"
        )
    check_callable(f"{what}: check", param.check, optional=True)
    for field in ("doc", "allowed"):
        check_type(f"{what}: {field}", getattr(param, field), str)
    for field in ("per_token", "per_key", "host_sink"):
        check_type(f"{what}: {field}", getattr(param, field), bool)
    _check_shapes(what, param)
    for field in ("per_token", "per_key", "host_sink", "between"):
        if param.kind != "per_head" and getattr(param, field) not in (None, False):
            raise ValueError(f"{what}: {field} requires kind 'per_head', got kind {param.kind!r}")
    if param.kind in ("per_head", "tensor") and param.in_eval is not None:
        raise ValueError(f"{what}: in_eval must be None for kind {param.kind!r}")
    # A default or an initial value cannot be a tensor, so its error must not suggest one.
    number = replace(param, kind="float") if param.kind == "per_head" else param
    if param.default is not REQUIRED and param.default is not None:
        check_value(f"{what}: default", number, param.default)
    if param.kind == "tensor" and param.init is not None:
        _check_function(f"{what}: init", cast(Any, param.init), ("D",), ())
    elif param.init is not None:
        if param.kind != "per_head":
            raise ValueError(
                f"{what}: init requires kind 'per_head' or 'tensor', got kind {param.kind!r}"
            )
        check_value(f"{what}: init", number, param.init, torch.float32)
    if param.in_eval is not None:
        check_value(f"{what}: in_eval", param, param.in_eval)
    if param.between is None:
        return
    ends = param.between
    if not isinstance(ends, tuple) or len(ends) != 2 or not all(map(is_number, ends)):
        raise TypeError(f"{what}: between must be a pair of numbers, got {shown(ends)}")
    if not ends[0] < ends[1] or not any(map(is_finite, ends)):
        raise ValueError(
            f"{what}: between must be (low, high) with low < high, of which one may be infinite, "
            f"got {shown(ends)}"
        )
    if param.init is not None and not ends[0] < cast(float, param.init) < ends[1]:
        raise ValueError(f"{what}: init must lie inside {ends}, got {shown(param.init)}")


def _check_shapes(what: str, param: Param) -> None:
    if param.per_token and param.per_key:
        raise ValueError(f"{what}: per_token and per_key must not both be True")
    if (param.kind == "tensor") != (param.size is not None):
        raise ValueError(f"{what}: size must be given for kind 'tensor', and only for it")
    if param.size is not None:
        _check_function(f"{what}: size", param.size, ("D",), ())
    if param.kind == "tensor" and param.default not in (REQUIRED, None):
        raise ValueError(f"{what}: default must be REQUIRED or None for kind 'tensor'")
    if param.projection is None:
        return
    check_type(f"{what}: projection", param.projection, Projection)
    if not (param.per_token or param.per_key):
        raise ValueError(f"{what}: projection requires per_token or per_key")


def _check_fields(variant: Variant) -> None:
    what = f"variant {variant.name!r}"
    for field in ("formula", "paper", "use"):
        check_type(f"{what}: {field}", getattr(variant, field), str)
    flags = (
        "normalized", "signed", "has_logits", "positional", "absolute", "length_gain",
        "inference_only",
    )  # fmt: skip
    for field in flags:
        check_type(f"{what}: {field}", getattr(variant, field), bool)
    if not isinstance(variant.aliases, tuple) or not all(
        isinstance(alias, str) for alias in variant.aliases
    ):
        raise TypeError(f"{what}: aliases must be a tuple of str, got {shown(variant.aliases)}")
    names = [param.name for param in variant.params]
    for field in ("identity", "output_defaults"):
        if (values := getattr(variant, field)) is None:
            continue
        check_type(f"{what}: {field}", values, dict)
        if not set(values) <= set(names):
            raise ValueError(
                f"{what}: {field} must name parameters ({', '.join(names) or 'none'}), got "
                f"{shown(values)}"
            )
    dense = ("q", "k", "call")
    if variant.weights is None and variant.scores is None:
        raise TypeError(f"{what}: weights or scores must be given")
    if variant.scores is not None:
        _check_function(f"{what}: scores", variant.scores, dense, names)
    _check_function(f"{what}: weights", variant.weights, dense, names)
    _check_function(f"{what}: forms", variant.forms, ("call",), names)
    _check_function(f"{what}: unsupported", variant.unsupported, ("call",), names)
    _check_function(f"{what}: has_state", variant.has_state, (), names)
    for field, argument in (
        ("calibrate", "log_n"), ("output_bias", "classes"), ("example", "length"),
    ):  # fmt: skip
        if (function := getattr(variant, field)) is not None:
            _check_function(f"{what}: {field}", function, (argument,), ())


def _check_function(
    what: str, function: Callable[..., Any], positional: tuple[str, ...], names: Iterable[str]
) -> None:
    """Raise unless the function can be called as the library will call it."""
    call = ", ".join([*positional, *(f"{name}=…" for name in names)])
    if not callable(function):
        raise TypeError(f"{what} must be a function of ({call}), got {shown(function)}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return
    try:
        signature.bind(*positional, **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"{what} must be a function of ({call}), got {signature}: {error}"
        ) from None


def get_variant(name: str) -> Variant:
    """The variant with this name.

    Args:
        name: A name from `list_variants`.

    Returns:
        The `Variant`.

    Raises:
        ValueError: There is no such variant.
        TypeError: The name is not a str.

    Example:
        >>> import attnzoo
        >>> attnzoo.get_variant("ssmax").paper
        'Nakanishi 2025, arXiv:2501.19399'
    """
    if not isinstance(name, str):
        # The next argument of torch's function is a mask or the weights of classes.
        hint = (
            "; pass a mask or weights by name, such as attn_mask=…"
            if isinstance(name, torch.Tensor)
            else ""
        )
        raise TypeError(f"variant must be a name from list_variants(), got {shown(name)}{hint}")
    if name not in _VARIANTS:
        known = list_variants()
        # A list of all names would hide a suggestion.
        if alias := _called(name):
            hint = f"; did you mean {alias!r}? attnzoo.list_variants() has all names"
        else:
            if hint := did_you_mean(name, known):
                hint += " attnzoo.list_variants() has all names"
            hint = hint or "; known: " + ", ".join(known)
            hint += "; attnzoo.load_plugin(file) registers the variants of a file"
        # Tables of the evals print a variant with its parameters in brackets.
        if "(" in name:
            hint += "; parameters are separate arguments, not part of the name"
        raise ValueError(f"unknown variant {shown(name)}{hint}")
    return _VARIANTS[name]


def _called(alias: str) -> str | None:
    """The variant that has this name in a paper."""
    wanted = _letters(alias)
    for name, variant in sorted(_VARIANTS.items()):
        if any(_letters(one) == wanted for one in (name, *variant.aliases)):
            return name
    return None


def _letters(name: str) -> str:
    """A name without case, spaces and punctuation, and without "attention" at its end."""
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    return letters.removesuffix("attention")


def list_variants() -> list[str]:
    """The names of all registered variants, sorted.

    Returns:
        A list of str: those of attnzoo and your own.

    Example:
        >>> import attnzoo
        >>> "softmax" in attnzoo.list_variants()
        True
    """
    return sorted(_VARIANTS)
