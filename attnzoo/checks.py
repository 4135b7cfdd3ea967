"""From the arguments of `attention` to a `Call`, or to one clear error naming the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.call import Call, score_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
    segment_ids: Segments = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Call:
    """Check what can be checked without a look at values on the device."""
    _check_tensors(q, k, v)
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    _check_heads(heads, kv_heads, enable_gqa)
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    dtype = score_dtype(q)
    left, right = _bounds(window, is_causal)
    # Wider than everything is no bound, and stays within int64.
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
        scale=_scale(scale, head_dim),
        dtype=dtype,
        input_dtype=q.dtype,
        device=q.device,
        query_origin=keys - queries,
        left=left,
        right=right,
        mask=_mask(attn_mask, (batch, heads, queries, keys), q, dtype),
        alibi=_alibi(alibi, heads, q),
        segments=_segments(segment_ids, batch, queries, keys, q.device),
        dropout_p=_dropout(dropout_p),
        return_lse=return_lse,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, N, D), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype: q is {q.dtype}, {name} is {x.dtype}")
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must share a device: q is on {q.device}, {name} on {x.device}"
            )
    if q.shape[-1] == 0:
        raise ValueError(f"q must have a head dimension of at least 1, got {tuple(q.shape)}")
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one head, got {tuple(q.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k must be (B, Hkv, Nk, D) with q's B={q.shape[0]} and D={q.shape[-1]}, "
            f"got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be (B, Hkv, Nk, Dv) with k's {tuple(k.shape[:3])} in front, got "
            f"{tuple(v.shape)}"
        )


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"enable_gqa must be a bool, got {type(enable_gqa).__name__}")
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"q has {heads} heads and k has {kv_heads}: pass enable_gqa=True to share heads of k"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"enable_gqa: q's {heads} heads are not a multiple of k's {kv_heads}")


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if not is_number(scale) or not abs(scale) < math.inf:
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def _dropout(dropout_p: float) -> float:
    if not is_number(dropout_p) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}")
    return float(dropout_p)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _bounds(window: Window, is_causal: bool) -> tuple[int | None, int | None]:
    """How many positions a row sees to its left and to its right."""
    right = 0 if is_causal else None
    if window is None:
        return None, right
    if isinstance(window, int) and not isinstance(window, bool):
        if not is_causal:
            raise ValueError(
                f"window={window} is an int, which needs is_causal=True; otherwise pass "
                "(left, right)"
            )
        if window < 1:
            raise ValueError(f"window must be at least 1 (the row's own key), got {window}")
        return window - 1, 0
    if not isinstance(window, Sequence) or len(window) != 2 or not all(map(_is_int, window)):
        raise TypeError(f"window must be an int or a pair (left, right) of ints, got {window!r}")
    if is_causal:
        raise ValueError(f"window={window!r} is a pair: with is_causal=True pass an int")
    if min(window) < 0:
        raise ValueError(f"window=(left, right) must not be negative, got {window!r}")
    return window[0], window[1]


def _mask(
    mask: Tensor | None, shape: tuple[int, int, int, int], q: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, q.dtype, dtype):
        raise TypeError(
            f"attn_mask must be bool (True = attend) or q's {q.dtype} or {dtype}, got {mask.dtype}"
        )
    if mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {mask.device}")
    fits = 1 <= mask.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape))
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to (B, H, Nq, Nk) = {shape}, got {tuple(mask.shape)}"
        )
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:3], shape[-1])


def _alibi(alibi: Tensor | None, heads: int, q: Tensor) -> Tensor | None:
    if alibi is None:
        return None
    if not isinstance(alibi, Tensor) or not alibi.is_floating_point():
        kind = alibi.dtype if isinstance(alibi, Tensor) else type(alibi).__name__
        raise TypeError(f"alibi must be a float tensor of slopes, got {kind}")
    if alibi.shape != (heads,):
        raise ValueError(
            f"alibi must have one slope per query head, shape ({heads},), got {tuple(alibi.shape)}"
        )
    if alibi.device != q.device:
        raise ValueError(f"alibi must be on q's device {q.device}, got {alibi.device}")
    return alibi.view(1, heads, 1)


def _segments(
    ids: Segments, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if ids is None:
        return None
    pair = (ids, ids) if isinstance(ids, Tensor) else ids
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError("segment_ids must be an int tensor (B, N) or a pair for queries and keys")
    checked = []
    for x, length, whose in zip(pair, (queries, keys), ("queries", "keys")):
        if not isinstance(x, Tensor) or x.dtype not in ID_DTYPES:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"segment_ids must be an int tensor, got {kind}")
        if x.shape != (batch, length):
            raise ValueError(
                f"segment_ids of the {whose} must have shape ({batch}, {length}), got "
                f"{tuple(x.shape)}; pass a pair when queries and keys differ in number"
            )
        if x.device != device:
            raise ValueError(f"segment_ids must be on q's device {device}, got {x.device}")
        checked.append(x.long())
    return checked[0], checked[1]
