"""Checks of arguments that several modules share."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.arguments import ARGUMENTS
from attnzoo.core.checks import DTYPES, did_you_mean, is_dtensor, is_number, plain, shown
from attnzoo.core.parameters import check_names
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Variant
from attnzoo.functional.prepare import autocast_dtype

# Arguments of a call that users may give to a constructor.
CALL_ARGUMENTS = {*ARGUMENTS, "backend", "cache", "need_weights", "dropout"} - {"softcap"}
# Options of an `Attention` that are not parameters of its variant.
OF_ATTENTION = ("learn", "softcap", "given", "head_dim")


def check_like(name: str, x: Tensor, weight: Any) -> None:
    """Raises unless an input has the dtype, after autocast, and the device of a layer's weight."""
    if not isinstance(weight, Tensor) or weight.is_meta:
        return  # a method of a quantized layer, or on meta until an offloaded layer runs
    wanted, actual = autocast_dtype(weight), autocast_dtype(x)
    if actual != wanted and wanted in DTYPES:  # a quantized weight has another dtype
        raise TypeError(f"{name} must have the dtype of the layer, {wanted}, got {actual}")
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the layer's device {weight.device}, got {x.device}")


def check_positional(names: str, others: tuple[Any, ...]) -> None:
    """Raises if forward gets further arguments by position, as functions of torch take them."""
    if others:
        raise TypeError(
            f"forward takes only {names} by position, got {shown(others[0])} besides; pass a mask "
            "as attn_mask=…"
        )


def check_options_of(layer: nn.Module, variant: str, options: Iterable[str]) -> None:
    """Raises if an option of a layer's constructor is an argument of a call, or unknown.

    ``options`` are those that the constructor passes on, to an `Attention` in the end.
    """
    names = inspect.signature(type(layer)).parameters
    for name in options:
        if name in OF_ATTENTION or name in {param.name for param in get_variant(variant).params}:
            continue
        if name not in CALL_ARGUMENTS:
            check_names(get_variant(variant), [name], {*names, *OF_ATTENTION})
        accepted = inspect.signature(layer.forward).parameters
        if name in accepted or ("keywords" in accepted and name != "dropout"):
            hint = f": {name} is an argument of forward"
        else:
            hint = did_you_mean(name, [*names, "dropout_p"] if "keywords" in accepted else names)
        raise TypeError(f"the constructor of {type(layer).__name__} has no argument {name!r}{hint}")


def check_not_of_layers(options: Iterable[str]) -> None:
    """Raises if an option of a new layer is a property of torch's layer that it replaces."""
    fixed = {*inspect.signature(nn.MultiheadAttention).parameters, "num_kv_heads"}
    for name in options:
        if name in fixed:
            raise TypeError(f"{name} must not be given: it is that of the layer that is replaced")


def check_module(name: str, x: Any) -> None:
    if not isinstance(x, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {shown(x)}")


def check_heads(num_heads: int, num_kv_heads: int | None, **sizes: int) -> int:
    """Returns the number of key and value heads. ``sizes`` must be multiples of num_heads."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, size in sizes.items():
        if size % num_heads:
            raise ValueError(f"{name}={size} is not a multiple of num_heads={num_heads}")
    if num_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={kv_heads}")
    return kv_heads


def check_appended(variant: Variant, made: tuple[str, ...], positional: str | None) -> None:
    """Raises if a variant does not support the keys that a layer appends to its inputs.

    ``made`` are the parameters that the layer makes from the hidden states. The appended keys have
    none. They also count as the last keys, so that all queries would stand at later positions;
    ``positional`` is what depends on positions, from `Attention.needs_positions`.
    """
    per_key = [param.name for param in variant.params if param.per_key and param.name in made]
    if per_key:
        name, reason = variant.name, f"the appended keys have no {per_key[0]}"
    elif positional is not None:
        name, reason = positional, "it depends on positions and the appended keys have none"
    else:
        return
    raise ValueError(f"add_bias_kv and add_zero_attn must be False for {name!r}, because {reason}")


def check_cross_attention(
    positional: str | None, layer: str, crossed: bool, hint: str = ""
) -> None:
    """Raises if the queries of a layer see another sequence, and something depends on positions.

    ``positional`` is its name, from `Attention.needs_positions`.
    """
    if crossed and positional is not None:
        raise ValueError(
            f"{positional} does not support the cross-attention of {layer}: positions of queries "
            f"among the keys of another sequence are undefined{hint}"
        )


def check_table_positions(queries: int, keys: int, is_causal: bool, appends: bool) -> None:
    """Raises if the relative positions of the queries and keys of a layer are not known."""
    if appends:
        raise ValueError(
            "relative_bias must be None with add_bias_kv or add_zero_attn: the appended key has no "
            "position"
        )
    if not is_causal and queries != keys:
        raise ValueError(
            f"relative_bias must be None for {queries} queries and {keys} keys without "
            "is_causal=True, which says that the queries are the last tokens"
        )


def check_queries(attend: Any, had: int, options: dict[str, Any]) -> None:
    """Raises if a wrapper needs more or fewer queries per head than the layer's matrix makes."""
    if attend.queries != had:
        made = "one query per head, which" if had == 1 else f"{had} queries per head, which"
        raise ValueError(
            f"wrapper must use {made} the matrix of the layer makes, got "
            f"{options.get('wrapper')!r}, which uses {attend.queries}"
        )


def check_range(
    name: str, value: Any, low: float, high: float = torch.finfo(torch.float32).max
) -> float:
    """The value as a float; raises unless it is a number from ``low`` to ``high``."""
    value = plain(value)
    if not is_number(value):
        raise TypeError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def check_registered(name: str, module: nn.Module, tensors: Iterable[str]) -> None:
    """Raises unless these tensors of a module are its parameters.

    Otherwise a method such as a parametrization computes them, and changes of them would be lost.
    """
    for tensor in tensors:
        if module._parameters.get(tensor) is None:
            raise ValueError(
                f"{name} must have a plain parameter {tensor}, got a {type(module).__name__} that "
                "is pruned, parametrized, flattened or with an adapter"
            )


def check_plain_layer(name: str, layer: nn.MultiheadAttention) -> None:
    """Raises unless a layer of torch does what its class does, with parameters of its own.

    A layer of attnzoo in its place would not do what hooks, parametrizations, adapters, subclasses
    and the like do.
    """
    packed = ("in_proj_weight",)
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    expected = {"out_proj.weight", *(packed if layer._qkv_same_embed_dim else separate)}
    if layer.in_proj_bias is not None:
        expected |= {"in_proj_bias", "out_proj.bias"}
    if layer.bias_k is not None:
        expected |= {"bias_k", "bias_v"}
    tensors = dict(layer.named_parameters())
    names = {*tensors, *(buffer for buffer, _ in layer.named_buffers())}
    if names != expected:
        differing = ", ".join(sorted(names ^ expected))
        reason = f"pruned, parametrized or with an adapter: its tensors differ in {differing}"
    elif any(is_dtensor(x) for x in tensors.values()):
        reason = "sharded: call replace before fully_shard"
    elif type(layer) is not nn.MultiheadAttention:
        reason = f"of the subclass {type(layer).__name__}"
    elif any(hooks for key, hooks in vars(layer).items() if key.endswith("_hooks")):
        reason = "with hooks, which would be lost: remove them first"
    elif "forward" in vars(layer):
        reason = "with another forward, which would be lost"
    elif layer._compiled_call_impl is not None:
        reason = "compiled: call replace before compile"
    else:
        return
    raise ValueError(f"{name} must be a plain torch.nn.MultiheadAttention, got one {reason}")
