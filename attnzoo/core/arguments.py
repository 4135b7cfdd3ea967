"""Validates the arguments of `attention` and makes a `Call`; errors name the wrong argument."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.call import Call, score_dtype
from attnzoo.core.checks import (
    DTYPES,
    broadcasts,
    check_bool,
    check_dense,
    check_probability,
    is_finite,
    is_int,
    is_number,
    plain,
    shown,
)
from attnzoo.core.relative_bias import as_values, check_relative_bias

ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Window = int | tuple[int, int] | None
Segments = Tensor | tuple[Tensor, Tensor] | None


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window = None,
    alibi: Tensor | None = None,
    relative_bias: Tensor | None = None,
    segment_ids: Segments = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Call:
    """Validate the common arguments, without reading values on a GPU, and make the `Call`."""
    check_tensors("B, H, N, D", {"q": q, "k": k, "v": v})
    _check_shapes(q, k, v)
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    check_heads(("q", "k"), heads, kv_heads, enable_gqa)
    is_causal, return_lse = check_bool("is_causal", is_causal), check_bool("return_lse", return_lse)
    return_max_logits = check_bool("return_max_logits", return_max_logits)
    dtype = score_dtype(q)
    left, right = _bounds(window, is_causal)
    # A bound beyond all keys has no effect. Dropping it keeps sums of positions within int64.
    left = None if left is None or left >= keys + queries else left
    right = None if right is None or right >= keys + queries > 0 else right
    return Call(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=v.shape[-1],
        scale=check_scale(scale, head_dim, dtype),
        dtype=dtype,
        input_dtype=q.dtype,
        device=q.device,
        query_origin=keys - queries,
        softcap=check_softcap(softcap, dtype),
        left=left,
        right=right,
        mask=_mask(attn_mask, (batch, heads, queries, keys), q, dtype),
        relative_bias=check_relative_bias(alibi, relative_bias, heads, q, dtype),
        segments=_segments(segment_ids, batch, queries, keys, q.device),
        dropout_p=check_probability("dropout_p", dropout_p),
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )


def layout_tensors(tensors: dict[str, Tensor], call: Call) -> dict[str, Any]:
    """The `Call` fields of mask, relative bias and segments, whose shapes and dtypes are valid."""
    fields: dict[str, Any] = {}
    if (mask := tensors.get("attn_mask")) is not None:
        fields["mask"] = _as_mask(mask, call.keys)
    for name in ("alibi", "relative_bias"):
        if (values := tensors.get(name)) is not None:
            fields["relative_bias"] = as_values(name, values, call.dtype)
    if (ids := tensors.get("segment_ids")) is not None:
        fields["segments"] = (ids.long(),) * 2  # one tensor, as from `_segments`
    return fields


# The names of the arguments that are common to all variants, except q, k, v and backend.
ARGUMENTS = frozenset(signature(check_call).parameters) - frozenset("qkv")


def check_tensors(axes: str, tensors: dict[str, Tensor]) -> None:
    """Raise unless all tensors have these axes, and the first one's dtype and device.

    Args:
        axes: The names of the axes, such as "B, H, N, D". The second one is of heads.
        tensors: The queries first, by the names of the arguments.
    """
    (first, like), *_ = tensors.items()
    dims = len(axes.split(", "))
    for name, x in tensors.items():
        check_dense(name, x)
        if x.dim() != dims:
            raise ValueError(f"{name} must have shape ({axes}), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.dtype != like.dtype:
            raise TypeError(f"{name} must have {first}'s dtype {like.dtype}, got {x.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name} must be on {first}'s device {like.device}, got {x.device}")
    if like.shape[-1] == 0:
        raise ValueError(
            f"{first} must have a head dimension of at least 1, got {tuple(like.shape)}"
        )
    if like.shape[1] == 0:
        raise ValueError(f"{first} must have at least one head, got {tuple(like.shape)}")


def check_heads(names: tuple[str, str], heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Raise unless each key/value head belongs to one query head, or to a group with GQA.

    Args:
        names: The names of the queries and of the keys.
    """
    q, k = names
    if not check_bool("enable_gqa", enable_gqa) and heads != kv_heads:
        raise ValueError(
            f"{q} and {k} must have the same number of heads, got {heads} and {kv_heads}; "
            "enable_gqa=True lets groups of query heads share a key/value head"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{q}'s heads must be a multiple of {k}'s with enable_gqa, got {heads} and {kv_heads}"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k must be (B, Hkv, Nk, D) with q's B={q.shape[0]} and D={q.shape[-1]}, "
            f"got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be (B, Hkv, Nk, Dv) with (B, Hkv, Nk) = {tuple(k.shape[:3])} as in k, got "
            f"{tuple(v.shape)}"
        )


def check_scale(scale: Any, head_dim: int, dtype: torch.dtype) -> float:
    """The validated scale of a call with scores of this dtype; None is head_dim^−½."""
    scale = plain(scale)
    if scale is None:
        return head_dim**-0.5
    if not is_number(scale):
        raise TypeError(f"scale must be a finite number or None, got {shown(scale)}")
    if not is_finite(scale, dtype):
        raise ValueError(
            f"scale must be a finite number or None, got {shown(scale)}; {dtype} holds numbers up "
            f"to {torch.finfo(dtype).max:.3g}"
        )
    return float(scale)


def check_softcap(softcap: Any, dtype: torch.dtype) -> float | None:
    """The validated softcap of a call with scores of this dtype."""
    if softcap is None:
        return None
    softcap = plain(softcap)
    if not is_number(softcap):
        raise TypeError(f"softcap must be a number above 0 or None, got {shown(softcap)}")
    limits = torch.finfo(dtype)
    # A softcap below the smallest normal number would divide by 0 on devices that flush it to 0.
    if not limits.tiny <= softcap <= limits.max:
        raise ValueError(
            f"softcap must be a number above 0 or None, got {shown(softcap)}; {dtype} holds "
            f"numbers from {limits.tiny:.3g} to {limits.max:.3g}"
        )
    return float(softcap)


def _bounds(window: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """(left, right): how many positions a query sees on each side; None means no bound."""
    right = 0 if is_causal else None
    if window is None:
        return None, right
    window = plain(window)
    if is_int(window):
        if not is_causal:
            raise ValueError(
                f"window must be a pair (left, right) without is_causal, got {shown(window)}"
            )
        if window < 1:
            raise ValueError(
                f"window must be at least 1 (the query's own key), got {shown(window)}"
            )
        return window - 1, 0
    pair = [plain(x) for x in window] if isinstance(window, (tuple, list)) else []
    if len(pair) != 2 or not all(map(is_int, pair)):
        raise TypeError(
            f"window must be an int or a pair (left, right) of ints, got {shown(window)}"
        )
    if is_causal:
        raise ValueError(f"window must be an int with is_causal=True, got {shown(window)}")
    if min(pair) < 0:
        raise ValueError(f"window must have left >= 0 and right >= 0, got {shown(window)}")
    return pair[0], pair[1]


def _mask(
    mask: Tensor | None, shape: tuple[int, int, int, int], q: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if mask is None:
        return None
    check_dense("attn_mask", mask)
    if mask.dtype not in (torch.bool, q.dtype, dtype):
        floats = " or ".join(dict.fromkeys((str(q.dtype), str(dtype))))
        raise TypeError(f"attn_mask must be bool (True = attend) or {floats}, got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {mask.device}")
    if mask.dim() == 0 or not broadcasts(mask, shape):
        raise ValueError(
            f"attn_mask must broadcast to (B, H, Nq, Nk) = {shape}, got {tuple(mask.shape)}"
        )
    return _as_mask(mask, shape[-1])


def _as_mask(mask: Tensor, keys: int) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:3], keys)


def check_ids(what: str, ids: Any) -> None:
    """Raise unless the ids are a dense tensor of ints."""
    check_dense(what, ids)
    if ids.dtype not in ID_DTYPES:
        raise TypeError(f"segment_ids must be uint8, int8, int16, int32 or int64, got {ids.dtype}")


def _segments(
    ids: Segments, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if ids is None:
        return None
    pair = (ids, ids) if isinstance(ids, Tensor) else ids
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            "segment_ids must be an int tensor (B, N), or a pair of them for queries and keys, got "
            f"{shown(ids)}"
        )
    checked = []
    for x, length, whose in zip(pair, (queries, keys), ("queries", "keys")):
        check_ids(f"segment_ids of the {whose}", x)
        if x.shape != (batch, length):
            raise ValueError(
                f"segment_ids of the {whose} must have shape ({batch}, {length}), got "
                f"{tuple(x.shape)}; pass a pair when queries and keys differ in number"
            )
        if x.device != device:
            raise ValueError(f"segment_ids must be on q's device {device}, got {x.device}")
        checked.append(x.long())
    # One tensor for both shows that queries and keys have the same ids.
    return checked[0], checked[0] if pair[0] is pair[1] else checked[1]
