"""Parameters per key, made from the hidden states, in the caches of transformers."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from attnzoo.nn.projections import Projections

# Keywords of attention modules for their cache: the second is that of GPT-NeoX and GPT-BigCode.
CACHES = ("past_key_values", "layer_past")
CACHE = CACHES[0]  # what models and messages call it
STORED = "attnzoo_stored"  # the keyword that hands a `CacheWithParameters` to attention functions
WAY_OUT = "pass use_cache=False, or give convert the parameter as a number or a tensor (H,)"


def per_key_names(child: nn.Module | None) -> tuple[str, ...]:
    """The parameters per key that a child makes from the hidden states."""
    attention = getattr(child, "attention", child)  # that of a wrapper
    projections = getattr(attention, "projections", None)
    return projections.per_key if isinstance(projections, Projections) else ()


def stored_in(cache: Any, child: Any, hidden: Tensor | None) -> CacheWithParameters | None:
    """The cache of a call of an attention module, if it can keep the child's parameters per key."""
    names = per_key_names(child)
    if not names or hidden is None or not isinstance(cache, Cache):
        return None
    # An encoder-decoder takes a half of its cache, by the class of the whole.
    both = isinstance(cache, EncoderDecoderCache)
    return None if both else CacheWithParameters(cache, child, hidden)


class CacheWithParameters:
    """A cache in one call of an attention module, which also keeps parameters per key.

    They are further features of the values. So they follow all that transformers does with a cache:
    selection of sequences, cropping, sliding windows, other devices. The fp32 numbers are stored as
    their bits, because 16 bits would round them. The module sees its own values only.
    """

    def __init__(self, cache: Cache, child: Any, hidden: Tensor) -> None:
        self.cache, self.child, self.hidden = cache, child, hidden
        self.made: dict[str, Tensor] | None = None  # of the present tokens
        self.per_key: dict[str, Tensor] = {}  # of all tokens in the cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends the next tokens, and returns the keys and values of all tokens."""
        names = per_key_names(self.child)
        # Under autocast rotary encodings make fp32 keys, and a cache gives the values their dtype.
        dtype = torch.promote_types(key_states.dtype, value_states.dtype)
        value_states = value_states.to(dtype)
        made = self.child.projected(self.hidden, self.hidden)
        columns = torch.cat(
            [_as_features(made[name].detach(), value_states) for name in names], dim=-1
        )
        features = value_states.shape[-1]
        self._check(layer_idx, features + columns.shape[-1], dtype)
        keys, values = self.cache.update(
            key_states, torch.cat([value_states, columns], dim=-1), layer_idx, *args, **kwargs
        )
        self._check(layer_idx, features + columns.shape[-1], dtype)
        stored = values[..., features:].detach().chunk(len(names), dim=-1)
        self.made = made
        self.per_key = {
            name: _all_tokens(name, _from_features(x, made[name]), made[name])
            for name, x in zip(names, stored)
        }
        return keys, values[..., :features]

    def _check(self, layer_idx: int, features: int, dtype: torch.dtype) -> None:
        """Raises if the layer of the cache cannot keep the parameters, or was filled without."""
        if layer_idx >= len(self.cache.layers):
            return  # a dynamic cache has a layer after its first update
        layer: Any = self.cache.layers[layer_idx]
        quantized = any("Quantized" in base.__name__ for base in type(layer).__mro__)
        if quantized or not isinstance(layer, (DynamicLayer, StaticLayer)):
            names = ", ".join(per_key_names(self.child))
            raise ValueError(
                f"{CACHE} must keep all digits of {names}, got a {type(layer).__name__}: {WAY_OUT}"
            )
        values = layer.values
        if not isinstance(values, Tensor) or values.dim() != 4:
            return
        fits = values.shape[-1] == features and values.dtype == dtype
        if not fits and isinstance(layer, StaticLayer) and not int(layer.get_seq_length()):
            # `generate` with prefill_chunk_size allocates the cache before the first call.
            layer.is_initialized = False
        elif values.shape[-1] != features:
            raise ValueError(
                f"{CACHE} must have been filled by the converted model, with {features} features "
                f"per value, got {values.shape[-1]}: start with a new cache"
            )
        elif not fits:
            names = ", ".join(per_key_names(self.child))
            raise ValueError(
                f"{CACHE} must have values in {dtype}, as this call, because it keeps bits of "
                f"{names}, got {values.dtype}: start with a new cache"
            )


def _all_tokens(name: str, stored: Tensor, present: Tensor) -> Tensor:
    """The parameter at all tokens of the cache, with a gradient if all of them are present."""
    if not (torch.is_grad_enabled() and present.requires_grad):
        return stored
    if stored.shape[-1] == present.shape[-1]:
        return present
    raise ValueError(
        f"{name} requires a gradient, which a cache of earlier tokens does not support: use "
        "torch.no_grad(), or pass use_cache=False"
    )


def _as_features(x: Tensor, values: Tensor) -> Tensor:
    """(B, H, N) as features (B, Hkv, N, ·) in the dtype of the values, without a rounding."""
    grouped = rearrange(x, "b (kv group) n -> b kv n group", kv=values.shape[1])
    # A view as another dtype needs stride 1, which `contiguous` does not give to a dimension of 1.
    return grouped.reshape(-1).view(values.dtype).view(*grouped.shape[:-1], -1)


def _from_features(stored: Tensor, like: Tensor) -> Tensor:
    """What `_as_features` made, of all tokens in the cache."""
    return rearrange(stored.contiguous().view(like.dtype), "b kv n group -> b (kv group) n")
