"""The attention modules of a model, found by running it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnzoo.core.checks import plain
from attnzoo.integrations.transformers.interface import ObservedCall, observe_calls
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.wrapped import observe_hidden_states

Batch = Tensor | Mapping[str, Any]


def attention_modules(
    model: Any, batches: list[dict[str, Any]] | None = None
) -> dict[str, ObservedCall]:
    """The attention modules by name, in the order of execution. Does not change the model."""
    before = implementations(model)
    try:
        set_implementations(model, NAME)
        with observe_calls() as calls, observe_hidden_states(model) as hidden:
            _run_or_ask(model, batches)
    finally:
        set_implementations(model, before)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, ObservedCall] = {}
    for call in calls:
        name = names[id(call.module)]
        found[name] = found[name].merge(call) if name in found else call
    if not found:
        raise ValueError(
            f"model must have attention layers, but {type(model).__name__} called none"
        )
    return {
        name: call._replace(number=number, hidden=hidden.get(id(call.module)))
        for number, (name, call) in enumerate(found.items())
    }


def _run_or_ask(model: Any, batches: list[dict[str, Any]] | None) -> None:
    """As `run`. If the model fails on a minimal batch, the error says how to give another one."""
    if batches is not None:
        run(model, batches)
        return
    batch = minimal_batch(model)
    try:
        run(model, [batch])
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} failed on the default batch; if it needs other inputs, give "
            f"them as inputs=. {type(error).__name__}: {error}"
        ) from error


def run(model: Any, batches: list[dict[str, Any]]) -> None:
    """Runs the model in evaluation mode, without gradients. The batches stay as they are.

    Compiled layers run uncompiled, because a graph does not show their calls.
    """
    training = {module: module.training for module in model.modules()}
    compiler = "torch._dynamo" in sys.modules  # loading it takes seconds
    uncompiled = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
    try:
        with torch.no_grad(), uncompiled:
            for batch in batches:
                model.eval()(**_with_own_caches(batch))
    finally:
        for module, before in training.items():
            module.training = before


def _with_own_caches(batch: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, and copies of all else, because the model may append to a cache."""
    with _CopiesWithoutGradients():
        return copy.deepcopy(batch, {id(x): x for x in batch.values() if isinstance(x, Tensor)})


class _CopiesWithoutGradients(TorchFunctionMode):
    """`deepcopy` raises for the tensors of a cache that was filled with gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def minimal_batch(model: Any) -> dict[str, Tensor]:
    """A batch of one short input of zeros, sized by the config."""
    config, main, device = model.config, model.main_input_name, model.device
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = 1, getattr(config, "num_channels", 3), height, width
        return {main: torch.zeros(shape, device=device, dtype=model.dtype)}
    if main == "input_ids":
        ids = torch.zeros(1, 4, dtype=torch.long, device=device)
        # Fewer, because a call with as many queries as keys does not show cross-attention.
        decoder = {"decoder_input_ids": ids[:, :3]} if config.is_encoder_decoder else {}
        return {main: ids, **decoder}
    raise ValueError(
        f"inputs must be given for {type(model).__name__}, because its main input {main!r} has no "
        "default batch"
    )


def chosen_names(
    found: Mapping[str, ObservedCall], layers: Sequence[int | str] | None
) -> list[str]:
    names = list(found)
    if layers is None:
        return names
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise TypeError(
            f"layers must be a non-empty list of numbers or names, or None, got {layers!r}"
        )
    chosen = []
    for layer in map(plain, layers):
        if isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(names) <= layer < len(names):
                raise ValueError(
                    f"layers must be from {-len(names)} to {len(names) - 1}, got {layer}"
                )
            layer = names[layer]
        if layer not in names:
            raise ValueError(f"layers must be among {', '.join(names)}, got {layer!r}")
        chosen.append(layer)
    return chosen


def implementations(model: Any) -> dict[str, str]:
    """Attention implementations by the name of the sub-config, or "" for the model's config."""
    subs = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    configs = {"": model.config, **subs}
    return {n: c._attn_implementation for n, c in configs.items() if c is not None}


def set_implementations(model: Any, chosen: str | dict[str, str]) -> None:
    """Sets the attention implementations of a model and of all its parts.

    ``chosen`` is a name for all, or what `implementations` returned.
    """
    model.set_attn_implementation(chosen)
    # Before 5.20, transformers skips parts with another config of the same class (T5's encoder).
    config = model.config
    reached = {id(x) for x in (config, *(getattr(config, n, None) for n in config.sub_configs))}
    for _, part in parts_of(model):
        if type(part.config) is type(config) and id(part.config) not in reached:
            part.set_attn_implementation(config._attn_implementation)


def parts_of(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the model and of each sub-model with its own config."""
    from transformers import PreTrainedModel

    return [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and (part is model or part.config is not model.config)
    ]


def batches_of(argument: str, given: Any, model: Any) -> list[dict[str, Any]]:
    """Inputs of any accepted type as keyword arguments of the model's forward."""
    main = model.main_input_name
    if isinstance(given, Tensor):
        unbatched = main == "input_ids" and given.dim() == 1
        return [{main: given[None] if unbatched else given}]
    if isinstance(given, Mapping):
        if isinstance(given.get(main), (list, tuple)):
            raise TypeError(
                f"{argument}: {main} must be a tensor, got {type(given[main]).__name__}; call the "
                "tokenizer with return_tensors='pt'"
            )
        return [dict(given)]
    if isinstance(given, (list, tuple)) and all(isinstance(x, (Tensor, Mapping)) for x in given):
        if not given:
            raise ValueError(f"{argument} must hold at least one batch, got none")
        return [batch for one in given for batch in batches_of(argument, one, model)]
    kind = type(given).__name__
    if isinstance(given, (list, tuple)):
        kind += f" of {', '.join(sorted({type(x).__name__ for x in given}))}"
    raise TypeError(
        f"{argument} must be a tensor of {main}, a mapping of the model's forward arguments, or a "
        f"list of these, got {kind}"
    )
