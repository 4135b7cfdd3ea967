"""attend(): attention of the next tokens of a sequence to all tokens so far, with a cache."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from attnzoo.core.arguments import Segments, Window, check_scale
from attnzoo.core.call import score_dtype
from attnzoo.core.checks import check_dense, is_number, plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention
from attnzoo.functional.linear_attention import linear_attention
from attnzoo.nn.cache import Cache, KVCache, StateCache, check_four_dims, check_no_grad

# Keywords of `attention` that a StateCache does not support, with their defaults.
STATE_DEFAULTS = {
    "window": None,
    "alibi": None,
    "relative_bias": None,
    "segment_ids": None,
    "softcap": None,
    "dropout_p": 0.0,
    "return_lse": False,
    "return_max_logits": False,
    "backend": None,
}


class AttentionKeywords(TypedDict, total=False):
    """The keywords of `attnzoo.attention` that modules pass on, without those that return more."""

    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    window: Window
    alibi: Tensor | None
    relative_bias: Tensor | None
    segment_ids: Segments
    dropout_p: float
    backend: str | None


@overload
def attend(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, *,
    return_lse: Literal[False] = False, return_max_logits: Literal[False] = False, **arguments: Any,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, *,
    return_lse: Literal[True], return_max_logits: Literal[False] = False, **arguments: Any,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, *,
    return_lse: bool, return_max_logits: Literal[False] = False, **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, *,
    return_lse: bool = False, return_max_logits: Literal[True], **arguments: Any,
) -> tuple[Tensor, ...]: ...  # fmt: skip
def attend(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any
) -> Tensor | tuple[Tensor, ...]:
    """Attention of the next tokens to all tokens so far; appends the next tokens to the cache.

    The output for the next tokens is the same as in ``attention(..., is_causal=True)`` over the
    whole sequence, including key counts n_i, positions, windows and sinks.

    Args:
        cache: a `KVCache`, or a `StateCache` for variants that `attnzoo.linear_attention` accepts.
        q: queries of the next N tokens, (B, H, N, D).
        k: keys of the next N tokens, (B, Hkv, N, D).
        v: values of the next N tokens, (B, Hkv, N, Dv).
        variant: a name from `attnzoo.list_variants`.
        **arguments: keywords of `attnzoo.attention` and parameters of the variant. A mask covers
            all keys so far, the next tokens included. A parameter with one value per key or per
            query holds those of the next tokens, (B, H, N). A `KVCache` keeps the values per key. A
            `StateCache` requires the variant, scale and parameters of its first call, only supports
            key masks, and no values per key or per query.

    Returns:
        The output (B, H, N, Dv); with ``return_lse`` (output, lse (B, H, N)). With
        ``return_max_logits`` the largest logits (H,) of these queries come last. A `StateCache`
        supports neither.

    Raises:
        ValueError, TypeError: an argument is wrong; the cache is left unchanged.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> full = attnzoo.attention(q, k, v, "ssmax", is_causal=True)
        >>> cache = attnzoo.nn.KVCache(max_length=16)
        >>> _ = attnzoo.nn.attend(cache, q[:, :, :9], k[:, :, :9], v[:, :, :9], "ssmax")
        >>> last = attnzoo.nn.attend(cache, q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], "ssmax")
        >>> torch.allclose(last, full[:, :, 9:], atol=1e-6), cache.length
        (True, 10)

    Notes:
        A `StateCache` is differentiable. A `KVCache` is not: use ``torch.no_grad()``.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a KVCache or a StateCache, got {type(cache).__name__}")
    causal = arguments.pop("is_causal", True)
    if causal is not True:
        raise ValueError(f"is_causal must be True with a cache, got {shown(causal)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_four_dims(name, x)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must hold the same number of tokens, got {q.shape[2]} and {k.shape[2]}"
        )
    _check_mask(arguments.get("attn_mask"), cache.length + k.shape[2])
    if isinstance(cache, StateCache):
        return _attend_to_state(cache, q, k, v, variant, arguments)
    return _attend_to_keys(cache, q, k, v, variant, arguments)


def _attend_to_keys(
    cache: KVCache, q: Tensor, k: Tensor, v: Tensor, variant: str, arguments: dict[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    for name, x in {"q": q, **arguments}.items():
        check_no_grad(name, x)
    before = cache.length
    per_key = [param.name for param in get_variant(variant).params if param.per_key]
    new = {name: arguments[name] for name in per_key if _is_per_token(arguments.get(name))}
    keys, values = cache.update(k, v, **new)
    try:
        arguments = {**arguments, **cache.per_key}
        return attention(q, keys, values, variant, is_causal=True, **arguments)
    except BaseException:
        cache.crop(before)
        raise


def _attend_to_state(
    cache: StateCache, q: Tensor, k: Tensor, v: Tensor, variant: str, arguments: dict[str, Any]
) -> Tensor:
    for name, default in STATE_DEFAULTS.items():
        value = plain(arguments.pop(name, default))
        both_numbers = is_number(value) and is_number(default)
        if not (value == default if both_numbers else value is default):
            raise ValueError(f"{name} must be {default} with a StateCache, got {shown(value)}")
    for param in get_variant(variant).params:
        if (param.per_key or param.per_token) and _is_per_token(arguments.get(param.name)):
            raise ValueError(
                f"{variant}'s {param.name} must be a number or have one value per head (H,) with a "
                f"StateCache, got {tuple(arguments[param.name].shape)}: use a KVCache"
            )
    head_dim = max(q.shape[-1], 1)  # `linear_attention` raises for 0
    scale = check_scale(arguments.get("scale"), head_dim, score_dtype(q))
    made_by = {"variant": variant, "scale": scale}
    for param in get_variant(variant).params:  # of a tensor only the shape is compared
        x = plain(arguments.get(param.name, param.default))
        made_by[param.name] = x.shape if isinstance(x, Tensor) else x
    if cache.made_by:  # empty before the first call, also if a state was assigned
        _check_same(cache.made_by, made_by)
    mask = arguments.get("attn_mask")
    if mask is not None:
        arguments["attn_mask"] = mask[..., cache.length :]
    out, state = linear_attention(q, k, v, variant, state=cache.state, **arguments)
    cache.update(state, made_by)
    return out


def _is_per_token(value: Any) -> bool:
    """Whether the value of a parameter has the shape (B, H, N)."""
    return isinstance(value, Tensor) and value.dim() == 3


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises if a call changes the variant, its parameters or the scale of the first call."""
    for name, value in now.items():  # the variant comes first
        if value != before[name]:
            raise ValueError(
                f"{name} must be {_described(before[name])} as in the first call of this "
                f"StateCache, got {_described(value)}"
            )


def _described(value: Any) -> str:
    return f"a tensor {tuple(value)}" if isinstance(value, torch.Size) else shown(value)


def _check_mask(mask: Tensor | None, length: int) -> None:
    """Raises unless the mask's last dimension is the number of keys so far; 1 is not accepted."""
    if mask is None:
        return
    check_dense("attn_mask", mask)
    if mask.dim() == 0 or mask.shape[-1] != length:
        raise ValueError(
            f"attn_mask must cover all {length} keys so far, the next tokens included, got "
            f"{tuple(mask.shape)}"
        )
