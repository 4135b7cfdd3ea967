"""What decoding remembers: the keys and values so far, or the state of a linear variant.

Both caches answer the same calls. `attend` takes the next tokens of each sequence, any number of
them, and gives what ``attention(..., is_causal=True)`` over all tokens so far gives for these rows:
the counts n_i, positions, windows and sinks are those of the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.core.registry import get_variant
from attnzoo.core.values import (
    check_dense,
    check_sizes,
    is_int,
    is_number,
    is_readable,
    plain,
    shown,
)
from attnzoo.functional.attention import attention
from attnzoo.functional.linear_attention import LinearState, linear_attention

# Keywords of `attention` that a state has no use for, and what they are when they say nothing.
NEUTRAL = {
    "window": None,
    "alibi": None,
    "segment_ids": None,
    "dropout_p": 0.0,
    "return_lse": False,
    "backend": None,
}


class KVCache:
    """Keys and values of up to ``max_length`` tokens, allocated once, for any variant.

    Args:
        max_length: tokens that it can hold. Memory is taken at the first call, in the shapes, dtype
            and device of its k and v.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> whole = attnzoo.attention(q, k, v, "ssmax", is_causal=True)
        >>> cache = attnzoo.nn.KVCache(max_length=16)
        >>> _ = cache.attend(q[:, :, :9], k[:, :, :9], v[:, :, :9], "ssmax")
        >>> last = cache.attend(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], "ssmax")
        >>> torch.allclose(last, whole[:, :, 9:], atol=1e-6), cache.length
        (True, 10)
    """

    def __init__(self, max_length: int) -> None:
        check_sizes(max_length=max_length)
        self.max_length, self.length = max_length, 0
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def keys(self) -> Tensor | None:
        """(B, Hkv, length, D), a view; None before the first call."""
        return None if self._held is None else self._held[0][:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        """(B, Hkv, length, Dv), a view; None before the first call."""
        return None if self._held is None else self._held[1][:, :, : self.length]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Any:
        """Attention of the next tokens to all so far, these included.

        Args:
            q: (B, H, N, D), k: (B, Hkv, N, D), v: (B, Hkv, N, Dv), the next N tokens.
            variant, **arguments: as for `attention`; a mask is one over all ``length`` + N keys.

        Raises:
            ValueError, TypeError: naming the argument; nothing was appended then.
        """
        _check_causal(arguments)
        _check_tokens(q, k, v)
        for name, x in {"q": q, "k": k, "v": v, **arguments}.items():
            if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and a cache of keys keeps none, for it is "
                    "written to again and again: call it under torch.no_grad()"
                )
        keys, values = self._with(k, v)
        _check_mask(arguments, keys.shape[2])
        found = attention(q, keys, values, variant, is_causal=True, **arguments)
        self.length = keys.shape[2]
        return found

    def crop(self, length: int) -> None:
        """Forgets the tokens after the first ``length``: a draft that was rejected, say."""
        self.length = _cropped(length, self.length)

    def reorder(self, index: Tensor) -> None:
        """Sequence i becomes a copy of what sequence ``index[i]`` was: (B',), int."""
        _check_index(index, None if self._held is None else self._held[0])
        if self._held is not None:
            keys, values = self._held
            self._held = keys.index_select(0, index), values.index_select(0, index)

    def _with(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these written after what is held; ``length`` is as it was."""
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.max_length:
            raise ValueError(
                f"the cache holds max_length={self.max_length} tokens: {k.shape[2]} more do not "
                f"fit after {start}"
            )
        held = self._held
        if held is None or (start == 0 and not (_fits(k, held[0], k) and _fits(v, held[1], k))):
            held = self._room(k), self._room(v)
        for name, x, room in zip("kv", (k, v), held):
            if not _fits(x, room, k):
                expected = (room.shape[0], room.shape[1], k.shape[2], room.shape[3])
                raise ValueError(
                    f"{name} must be {expected} {room.dtype} on {room.device}, as what the cache "
                    f"holds, got {tuple(x.shape)} {x.dtype} on {x.device}"
                )
            room[:, :, start:stop] = x
        self._held = held
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def _room(self, x: Tensor) -> Tensor:
        # Made in inference mode it could not be written to outside.
        with torch.inference_mode(False):
            shape = x.shape[0], x.shape[1], self.max_length, x.shape[3]
            return torch.empty(shape, dtype=x.dtype, device=x.device)

    def __repr__(self) -> str:
        return f"KVCache(max_length={self.max_length}, length={self.length})"


class StateCache:
    """The state of a linear variant (cosformer, taylor): one size at any length.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> whole = attnzoo.attention(q, k, v, "taylor", is_causal=True)
        >>> cache = attnzoo.nn.StateCache()
        >>> rows = [cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)), "taylor")
        ...         for i in range(10)]
        >>> torch.allclose(torch.cat(rows, dim=2), whole, atol=1e-5), cache.length
        (True, 10)
    """

    def __init__(self) -> None:
        self.state: LinearState | None = None
        self._made_by: dict[str, Any] = {}

    @property
    def length(self) -> int:
        return 0 if self.state is None else self.state.length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Tensor:
        """As `KVCache.attend`, for arguments that `linear_attention` takes. Differentiable.

        Variant, scale and parameters are those of the first call: a state is a sum of what they
        made of the keys.
        """
        _check_causal(arguments)
        _check_tokens(q, k, v)
        for name, nothing in NEUTRAL.items():
            value = plain(arguments.pop(name, nothing))
            known = isinstance(value, bool) or is_number(value)  # of others != may be no bool
            if value is not None and (not known or value != nothing):
                raise ValueError(
                    f"{name} must be {nothing} with a state of keys, got {shown(value)}"
                )
        _check_mask(arguments, self.length + k.shape[2])
        facts = {"variant": variant, "scale": None}
        facts |= {n: x for n, x in arguments.items() if not isinstance(x, Tensor)}
        # What no call takes is left to `linear_attention`, which refuses it.
        fixed = ["variant", "scale", *(param.name for param in get_variant(variant).params)]
        fixed += [name for name in self._made_by if name != "enable_gqa"]
        for name in dict.fromkeys(fixed) if self.state is not None else ():
            if facts.get(name) != self._made_by.get(name):
                raise ValueError(
                    f"{name} must be that of the state, {self._made_by.get(name)!r}, got "
                    f"{shown(facts.get(name))}"
                )
        mask = arguments.get("attn_mask")
        if mask is not None:
            arguments["attn_mask"] = mask[..., self.length :]
        out, self.state = linear_attention(q, k, v, variant, state=self.state, **arguments)
        self._made_by = facts
        return out

    def crop(self, length: int) -> None:
        """To 0, or to what it is: a sum does not say what one of its terms was."""
        if _cropped(length, self.length) == 0:
            self.state = None
        elif length != self.length:
            raise ValueError(
                f"length must be 0 or {self.length}: a state cannot forget single tokens; got "
                f"{length}"
            )

    def reorder(self, index: Tensor) -> None:
        """Sequence i becomes a copy of what sequence ``index[i]`` was: (B',), int."""
        _check_index(index, None if self.state is None else self.state.sums)
        if self.state is not None:
            sums = self.state.sums.index_select(0, index)
            self.state = LinearState(sums, self.state.length)

    def __repr__(self) -> str:
        return f"StateCache(length={self.length})"


Cache = KVCache | StateCache


def _fits(x: Tensor, room: Tensor, k: Tensor) -> bool:
    expected = (room.shape[0], room.shape[1], k.shape[2], room.shape[3])
    return x.shape == expected and x.dtype == room.dtype and x.device == room.device


def _check_mask(arguments: dict[str, Any], length: int) -> None:
    """One entry per key so far: a mask of one would be taken for all of them."""
    mask = arguments.get("attn_mask")
    if mask is None:
        return
    check_dense("attn_mask", mask)
    if mask.dim() == 0 or mask.shape[-1] != length:
        raise ValueError(
            f"attn_mask must be over all {length} keys so far, the new ones included, got "
            f"{tuple(mask.shape)}"
        )


def _check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != 4:
            heads = "H" if name == "q" else "Hkv"
            raise ValueError(f"{name} must have shape (B, {heads}, N, D), got {tuple(x.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must hold the same tokens, got {q.shape[2]} and {k.shape[2]}")


def _check_causal(arguments: dict[str, Any]) -> None:
    if arguments.pop("is_causal", True) is not True:
        raise ValueError("is_causal must be True with a cache: later tokens are not there yet")


def _cropped(length: int, held: int) -> int:
    if not is_int(length) or not 0 <= length <= held:
        raise ValueError(
            f"length must be an int from 0 to {held}, what is held; got {shown(length)}"
        )
    return length


def _check_index(index: Tensor, held: Tensor | None) -> None:
    """``held``: what the sequences hold, (B, ...); None where nothing is held yet."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be an int32 or int64 tensor, got {kind}")
    if index.dim() != 1:
        raise ValueError(f"index must have shape (B,), got {tuple(index.shape)}")
    if len(index) == 0:
        raise ValueError("index must name at least one sequence, got none")
    if held is None:
        return
    if index.device != held.device:
        raise ValueError(
            f"index must be on {held.device}, as what the cache holds, got {index.device}"
        )
    if is_readable(index):
        batch = held.shape[0]
        wrong = index[(index < 0) | (index >= batch)]
        if len(wrong):
            raise ValueError(
                f"index must hold numbers of sequences, from 0 to {batch - 1}, got {int(wrong[0])}"
            )
