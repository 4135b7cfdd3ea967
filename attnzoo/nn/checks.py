"""Checks of arguments that several modules share."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnzoo.core.checks import shown


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
