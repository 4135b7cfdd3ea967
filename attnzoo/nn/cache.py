"""Caches for decoding: the keys and values so far, or the state of a linear variant.

A cache only stores, crops and reorders its data. `attend` computes attention with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.checks import check_dense, check_sizes, is_int, is_readable, shown
from attnzoo.functional.linear_attention import LinearState, check_state


class KVCache:
    """Keys and values of up to ``max_length`` tokens, for any variant.

    Parameters of the variant with one value per key (B, H, Nk) are in the cache too. Memory is
    allocated once, at the first update, with the shapes, dtypes and device of the given tensors.

    Args:
        max_length: number of tokens that the cache can hold.

    Raises:
        ValueError: max_length is not an int >= 1.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> full = attnzoo.attention(q, k, v, "ssmax", is_causal=True)
        >>> cache = attnzoo.nn.KVCache(max_length=16)
        >>> _ = cache.update(k[:, :, :9], v[:, :, :9])
        >>> keys, values = cache.update(k[:, :, 9:], v[:, :, 9:])
        >>> last = attnzoo.attention(q[:, :, 9:], keys, values, "ssmax", is_causal=True)
        >>> torch.allclose(last, full[:, :, 9:], atol=1e-6), cache.length
        (True, 10)
    """

    def __init__(self, max_length: int) -> None:
        check_sizes(max_length=max_length)
        self.max_length, self.length = max_length, 0
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._per_key: dict[str, Tensor] = {}

    @property
    def keys(self) -> Tensor | None:
        """The keys so far, a view (B, Hkv, length, D); None before the first update."""
        return None if self._buffers is None else self._buffers[0][:, :, : self.length]

    @property
    def values(self) -> Tensor | None:
        """The values so far, a view (B, Hkv, length, Dv); None before the first update."""
        return None if self._buffers is None else self._buffers[1][:, :, : self.length]

    @property
    def per_key(self) -> dict[str, Tensor]:
        """The parameters per key so far, keyed by name: views (B, H, length)."""
        return {name: x[:, :, : self.length] for name, x in self._per_key.items()}

    def update(self, k: Tensor, v: Tensor, **per_key: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the next N tokens and returns all keys and values so far, as views.

        Args:
            k: keys of the next tokens, (B, Hkv, N, D).
            v: values of the next tokens, (B, Hkv, N, Dv).
            **per_key: parameters of the variant at the next tokens, (B, H, N). Every call must pass
                those of the first call. `per_key` returns them for all tokens so far.

        Returns:
            The keys (B, Hkv, length, D) and values (B, Hkv, length, Dv) of all tokens so far.

        Raises:
            ValueError, TypeError: an argument is wrong or the cache is full. Nothing is appended.
        """
        for name, x in (("k", k), ("v", v)):
            check_four_dims(name, x)
            check_no_grad(name, x)
        for name, x in per_key.items():
            _check_per_key(name, x, k)
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.max_length:
            raise ValueError(
                f"cache is full: {k.shape[2]} tokens do not fit after {start} of "
                f"max_length={self.max_length}"
            )
        self._check_names(per_key)
        buffers, vectors = self._buffers, self._per_key
        if buffers is None or (
            start == 0 and not (_fits(k, buffers[0], k) and _fits(v, buffers[1], k))
        ):
            buffers = self._allocate(k), self._allocate(v)
        if start == 0:
            vectors = {
                name: vectors[name]
                if name in vectors and _fits(x, vectors[name], k)
                else self._allocate(x)
                for name, x in per_key.items()
            }
        stored = {"k": buffers[0], "v": buffers[1], **vectors}
        for name, x in {"k": k, "v": v, **per_key}.items():
            buffer = stored[name]
            if not _fits(x, buffer, k):
                expected = (*buffer.shape[:2], k.shape[2], *buffer.shape[3:])
                raise ValueError(
                    f"{name} must be {expected} {buffer.dtype} on {buffer.device} to match the "
                    f"cache, got {tuple(x.shape)} {x.dtype} on {x.device}"
                )
            buffer[:, :, start:stop] = x
        self._buffers, self._per_key, self.length = buffers, vectors, stop
        return buffers[0][:, :, :stop], buffers[1][:, :, :stop]

    def _check_names(self, per_key: dict[str, Tensor]) -> None:
        """Raises unless all calls pass the same parameters per key as the first one."""
        if self.length == 0:
            return
        for name in self._per_key:
            if name not in per_key:
                raise ValueError(
                    f"{name} must have one value per key (B, H, N), as in the first call of this "
                    "cache"
                )
        for name in per_key:
            if name not in self._per_key:
                raise ValueError(
                    f"{name} must have no value per key, as in the first call of this cache, got "
                    f"{tuple(per_key[name].shape)}"
                )

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens only, e.g. after a rejected draft."""
        self.length = _checked_length(length, self.length)

    def reorder(self, index: Tensor) -> None:
        """Replaces sequence i by a copy of sequence ``index[i]``, for beam search.

        Args:
            index: int32 or int64 tensor (B',) of batch indices; B' is the new batch size.
        """
        _check_index(index, None if self._buffers is None else self._buffers[0])
        if self._buffers is not None:
            keys, values = self._buffers
            # A tensor made in inference mode could not be written to outside inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self._buffers = keys.index_select(0, index), values.index_select(0, index)
                self._per_key = {n: x.index_select(0, index) for n, x in self._per_key.items()}

    def _allocate(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # see reorder
            # With room for one more token, views of the tokens so far are never contiguous. The
            # compiler would make another graph for the views of a full cache.
            shape = *x.shape[:2], self.max_length + 1, *x.shape[3:]
            return torch.empty(shape, dtype=x.dtype, device=x.device)

    def __repr__(self) -> str:
        return f"KVCache(max_length={self.max_length}, length={self.length})"


class StateCache:
    """The state of a linear variant: its size does not grow with the length.

    The state is a sum over the keys' features. The features depend on the variant, the scale and
    the variant's parameters. Every later call must use those of the first call.

    Attributes:
        state: the `LinearState` after the tokens so far; None before the first call. To roll back,
            save it and assign it later.
        made_by: the variant, its parameters and the scale of the first call; of tensors the shapes.
        length: the number of tokens in the state.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
        >>> full = attnzoo.attention(q, k, v, "taylor", is_causal=True)
        >>> attend = attnzoo.nn.Attention("taylor", num_heads=2)
        >>> cache = attnzoo.nn.StateCache()
        >>> outputs = [attend(*(x[:, :, i : i + 1] for x in (q, k, v)), cache=cache)
        ...            for i in range(10)]
        >>> torch.allclose(torch.cat(outputs, dim=2), full, atol=1e-5), cache.length
        (True, 10)
    """

    def __init__(self) -> None:
        # The length exists before the first call, so that the compiler makes it symbolic in the
        # second graph. The length of a state that the first call creates would need a third graph.
        self._sums: Tensor | None = None
        self.length = 0
        self.made_by: dict[str, Any] = {}

    @property
    def state(self) -> LinearState | None:
        """The state after the tokens so far; None before the first call."""
        return None if self._sums is None else LinearState(self._sums, self.length)

    @state.setter
    def state(self, state: LinearState | None) -> None:
        if state is None:
            self._sums, self.length, self.made_by = None, 0, {}
        else:
            self.length = check_state(state)
            self._sums = state.sums

    def update(self, state: LinearState, made_by: dict[str, Any]) -> LinearState:
        """Stores and returns ``state``, which includes the next tokens."""
        self._sums, self.length, self.made_by = state.sums, state.length, made_by
        return state

    def crop(self, length: int) -> None:
        """Accepts only 0 (reset) and the current length: a sum does not keep single tokens."""
        if _checked_length(length, self.length) == 0:
            self.state = None
        elif length != self.length:
            raise ValueError(
                f"length must be 0 or {self.length}, got {length}: a state does not keep single "
                "tokens"
            )

    def reorder(self, index: Tensor) -> None:
        """Replaces sequence i by a copy of sequence ``index[i]``, for beam search.

        Args:
            index: int32 or int64 tensor (B',) of batch indices; B' is the new batch size.
        """
        _check_index(index, self._sums)
        if self._sums is not None:
            self._sums = self._sums.index_select(0, index)

    def __repr__(self) -> str:
        return f"StateCache(length={self.length})"


Cache = KVCache | StateCache


def cached_length(caches: Sequence[Cache], layers: int) -> int:
    """The number of tokens in the caches of a model with this number of layers.

    Raises:
        TypeError: caches is not a sequence of caches.
        ValueError: there is not one cache per layer, or their lengths differ.
    """
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list of caches, one per layer, got {shown(caches)}")
    if len(caches) != layers:
        raise ValueError(f"caches must hold {layers} caches, one per layer, got {len(caches)}")
    for n, cache in enumerate(caches):
        if not isinstance(cache, Cache):
            raise TypeError(f"caches[{n}] must be a KVCache or a StateCache, got {shown(cache)}")
    if len({id(cache) for cache in caches}) < layers:
        raise ValueError("caches must hold a cache of its own for each layer, got one twice")
    lengths = [cache.length for cache in caches]
    # A set would hash the lengths, and the compiler would make a graph for each of them.
    if any(length != lengths[0] for length in lengths):
        raise ValueError(
            f"caches must have equal lengths, got {lengths}; after a call that failed, crop them "
            "or start with new caches"
        )
    return lengths[0]


def _fits(x: Tensor, buffer: Tensor, k: Tensor) -> bool:
    expected = (*buffer.shape[:2], k.shape[2], *buffer.shape[3:])
    return x.shape == expected and x.dtype == buffer.dtype and x.device == buffer.device


def check_four_dims(name: str, x: Tensor) -> None:
    check_dense(name, x)
    if x.dim() != 4:
        heads = "H" if name == "q" else "Hkv"
        raise ValueError(f"{name} must have shape (B, {heads}, N, D), got {tuple(x.shape)}")


def _check_per_key(name: str, x: Tensor, k: Tensor) -> None:
    check_dense(name, x)
    check_no_grad(name, x)
    if x.dim() != 3 or (x.shape[0], x.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"{name} must have one value per head and key, (B, H, N) with B={k.shape[0]} and "
            f"N={k.shape[2]} as in k, got {tuple(x.shape)}"
        )


def check_no_grad(name: str, x: Any) -> None:
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, which a KVCache does not support: use torch.no_grad()"
        )


def _checked_length(length: int, current: int) -> int:
    if not is_int(length) or not 0 <= length <= current:
        raise ValueError(
            f"length must be an int from 0 to {current}, the length of the cache, got "
            f"{shown(length)}"
        )
    return length


def _check_index(index: Tensor, stored: Tensor | None) -> None:
    """Raises unless ``index`` (B',) holds ints from 0 to B − 1 for ``stored`` (B, ...)."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be an int32 or int64 tensor, got {kind}")
    if index.dim() != 1:
        raise ValueError(f"index must have shape (B,), got {tuple(index.shape)}")
    if len(index) == 0:
        raise ValueError("index must name at least one sequence, got none")
    if stored is None:
        return
    if index.device != stored.device:
        raise ValueError(f"index must be on the cache's device {stored.device}, got {index.device}")
    if is_readable(index):
        batch = stored.shape[0]
        wrong = index[(index < 0) | (index >= batch)]
        if len(wrong):
            raise ValueError(
                f"index must hold sequence numbers from 0 to {batch - 1}, got {int(wrong[0])}"
            )
