"""Checks of the arguments of `convert` against the model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnzoo.core.checks import is_dtensor, is_int, plain
from attnzoo.core.parameters import check_names
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Variant
from attnzoo.functional.explain import explain
from attnzoo.integrations.transformers.adapted import calls_interface
from attnzoo.integrations.transformers.interface import (
    ObservedCall,
    eager_only,
    host_sink,
    variants_with,
)
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.modules import parts_of
from attnzoo.integrations.transformers.wrapped import inner
from attnzoo.nn import Attention, Wrapper
from attnzoo.nn.wrappers import Choice, check_no_wrapper, named_wrapper


def _owner(model: Any, module: Any) -> Any:
    """The innermost model with its own config that contains the module."""
    return [part for _, part in parts_of(model) if any(one is module for one in part.modules())][-1]


def taken_sink(
    model: Any, variant: Variant, call: ObservedCall, params: dict[str, Any]
) -> str | None:
    """The variant's parameter that takes the host's sinks; None if the host has none."""
    if not call.sinks:
        return None
    host, sink = type(call.module).__name__, host_sink(variant)
    if sink is None:
        raise ValueError(
            f"variant must take the learned sinks of {host}, got {variant.name!r}; variants that "
            f"do: {variants_with(host_sink)}"
        )
    owner = _owner(model, call.module)
    # It may change keys and masks in ways that only itself knows. Other reasons to support only
    # eager attention are a bias of the scores, and keys that the model selects.
    if eager_only(owner) and not (call.bias or call.selects):
        raise ValueError(
            f"model must support another attention than its own eager one, which the sinks of "
            f"{host} need, got {type(owner).__name__}"
        )
    if sink in params:
        raise ValueError(
            f"{sink} must not be given, because {host} passes its own learned sinks, got "
            f"{params[sink]!r}"
        )
    return sink


def check_logits(call: ObservedCall, variant: Variant) -> None:
    """Raises if the host has a softcap and the variant has no logits to cap."""
    if call.softcap is not None and not variant.has_logits:
        raise ValueError(
            f"variant must support the softcap of {type(call.module).__name__}, got "
            f"{variant.name!r}: it has no logits for a softcap"
        )


def check_score_terms(call: ObservedCall, child: Attention | Wrapper) -> None:
    """Raises if the variant of a child does not support the host's softcap or its bias."""
    if call.softcap is None and not call.bias:
        return
    attention = inner(child)
    size = call.qk_dim if child is attention else child.map_dim  # pyright: ignore
    q, k, v = torch.zeros(3, 1, attention.num_heads, 2, size).unbind()
    call_params: dict[str, Any] = {n: torch.zeros(attention.num_heads) for n in attention.given}
    if attention.projections is not None:
        weight = next(attention.projections.parameters())
        hidden = weight.new_zeros(1, 2, weight.shape[-1])
        call_params |= attention.projected(hidden, hidden)
    params = {**attention._params(), **call_params}
    terms = {"softcap": call.softcap, "position_bias": q.new_zeros(2, 2) if call.bias else None}
    for name, term in terms.items():
        option = {"attn_mask" if name == "position_bias" else name: term}
        plan = explain(q, k, v, child.variant, is_causal=True, **option, **params)
        if plan.reason is not None:
            raise ValueError(
                f"variant must support the {name} of {type(call.module).__name__}, got "
                f"{child.variant!r}: {plan.reason}"
            )


def chosen_variant(name: str, params: dict[str, Any]) -> Variant:
    """The variant with this name; raises unless the parameters are its own, not of the host."""
    for other in ("num_heads", "softcap", "given", "head_dim"):
        if other in params:
            raise TypeError(f"convert does not accept {other}, which comes from the model")
    check_no_wrapper(name)
    variant = get_variant(name)
    check_names(variant, params)
    return variant


def check_convertible(model: Any) -> None:
    """Raises unless convert can replace the attention of the model."""
    check_model(model)
    _check_not_half(model)
    _check_not_sharded(model)
    if (parameters := list(model.parameters())) and all(x.is_meta for x in parameters):
        raise ValueError("model must have its weights loaded, but they are on meta")


def check_model(model: Any) -> None:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    inside = [module for module in modules if isinstance(module, PreTrainedModel)]
    if inside and inside[0] is not model:
        what = f"pass the {type(inside[0]).__name__} inside {type(model).__name__}, not the wrapper"
        if hasattr(model, "get_base_model"):
            what += (
                f": convert it before get_peft_model, with {NAME!r} in modules_to_save; or pass "
                "model.get_base_model(), without whose learned parameters adapters are saved"
            )
        raise TypeError(what)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if not calls_interface(model):
        raise ValueError(
            f"model must use transformers' AttentionInterface, which {type(model).__name__} does "
            "not"
        )


def possible_identity(variant: Variant) -> dict[str, Any] | None:
    """The identity of a variant, unless it fixes what the variant makes from hidden states."""
    projected = {param.name for param in variant.params if param.projection}
    return None if projected & set(variant.identity or ()) else variant.identity


def warn_of_training(model: Any, variant: Variant, wrapper: Choice, start: str | None) -> None:
    """Warns if a conversion changes what a loaded model has learned with softmax.

    A softmax of other scores stays close to it. A model that was not loaded has no name.
    """
    in_eval = {param.name: param.default for param in variant.params} | variant.in_eval
    identity = variant.identity
    is_softmax = identity is not None and all(in_eval.get(x) == y for x, y in identity.items())
    close = start is not None or variant.scores is not None or is_softmax
    if not model.name_or_path or (close and wrapper is None):
        return
    what = repr(variant.name) if wrapper is None else f"the wrapper {named_wrapper(wrapper)[0]!r}"
    warnings.warn(
        f"train the converted model before you use it: {what} does not keep what "
        f"{model.name_or_path!r} has learned; without a wrapper, start='identity' keeps it for "
        f"{variants_with(possible_identity)}; warn=False turns this warning off",
        stacklevel=3,
    )


def _check_not_half(model: Any) -> None:
    """Raise if the model is the encoder or the decoder of an encoder-decoder, without both.

    The two share a config and have equal names of modules. Loaded from this config, both would be
    converted.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    both = hasattr(model, "encoder") and hasattr(model, "decoder")
    if model.config.is_encoder_decoder and len(parts) == 1 and not both:
        raise ValueError(
            f"model must be a whole model, got {type(model).__name__}, which shares its config "
            "with the other half: convert the whole model, and choose the half with layers"
        )


def embed_dim(call: ObservedCall) -> int:
    """The number of features of the hidden states."""
    return call.heads * call.qk_dim if call.hidden is None else call.hidden.shape[-1]


def wrapper_entry(wrapper: Choice, call: ObservedCall) -> dict[str, Any] | None:
    """What the config stores about the wrapper of a layer; None if there is no wrapper."""
    if wrapper is None:
        return None
    name, arguments = named_wrapper(wrapper)
    layer = getattr(call.module, "layer_idx", None)
    return {
        "name": name,
        "arguments": {key: plain(copy.deepcopy(x)) for key, x in arguments.items()},
        "embed_dim": embed_dim(call),
        "qk_dim": call.qk_dim,
        "v_dim": call.v_dim,
        "layer": layer if isinstance(layer, int) and is_int(layer) else call.number,
    }


def check_whole_heads(call: ObservedCall, child: Attention | Wrapper, wrapper: Choice) -> None:
    """Raises if a wrapper divides heads whose sinks are scores of a whole head."""
    if call.sinks and isinstance(child, Wrapper) and child.map_dim != child.qk_dim:
        raise ValueError(
            f"wrapper must not divide the features of a head, because the sinks of "
            f"{type(call.module).__name__} are scores of whole heads, got "
            f"{named_wrapper(wrapper)[0]!r}"
        )


def _check_not_sharded(model: Any) -> None:
    """Raises if a part is sharded.

    FSDP would not manage the new parameters. Under tensor parallelism, each rank would get those of
    its own heads, and save only them.
    """
    for name, module in model.named_modules():
        classes = {base.__name__ for base in type(module).__mro__}
        if classes & {"FSDPModule", "FullyShardedDataParallel"}:
            what = type(module).__name__
            raise ValueError(
                f"model must not be sharded, got {what}{f' at {name}' if name else ''}: call "
                "convert before fully_shard"
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"model must not be sharded, got a DTensor at {name}: convert and save the model "
                "before you load it with tp_plan"
            )


def check_loaded(name: str, module: Any) -> None:
    """Raises if the weights of an attention module are on meta."""
    if any(x.device.type == "meta" for x in module.parameters()):
        raise ValueError(f"model must have its weights loaded, but those of {name} are on meta")
