"""The attention function that transformers calls, and the masks, both named "attnzoo"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from attnzoo.core.arguments import check_call
from attnzoo.core.checks import is_readable
from attnzoo.core.registry import get_variant, list_variants
from attnzoo.core.variant import Variant
from attnzoo.functional.attention import attention
from attnzoo.integrations.transformers import masks
from attnzoo.integrations.transformers.masks import NAME, Mask
from attnzoo.integrations.transformers.packed import packed_segments
from attnzoo.integrations.transformers.position_bias import bias_options
from attnzoo.integrations.transformers.selected import NAMES, with_selection
from attnzoo.integrations.transformers.wrapped import from_hidden_states
from attnzoo.nn import Attention
from attnzoo.nn.checks import check_cross_attention

# The attribute of all modules of a converted model, whose other layers compute softmax. It is
# "eager" in a part that supports only transformers' eager attention, otherwise "any".
HOST = "_is_attnzoo_host"
IMPLEMENTATIONS = ("sdpa", "flash_attn", "flex_attn")
# Keywords that models pass to other attention functions and that attnzoo does not support.
UNSUPPORTED = ("head_mask", "cache")


class ObservedCall(NamedTuple):
    """A call of an attention module, as recorded by `observe_calls`."""

    module: nn.Module
    heads: int  # query heads
    log_n: float  # mean of log n over the rows with a visible key
    rows: int  # number of these rows, one per batch entry, head and query
    softcap: float | None = None  # of the host
    sinks: bool = False  # whether the host passes the scores of sinks
    bias: bool = False  # whether the host passes a bias of the scores
    selects: bool = False  # whether the host passes the keys that it selects
    qk_dim: int = 0  # features of each query and key
    v_dim: int = 0  # features of each value
    number: int = 0  # of the module, in the order of execution
    hidden: Tensor | None = None  # (0, features), with the dtype of the hidden states, if any

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


def set_mark(model: nn.Module, marked: bool) -> Callable[[], None]:
    """Marks all modules as those of a converted model, or as others. Returns an undo function."""
    marks: dict[nn.Module, str] = {}  # the innermost part of a module decides
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            marks |= dict.fromkeys(part.modules(), "eager" if eager_only(part) else "any")
    modules = [module for module in model.modules() if (HOST in vars(module)) != marked]

    def change(marked: bool) -> None:
        for module in modules:
            if marked:
                setattr(module, HOST, marks[module])
            else:
                delattr(module, HOST)

    change(marked)
    return lambda: change(not marked)


def eager_only(part: Any) -> bool:
    """Whether a model supports no attention of transformers but the eager one."""
    return not any(getattr(part, f"_supports_{kind}", False) for kind in IMPLEMENTATIONS)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query (B, H, Nq, D), key, value (B, Hkv, Nk, D) -> output (B, Nq, H, D), weights or None."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attnzoo does not support {name}, which {type(module).__name__} uses")
    child = module._modules.get(NAME)
    variant = _variant(child)
    calls = None if torch.compiler.is_compiling() else _observed.get()
    if child is None and calls is None and not _is_in_host(module):
        raise ValueError(
            f'attn_implementation="{NAME}" needs a converted model, and {type(module).__name__} is '
            "not part of one: call attnzoo.integrations.transformers.convert(model, variant), "
            "which also sets the attention implementation"
        )
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and getattr(module, HOST, None) == "eager":
        is_causal = False  # eager attention ignores the flag, which is wrong in BridgeTower
    mask = masks.read_mask(attention_mask, is_causal, query.shape[2], key.shape[2])
    positional = getattr(child, "needs_positions", None)
    if variant is not None and positional is not None:
        # A dense mask includes causality.
        causal = is_causal if isinstance(attention_mask, Tensor) else mask.causal
        _check_positions(variant, positional, module, mask, causal, kwargs)
    sharding = _sharding(child)
    if sharding is not None:
        mask = _for_shards(module, mask, query, sharding, kwargs)
    keys = key.shape[2]
    heads = query.shape[1] // getattr(child, "queries", 1)
    mask = with_selection(module, mask, heads, keys, kwargs)
    arguments = bias_options(
        module, mask, attention_mask, kwargs.get("position_bias"), query.shape[2], keys,
        sharding is not None,
    )  # fmt: skip
    used = slice(mask.start, mask.stop)
    unused = mask.start, keys - mask.stop  # keys before and after those in use
    key, value = key[:, :, used], value[:, :, used]
    options: dict[str, Any] = {
        **arguments,
        "segment_ids": packed_segments(module, mask, is_causal, query, key, kwargs),
        "scale": scaling, "dropout_p": dropout, "enable_gqa": key.shape[1] != query.shape[1],
    }  # fmt: skip
    softcap, sinks = kwargs.get("softcap"), _sinks(kwargs)
    if calls is not None:
        log_n, rows = _log_n(query, key, value, options)
        dims = query.shape[-1], value.shape[-1]
        selects = any(kwargs.get(name) is not None for name in NAMES)
        extras = sinks is not None, kwargs.get("position_bias") is not None, selects
        calls.append(ObservedCall(module, heads, log_n, rows, softcap, *extras, *dims))
    name, params = ("softmax", {}) if sinks is None else _with_sinks(module, variant, sinks)
    options |= params
    need_weights, weights = _need_weights(kwargs), None
    if child is None and not need_weights:  # a layer that was not converted
        result: Any = attention(query, key, value, name, softcap=softcap, **options)
    else:
        if child is None:
            child = Attention(name, heads, softcap=softcap, given=tuple(params))
        _check_child(module, child, heads, softcap)
        options |= from_hidden_states(module, child, kwargs, keys, used)
        result = child(query, key, value, need_weights=need_weights, **options)
    if need_weights:
        result, weights = result
        weights = nn.functional.pad(weights, unused)
    return result.transpose(1, 2).contiguous(), weights


def _check_positions(
    variant: Variant,
    positional: str,
    module: nn.Module,
    mask: Mask,
    causal: bool,
    kwargs: dict[str, Any],
) -> None:
    """Raises ValueError if positions are not known in this call, on which the child depends."""
    layer, (_, _, queries, keys) = type(module).__name__, mask.shape
    check_cross_attention(positional, layer, not causal and queries != keys)
    windowed = kwargs.get("sliding_window") or mask.window or mask.start or mask.chunk
    windowed = windowed or any(kwargs.get(name) is not None for name in NAMES)
    if variant.absolute and windowed:  # caches drop keys, and a dense mask looks like padding
        raise ValueError(
            f"{variant.name} does not support the sliding window, the chunks or the selected keys "
            f"of {layer}: the position of a query in its sequence is not known there; convert "
            "other layers only"
        )


def _check_child(module: nn.Module, child: Any, heads: int, softcap: float | None) -> None:
    """Raises ValueError if the child was made for another call."""
    if heads != child.num_heads:
        raise ValueError(
            f"{type(module).__name__} must have the {child.num_heads} heads of its variant, got "
            f"{heads}: under tensor parallelism call shard_heads(mesh) of each "
            "attnzoo.nn.Attention in the model (wrappers do not support it), otherwise convert the "
            "model again"
        )
    if softcap != child.softcap:
        raise ValueError(
            f"softcap of {type(module).__name__} must be {child.softcap}, with which it was "
            f"converted, got {softcap}: convert the model again"
        )


def _is_in_host(module: nn.Module) -> bool:
    """Whether a layer belongs to a converted model, also one that was put there later."""
    spec = getattr(getattr(module, "config", None), NAME, None)
    return hasattr(module, HOST) or spec is not None


def _sharding(child: nn.Module | None) -> Any:
    """The `attnzoo.nn.sharding.Sharding` of a converted layer, or None."""
    inner = getattr(child, "attention", child)  # that of a wrapper
    return getattr(inner, "sharding", None)


def _for_shards(
    module: nn.Module, mask: Mask, query: Tensor, sharding: Any, kwargs: dict[str, Any]
) -> Mask:
    """The mask of a shard of a sequence, whose mask transformers has made for the shard alone.

    A window at least as long as the shard is missing in it.
    """
    name, positions = type(module).__name__, kwargs.get("position_ids")
    for selection in NAMES:
        if kwargs.get(selection) is not None:
            raise ValueError(
                f"{name} must not select keys when its sequence is sharded, got {selection}: a "
                "rank selects among its own keys only"
            )
    if query.shape[2] == 1:
        raise ValueError(f"{name} must have at least 2 tokens per rank, got 1")
    if isinstance(positions, Tensor) and positions.dim() <= 2 and is_readable(positions):
        expected = sharding.positions(query.shape[2], positions.device)
        if positions.shape[-1] == len(expected) and not bool((positions == expected).all()):
            raise ValueError(
                "position_ids must be the positions of the rank's tokens in the sequence, as in "
                f"Batch.positions; expected {expected[:4].tolist()}…, got "
                f"{positions.reshape(-1, len(expected))[0, :4].tolist()}…"
            )
    if mask.chunk or mask.segment_ids is not None or kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{name} must have neither chunked attention nor packed sequences when its sequence is "
            "sharded; pass an attention_mask, as Batch.transformers does"
        )
    window = kwargs.get("sliding_window")
    return mask._replace(window=window) if window and not mask.window else mask


def host_sink(variant: Variant) -> str | None:
    """The name of the parameter that takes the scores of a host's sinks."""
    return next((param.name for param in variant.params if param.host_sink), None)


def _sinks(kwargs: dict[str, Any]) -> Tensor | None:
    """The scores of the host's sinks, (H,) or (B, H, Nq)."""
    per_query = kwargs.get("sinks")  # (B, H, Nq, 1)
    return kwargs.get("s_aux") if per_query is None else per_query.squeeze(-1)


def _with_sinks(
    module: nn.Module, variant: Variant | None, sinks: Tensor
) -> tuple[str, dict[str, Tensor]]:
    """The variant of a layer with sinks, and the parameter that takes their scores."""
    variant = variant or _softmax_with_sinks()
    name = host_sink(variant)
    if name is None:
        raise ValueError(
            f"{variant.name} does not support the sinks of {type(module).__name__}; variants that "
            f"do: {variants_with(host_sink)}"
        )
    return variant.name, {name: sinks}


def variants_with(has: Callable[[Variant], Any]) -> str:
    """The names of the variants for which ``has(variant)`` is true, as text."""
    return ", ".join(name for name in list_variants() if has(get_variant(name))) or "none"


def _softmax_with_sinks() -> Variant:
    """Softmax with the sinks of a host, for layers that were not converted."""
    every = map(get_variant, list_variants())
    return next(one for one in every if host_sink(one) and one.scores and len(one.params) == 1)


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
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _log_n(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[float, int]:
    """The fields log_n and rows of an `ObservedCall`."""
    call = check_call(query, key, value, **options)
    counts = call.counts.expand(call.batch, call.heads, call.queries).float()
    counts = counts[counts > 0]
    return float(counts.log().mean()) if len(counts) else 0.0, len(counts)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, masks.make_mask)
