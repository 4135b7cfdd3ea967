"""The attention function and the mask function that transformers calls, both named "attnzoo".

If a mask hides only padding and future keys, the mask function returns a key mask
(B, 1, 1, keys in use) of dtype uint8. Without a padding mask it returns None if the call is not
causal or starts a sequence. With a key mask and with None, causality is passed as is_causal.
Transformers itself makes no uint8 masks, so the dtype identifies a key mask. All other masks, and
causal masks of a compiled static cache, are dense and include causality.
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
except ImportError:  # transformers versions that pass output_attentions to each layer
    _active_collector = None

NAME = "attnzoo"
# Keywords that models pass to other attention functions and that attnzoo does not support.
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "cache")


class ObservedCall(NamedTuple):
    """A call of an attention module, as recorded by `observe_calls`."""

    module: nn.Module
    heads: int  # query heads
    log_n: float  # mean of log n over the rows with a visible key
    rows: int  # number of these rows, one per batch entry, head and query

    def merge(self, other: ObservedCall) -> ObservedCall:
        """Combines two calls of the same module."""
        rows = self.rows + other.rows
        log_n = (self.log_n * self.rows + other.log_n * other.rows) / max(rows, 1)
        return self._replace(log_n=log_n, rows=rows)


_observed: ContextVar[list[ObservedCall] | None] = ContextVar("attnzoo_observed", default=None)


@contextmanager
def observe_calls() -> Iterator[list[ObservedCall]]:
    """Collects all attention calls inside the context, in order."""
    calls: list[ObservedCall] = []
    token = _observed.set(calls)
    try:
        yield calls
    finally:
        _observed.reset(token)


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
    """query (B, H, Nq, D), key, value (B, Hkv, Nk, D) -> output (B, Nq, H, D), weights or None."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attnzoo does not support {name}, which {type(module).__name__} uses")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    child = module._modules.get(NAME)
    variant = _variant(child)
    if not causal and query.shape[2] != key.shape[2] and variant and variant.positional:
        raise ValueError(
            f"{variant.name} does not support the cross-attention of {type(module).__name__}: "
            f"distances between {query.shape[2]} queries and {key.shape[2]} keys of another "
            "sequence are undefined"
        )
    mask, causal, used = _mask(attention_mask, bool(causal), query.shape[2], key.shape[2])
    key, value = key[:, :, :used], value[:, :, :used]
    options: dict[str, Any] = {
        "attn_mask": mask, "is_causal": causal, "scale": scaling, "dropout_p": dropout,
        "enable_gqa": key.shape[1] != query.shape[1],
    }  # fmt: skip
    calls = None if torch.compiler.is_compiling() else _observed.get()
    if calls is not None:
        calls.append(ObservedCall(module, query.shape[1], *_log_n(query, key, value, options)))
    need_weights = _need_weights(kwargs)
    if child is None and not need_weights:  # a layer that was not converted
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    child = child or Attention("softmax", query.shape[1])
    result: Any = child(query, key, value, need_weights=need_weights, **options)
    out, weights = result if need_weights else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def _variant(child: nn.Module | None) -> Variant | None:
    """The variant of a converted layer, also if PEFT has wrapped the child."""
    name = None if child is None else getattr(child, "variant", None)
    return None if name is None else get_variant(name)


def _need_weights(kwargs: dict[str, Any]) -> bool:
    """Whether to return weights.

    Some models request weights only through transformers' output collector.
    """
    if kwargs.get("output_attentions") is not None:
        return bool(kwargs["output_attentions"])
    collected = None if _active_collector is None else _active_collector.get()
    return any(name.endswith("attentions") for name in collected or ())


def _mask(
    mask: Tensor | None, causal: bool, queries: int, keys: int
) -> tuple[Tensor | None, bool, int]:
    """attn_mask, is_causal, and the number of keys in use."""
    if mask is None:
        # A causal call without a mask starts a sequence; further keys of a static cache are unused.
        return None, causal and queries > 1, queries if causal else keys
    if mask.dtype == torch.uint8:
        return mask.view(torch.bool), causal and queries > 1, mask.shape[-1]
    if mask.is_floating_point() and not torch.compiler.is_compiling():
        # Models hide keys with the most negative finite number instead of -inf.
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = ~hidden if bool((hidden | (mask == 0)).all()) else mask
    return mask, False, keys


def _log_n(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[float, int]:
    """The fields log_n and rows of an `ObservedCall`."""
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
    """transformers' mask function: returns None or a key mask where possible, else a dense mask."""
    causal = mask_function is causal_mask_function
    simple = causal or mask_function is bidirectional_mask_function
    # A static cache keeps its length in a tensor, whose value a compiled graph cannot read.
    unknown = isinstance(q_offset, Tensor) and torch.compiler.is_compiling()
    if not simple or kv_offset != 0 or (causal and unknown):
        if causal and unknown:
            _check_not_positional(kwargs.get("config"))
        for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
            kwargs[name] = False
        make: Any = sdpa_mask  # accepts a tensor q_offset, but its annotation does not say so
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


def _check_not_positional(config: Any) -> None:
    """Raises for variants that need distances, which a compiled static cache does not provide."""
    layers = (getattr(config, NAME, None) or {}).get("layers", {})
    for name, layer in layers.items():
        if get_variant(layer["variant"]).positional:
            raise ValueError(
                f"{layer['variant']} ({name}) does not support a compiled static cache: use a "
                "dynamic cache"
            )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
