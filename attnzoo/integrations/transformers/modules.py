"""The attention modules of a model, found by running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
    restore = restorer(model)
    try:
        set_implementations(model, NAME)
        with observe_calls() as calls, observe_hidden_states(model) as hidden:
            _run_or_ask(model, batches)
    finally:
        restore()
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
    """Runs the model in evaluation mode, without gradients. The batches stay as they are."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
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


def configs_of(model: Any) -> dict[str, Any]:
    """The configs of a model and of its parts, by name.

    "" is the model's own. A sub-config has its name in the config, such as "text_config". Another
    config of a part, such as T5's for its encoder, has the name of the module.
    """
    configs: dict[str, Any] = {}
    for module_name, part in parts_of(model):
        if any(part.config is config for config in configs.values()):
            continue
        name = module_name
        while name in configs:  # the name of a sub-config too
            name += "."
        queue = [(name, part.config)]
        while queue:
            name, config = queue.pop()
            configs[name] = config
            for key in config.sub_configs:
                sub = getattr(config, key, None)
                if sub is not None and not any(sub is other for other in configs.values()):
                    queue.append((f"{name}.{key}" if name else key, sub))
    return configs


def implementations(model: Any) -> dict[str, str | None]:
    """Attention implementations by the name of the config, as in `configs_of`."""
    found = {name: config._attn_implementation for name, config in configs_of(model).items()}
    return {name: value for name, value in found.items() if value != NAME}


def set_implementations(model: Any, chosen: str | Mapping[str, str | None]) -> None:
    """Sets the attention implementations of a model and of all its parts.

    ``chosen`` is a name for all, or what `implementations` returned. Transformers' own setter
    skips some parts, and raises for a sub-config without a sub-model, which has None.
    """
    parts = [part for _, part in parts_of(model) if not part._can_set_attn_implementation()]
    for name, config in configs_of(model).items():
        if any(config is part.config for part in parts):
            continue
        value = chosen if isinstance(chosen, str) else chosen.get(name, chosen.get("", "eager"))
        config._attn_implementation_internal = value


def restorer(model: Any) -> Callable[[], None]:
    """A function that gives all configs of a model the values that they have now."""
    states = [(config, dict(config.__dict__)) for config in configs_of(model).values()]

    def restore() -> None:
        for config, values in states:
            config.__dict__.clear()
            config.__dict__.update(values)

    return restore


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
