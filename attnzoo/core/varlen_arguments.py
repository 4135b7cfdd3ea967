"""Validates the arguments of `varlen_attention` that `attention` does not have."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.checks import DTYPES, check_bool, check_dense, is_int, is_readable, plain, shown
from attnzoo.core.registry import get_variant


def check_tokens(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise unless query, key and value are (Tq, H, D), (Tk, Hkv, D) and (Tk, Hkv, Dv)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have shape (T, H, D), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name} must be on query's device {query.device}, got {x.device}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads == 0 or query.shape[2] == 0:
        raise ValueError(
            f"query must have at least one head and head dimension 1, got {tuple(query.shape)}"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key must have query's head dimension {query.shape[2]}, got {tuple(key.shape)}"
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"value must have as many tokens and heads as key, {tuple(key.shape[:2])}, got "
            f"{tuple(value.shape)}"
        )
    if heads != kv_heads and not check_bool("enable_gqa", enable_gqa):
        raise ValueError(
            f"key must have as many heads as query, {heads}, got {kv_heads}; enable_gqa=True lets "
            "groups of query heads share a key/value head"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"key must have a number of heads that divides query's, {heads}, got {kv_heads}"
        )


def check_longest(name: str, value: Any) -> int:
    value = plain(value)
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {shown(value)}")
    return value


def check_ends(name: str, ends: Tensor, of: str, x: Tensor, longest: int) -> list[int] | None:
    """Validate cu_seq_q or cu_seq_k. Return the lengths, or None if they cannot be read.

    Args:
        name: "cu_seq_q" or "cu_seq_k".
        of: The name of the tensor that is cut at ``ends``.
        x: That tensor.
        longest: The value of max_q or max_k.
    """
    check_dense(name, ends)
    if ends.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ends.dtype}")
    if ends.dim() != 1 or len(ends) == 0:
        raise ValueError(
            f"{name} must have shape (S + 1,) for S sequences, got {tuple(ends.shape)}"
        )
    if ends.device != x.device:
        raise ValueError(f"{name} must be on {of}'s device {x.device}, got {ends.device}")
    most = f"max_{name[-1]}"
    if not (is_readable(ends) and is_readable(x)):
        if (len(ends) - 1) * longest < len(x):
            raise ValueError(
                f"{most} must be at least the length of the longest sequence; {longest} is too "
                f"small for {len(x)} tokens in {len(ends) - 1} sequences"
            )
        return None
    values = ends.tolist()
    lengths = [stop - start for start, stop in pairwise(values)]
    if values[0] != 0:
        raise ValueError(f"{name} must start with 0, got {values[0]}")
    if any(length < 0 for length in lengths):
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"{name} must not decrease, got {values[at]} and then {values[at + 1]} at {at + 1}"
        )
    if values[-1] != len(x):
        raise ValueError(
            f"{name} must end with the number of tokens of {of}, {len(x)}, got {values[-1]}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"{most} must be at least the length of the longest sequence, {max(lengths)}, got "
            f"{longest}"
        )
    return lengths


def with_batch(
    variant: str, params: dict[str, Any], query: Tensor, key: Tensor
) -> tuple[dict[str, Any], set[str], set[str]]:
    """The parameters for a batch of one row, and the names of those per query and per key.

    Tensors (H, Tq) and (H, Tk) become (1, H, Tq) and (1, H, Tk).
    """
    found, of_queries, of_keys = dict(params), set(), set()
    for param in get_variant(variant).params:
        value = params.get(param.name)
        if not isinstance(value, Tensor) or value.dim() < 2 or param.kind != "per_head":
            continue
        heads, shapes = query.shape[1], ["()", f"({query.shape[1]},)"]
        for accepted, names, tokens in (
            (param.per_token, of_queries, len(query)),
            (param.per_key, of_keys, len(key)),
        ):
            shapes += [f"({heads}, {tokens})"] if accepted else []
            if accepted and value.shape == (heads, tokens):
                names.add(param.name)
        if param.name not in of_queries | of_keys:
            raise ValueError(
                f"{variant}'s {param.name} must have shape {' or '.join(shapes)}, got "
                f"{tuple(value.shape)}"
            )
        found[param.name] = value[None]
    return found, of_queries, of_keys
