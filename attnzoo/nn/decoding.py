"""attend(): attention of the next tokens of a sequence, from what a cache holds of those before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnzoo.core.checks import check_dense, is_number, plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention
from attnzoo.functional.linear_attention import linear_attention
from attnzoo.nn.cache import Cache, KVCache, StateCache, check_constant, check_heads_first

# Keywords of `attention` that a state has no use for, and what they are when they say nothing.
NEUTRAL = {
    "window": None,
    "alibi": None,
    "segment_ids": None,
    "dropout_p": 0.0,
    "return_lse": False,
    "backend": None,
}


def attend(cache: Cache, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Any:
    """Attention of the next tokens to all so far, these included, which the cache then holds.

    Gives what ``attention(..., is_causal=True)`` over all tokens so far gives for these queries:
    the counts n_i, positions, windows and sinks are those of the whole sequence. Differentiable
    with a `StateCache`, whose variant, scale and parameters are those of its first call.

    Args:
        cache: a `KVCache`, or a `StateCache` for what `attnzoo.linear_attention` takes.
        q: (B, H, N, D), k: (B, Hkv, N, D), v: (B, Hkv, N, Dv), the next N tokens.
        variant, **arguments: as for `attnzoo.attention`; a mask is over all keys so far, these
            included.

    Raises:
        ValueError, TypeError: naming the argument; the cache is then as it was.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> whole = attnzoo.attention(q, k, v, "ssmax", is_causal=True)
        >>> cache = attnzoo.nn.KVCache(max_length=16)
        >>> _ = attnzoo.nn.attend(cache, q[:, :, :9], k[:, :, :9], v[:, :, :9], "ssmax")
        >>> last = attnzoo.nn.attend(cache, q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], "ssmax")
        >>> torch.allclose(last, whole[:, :, 9:], atol=1e-6), cache.length
        (True, 10)
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be from new_cache(); got {type(cache).__name__}")
    if arguments.pop("is_causal", True) is not True:
        raise ValueError("is_causal must be True with a cache: later tokens are not there yet")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_heads_first(name, x)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must hold the same tokens, got {q.shape[2]} and {k.shape[2]}")
    _check_mask(arguments.get("attn_mask"), cache.length + k.shape[2])
    if isinstance(cache, StateCache):
        return _from_state(cache, q, k, v, variant, arguments)
    return _from_keys(cache, q, k, v, variant, arguments)


def _from_keys(
    cache: KVCache, q: Tensor, k: Tensor, v: Tensor, variant: str, arguments: dict[str, Any]
) -> Any:
    for name, x in {"q": q, **arguments}.items():
        check_constant(name, x)
    before = cache.length
    keys, values = cache.update(k, v)
    try:
        return attention(q, keys, values, variant, is_causal=True, **arguments)
    except BaseException:
        cache.crop(before)
        raise


def _from_state(
    cache: StateCache, q: Tensor, k: Tensor, v: Tensor, variant: str, arguments: dict[str, Any]
) -> Tensor:
    for name, nothing in NEUTRAL.items():
        value = plain(arguments.pop(name, nothing))
        known = isinstance(value, bool) or is_number(value)  # of others != may be no bool
        if value is not None and (not known or value != nothing):
            raise ValueError(f"{name} must be {nothing} with a state of keys, got {shown(value)}")
    made_by = {"variant": variant, "scale": None}
    made_by |= {n: x for n, x in arguments.items() if not isinstance(x, Tensor)}
    if cache.state is not None:
        _check_same(cache.made_by, made_by)
    mask = arguments.get("attn_mask")
    if mask is not None:
        arguments["attn_mask"] = mask[..., cache.length :]
    out, state = linear_attention(q, k, v, variant, state=cache.state, **arguments)
    cache.update(state, made_by)
    return out


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """What no call takes is left to `linear_attention`, which raises."""
    names = ["variant", "scale", *(param.name for param in get_variant(now["variant"]).params)]
    names += [name for name in before if name != "enable_gqa"]
    for name in dict.fromkeys(names):
        if now.get(name) != before.get(name):
            raise ValueError(
                f"{name} must be that of the state, {before.get(name)!r}, got "
                f"{shown(now.get(name))}"
            )


def _check_mask(mask: Tensor | None, length: int) -> None:
    """One entry per key so far: a mask of one would be taken for all of them."""
    if mask is None:
        return
    check_dense("attn_mask", mask)
    if mask.dim() == 0 or mask.shape[-1] != length:
        raise ValueError(
            f"attn_mask must be over all {length} keys so far, the new ones included, got "
            f"{tuple(mask.shape)}"
        )
