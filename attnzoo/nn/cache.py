"""What decoding remembers: the keys and values so far, or the state of a linear variant.

A cache holds, goes back and reorders; it computes nothing. `attend` does, with what it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.core.checks import check_dense, check_sizes, is_int, is_readable, shown
from attnzoo.functional.linear_attention import LinearState


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
        >>> _ = cache.update(k[:, :, :9], v[:, :, :9])
        >>> keys, values = cache.update(k[:, :, 9:], v[:, :, 9:])
        >>> last = attnzoo.attention(q[:, :, 9:], keys, values, "ssmax", is_causal=True)
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

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, with those of the next tokens appended: views.

        Args:
            k: (B, Hkv, N, D), v: (B, Hkv, N, Dv), of the next N tokens.

        Raises:
            ValueError, TypeError: naming the argument; nothing was appended then.
        """
        for name, x in (("k", k), ("v", v)):
            check_heads_first(name, x)
            check_constant(name, x)
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
        self._held, self.length = held, stop
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def crop(self, length: int) -> None:
        """Forgets the tokens after the first ``length``: a draft that was rejected, say."""
        self.length = _cropped(length, self.length)

    def reorder(self, index: Tensor) -> None:
        """Sequence i becomes a copy of what sequence ``index[i]`` was: (B',), int."""
        _check_index(index, None if self._held is None else self._held[0])
        if self._held is not None:
            keys, values = self._held
            self._held = keys.index_select(0, index), values.index_select(0, index)

    def _room(self, x: Tensor) -> Tensor:
        # Made in inference mode it could not be written to outside.
        with torch.inference_mode(False):
            shape = x.shape[0], x.shape[1], self.max_length, x.shape[3]
            return torch.empty(shape, dtype=x.dtype, device=x.device)

    def __repr__(self) -> str:
        return f"KVCache(max_length={self.max_length}, length={self.length})"


class StateCache:
    """The state of a linear variant: one size at any length.

    A state is a sum of what a variant made of the keys, with a scale and parameters: ``made_by``
    says which, and the next tokens must come with the same.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> whole = attnzoo.attention(q, k, v, "taylor", is_causal=True)
        >>> attend = attnzoo.nn.Attention("taylor", num_heads=2)
        >>> cache = attnzoo.nn.StateCache()
        >>> rows = [attend(*(x[:, :, i : i + 1] for x in (q, k, v)), cache=cache)
        ...         for i in range(10)]
        >>> torch.allclose(torch.cat(rows, dim=2), whole, atol=1e-5), cache.length
        (True, 10)
    """

    def __init__(self) -> None:
        self.state: LinearState | None = None
        self.made_by: dict[str, Any] = {}

    @property
    def length(self) -> int:
        return 0 if self.state is None else self.state.length

    def update(self, state: LinearState, made_by: dict[str, Any]) -> LinearState:
        """The state after the next tokens, in the place of that before."""
        self.state, self.made_by = state, made_by
        return state

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


def check_heads_first(name: str, x: Tensor) -> None:
    check_dense(name, x)
    if x.dim() != 4:
        heads = "H" if name == "q" else "Hkv"
        raise ValueError(f"{name} must have shape (B, {heads}, N, D), got {tuple(x.shape)}")


def check_constant(name: str, x: Any) -> None:
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, and a cache of keys keeps none, for it is written to "
            "again and again: call it under torch.no_grad()"
        )


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
