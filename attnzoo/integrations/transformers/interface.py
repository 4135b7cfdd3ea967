"""What transformers calls: one attention function and one mask function, both named "attnzoo".

A mask that is proven to be causality (or nothing) and padding is handed over as a mask of keys,
(B, 1, 1, keys in use), in uint8, which no other mask of transformers has; causality comes with it.
All others are dense bool masks, as transformers makes them, which say everything by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from attnzoo.core.arguments import check_call
from attnzoo.core.forms import Variant
from attnzoo.core.registry import get_variant
from attnzoo.functional.attention import attention
from attnzoo.nn import Attention

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # other versions tell each layer what is wanted
    _active_collector = None

NAME = "attnzoo"
# What changes the meaning of attention, and is not done here.
REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "cache")


class Seen(NamedTuple):
    """An attention module that was called, with the query heads and log n, the mean over rows."""

    module: nn.Module
    heads: int
    log_n: float
    rows: int

    def and_(self, other: Seen) -> Seen:
        """Of both calls."""
        rows = self.rows + other.rows
        log_n = (self.log_n * self.rows + other.log_n * other.rows) / max(rows, 1)
        return self._replace(log_n=log_n, rows=rows)


_seen: ContextVar[list[Seen] | None] = ContextVar("attnzoo_seen", default=None)


@contextmanager
def watched() -> Iterator[list[Seen]]:
    """All that is called inside, in order."""
    found: list[Seen] = []
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query (B, H, Nq, D), key and value (B, Hkv, Nk, D) -> (output (B, Nq, H, D), weights)."""
    for name in REFUSED:
        if kwargs.get(name) is not None:
            who = type(module).__name__
            raise ValueError(f"attnzoo has no {name}, and {who} asks for one")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    own = module._modules.get(NAME)
    variant = _variant(own)
    if not causal and query.shape[2] != key.shape[2] and variant and variant.positional:
        raise ValueError(
            f"{variant.name} cannot be {type(module).__name__}'s: {query.shape[2]} queries have "
            f"no distances from {key.shape[2]} keys of another sequence"
        )
    mask, causal, used = _mask(attention_mask, bool(causal), query.shape[2], key.shape[2])
    key, value = key[:, :, :used], value[:, :, :used]
    options: dict[str, Any] = {
        "attn_mask": mask, "is_causal": causal, "scale": scaling, "dropout_p": dropout,
        "enable_gqa": key.shape[1] != query.shape[1],
    }  # fmt: skip
    seen = None if torch.compiler.is_compiling() else _seen.get()
    if seen is not None:
        seen.append(Seen(module, query.shape[1], *_log_n(query, key, value, options)))
    wanted = _weights_wanted(kwargs)
    if own is None and not wanted:  # a layer that keeps its own attention
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    own = own or Attention("softmax", query.shape[1])
    found = own(query, key, value, need_weights=bool(wanted), **options)
    out, weights = found if wanted else (found, None)
    return out.transpose(1, 2).contiguous(), weights


def _variant(own: nn.Module | None) -> Variant | None:
    """Also of what PEFT has wrapped."""
    name = None if own is None else getattr(own, "variant", None)
    return None if name is None else get_variant(name)


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """As the call says; or as what will collect them, where a model keeps that from its layers."""
    if kwargs.get("output_attentions") is not None:
        return bool(kwargs["output_attentions"])
    collected = None if _active_collector is None else _active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _mask(
    mask: Tensor | None, causal: bool, queries: int, keys: int
) -> tuple[Tensor | None, bool, int]:
    """attn_mask, is_causal, and how many of the keys there are are in use."""
    if mask is None:
        # Without one a causal call begins its sequence: a static cache has room behind it.
        return None, causal and queries > 1, queries if causal else keys
    if mask.dtype == torch.uint8:
        return mask.view(torch.bool), causal and queries > 1, mask.shape[-1]
    if mask.is_floating_point() and not torch.compiler.is_compiling():
        # Models fill with the least number where they mean that a key is not to be seen.
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = ~hidden if bool((hidden | (mask == 0)).all()) else mask
    return mask, False, keys


def _log_n(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[float, int]:
    """The mean over rows that see a key, as SSMax and others count, and how many rows those are."""
    call = check_call(query, key, value, **options)
    counts = call.counts.expand(call.batch, call.heads, call.queries).float()
    counts = counts[counts > 0]
    return float(counts.log().mean()) if len(counts) else 0.0, len(counts)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """A mask of keys where that is all there is to say, else transformers' own dense one."""
    causal = mask_function is causal_mask_function
    proven = causal or mask_function is bidirectional_mask_function
    # A static cache says where it stands in a tensor, which a graph cannot look into.
    unknown = isinstance(q_offset, Tensor) and torch.compiler.is_compiling()
    if not proven or kv_offset != 0 or (causal and unknown):
        if causal and unknown:
            _refuse_positions(kwargs.get("config"))
        for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
            kwargs[name] = False
        make: Any = sdpa_mask  # whose q_offset may be a tensor, whatever it says
        return make(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    used = int(q_offset) + q_length if causal else kv_length
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        return padding[:, None, None, :used].to(torch.uint8)
    if not causal or used == q_length:
        return None
    return torch.ones(batch_size, 1, 1, used, dtype=torch.uint8, device=kwargs.get("device", "cpu"))


def _refuse_positions(config: Any) -> None:
    """In a compiled step of a static cache no key says how far back it stands."""
    layers = (getattr(config, NAME, None) or {}).get("layers", {})
    for name, layer in layers.items():
        if get_variant(layer["variant"]).positional:
            raise ValueError(
                f"{layer['variant']} ({name}) cannot decode from a compiled static cache, whose "
                "keys have room behind them: use a dynamic cache"
            )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
