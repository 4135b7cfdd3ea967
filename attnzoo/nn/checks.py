"""Checks of arguments that several modules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attnzoo.core.checks import DTYPES, shown
from attnzoo.core.variant import Variant


def check_module(name: str, x: Any) -> None:
    if not isinstance(x, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {shown(x)}")


def check_dtype(dtype: Any) -> None:
    """Raises unless ``dtype`` is None or a dtype that parameters can have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise TypeError(f"dtype must be fp16, bf16, fp32 or fp64, got {shown(dtype)}")


def check_heads(num_heads: int, num_kv_heads: int | None, **sizes: int) -> int:
    """Returns the number of key and value heads. ``sizes`` must be multiples of num_heads."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, size in sizes.items():
        if size % num_heads:
            raise ValueError(f"{name}={size} is not a multiple of num_heads={num_heads}")
    if num_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={kv_heads}")
    return kv_heads


def check_appended(variant: Variant, made: tuple[str, ...]) -> None:
    """Raises if a variant does not support the keys that a layer appends to its inputs.

    ``made`` are the parameters that the layer makes from the hidden states. The appended keys have
    none. They also count as the last keys, so that all queries would stand at later positions.
    """
    per_key = [param.name for param in variant.params if param.per_key and param.name in made]
    if per_key:
        reason = f"the appended keys have no {per_key[0]}"
    elif variant.by_position:
        reason = "its weights depend on positions and the appended keys have none"
    else:
        return
    raise ValueError(
        f"add_bias_kv and add_zero_attn must be False for {variant.name!r}, because {reason}"
    )
