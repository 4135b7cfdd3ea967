"""The attention modules of a model, found by running it."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from attnzoo.core.checks import plain
from attnzoo.integrations.transformers.adapted import adapt, calls_interface
from attnzoo.integrations.transformers.interface import ObservedCall, observe_calls
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.wrapped import observe_hidden_states

Batch = Tensor | Mapping[str, Any]
CONTAINERS = dict, OrderedDict, list, set  # of what a forward may change


class Observed(NamedTuple):
    """What a run of a model shows."""

    calls: dict[str, ObservedCall]  # by the name of the module, in the order of execution
    batch: dict[str, Any]  # a batch that the model runs on
    idle: list[Any]  # configs of parts without a call, such as those that did not run


def attention_modules(model: Any, batches: list[dict[str, Any]] | None = None) -> Observed:
    """The attention modules of a model. Does not change the model."""
    restore, undo = restorer(model), adapt(model, True)
    try:
        set_implementations(model, NAME)
        with observe_calls() as calls, observe_hidden_states(model) as hidden:
            if batches is None:
                batch = _run_minimal(model, calls)
            else:
                run_model(model, batches)
                batch = batches[0]
    finally:
        undo()
        restore()
    names = {id(module): name for name, module in model.named_modules()}
    merged: dict[str, ObservedCall] = {}
    for call in calls:
        name = names[id(call.module)]
        merged[name] = merged[name].merge(call) if name in merged else call
    if not merged:
        raise ValueError(
            f"model must have attention layers, but {type(model).__name__} called none"
        )
    called = {id(call.module) for call in merged.values()}
    active, idle = [], []
    for _, part in parts_of(model):
        (idle if called.isdisjoint(map(id, part.modules())) else active).append(part.config)
    idle = [config for config in idle if not any(config is other for other in active)]
    numbered = {
        name: call._replace(number=number, hidden=hidden.get(id(call.module)))
        for number, (name, call) in enumerate(merged.items())
    }
    return Observed(numbered, batch, idle)


def _run_minimal(model: Any, calls: list[ObservedCall]) -> dict[str, Any]:
    """Runs the model on a minimal batch and returns it; ``calls`` then hold this run only."""
    cause: Exception | None = None
    for batch in minimal_batches(model):
        calls.clear()
        try:
            run_model(model, [batch])
        except Exception as error:
            if _is_raised_here(error):
                raise ValueError(f"{type(model).__name__} cannot be converted: {error}") from error
            cause = error
        else:
            return batch
    name, main = type(model).__name__, model.main_input_name
    reason = f"there is no default for its main input {main!r}"
    if cause is not None:
        first_line = str(cause).strip().partition("\n")[0]
        reason = f"on a minimal batch its forward raised {type(cause).__name__}: {first_line}"
    raise ValueError(
        f"inputs must be given for {name}: convert(model, variant, inputs=a mapping of its forward "
        f"arguments); {reason}"
    ) from cause


def _is_raised_here(error: BaseException) -> bool:
    """Whether attnzoo raised the error, not the model."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("attnzoo.")


def run_model(model: Any, batches: list[dict[str, Any]]) -> None:
    """Runs the model in evaluation mode, without gradients. It and the batches stay as they are.

    Compiled layers run uncompiled, because a graph does not show their calls.
    """
    restore = _state_restorer(model)
    try:
        with torch.no_grad(), _uncompiled():
            for batch in batches:
                model.eval()(**_with_own_caches(batch))
    finally:
        restore()


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled. Call it in a ``with`` statement only.

    `set_stance` takes effect at once, so an error before the ``with`` statement would leave every
    compiled function of the process uncompiled.
    """
    if "torch._dynamo" not in sys.modules:  # loading it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _state_restorer(model: nn.Module) -> Callable[[], None]:
    """A function that undoes what a forward changes: attributes, modules, buffers and configs.

    BigBirdPegasus replaces its attention for a short input, and rotary frequencies may follow the
    length.
    """
    restore_configs = restorer(model)
    states = []
    for module in model.modules():
        state = dict(module.__dict__)
        inside = [(x, x.copy()) for x in state.values() if type(x) in CONTAINERS]
        states.append((module, state, inside))
    # Copies on the CPU, because quantized weights are buffers too.
    plain_buffers = [x for x in model.buffers() if type(x) is Tensor and not x.is_meta]
    buffers = [(x, x.to("cpu", copy=True)) for x in plain_buffers]

    def restore() -> None:
        for module, state, inside in states:
            module.__dict__.clear()
            module.__dict__.update(state)
            for x, before in inside:
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)
        for x, before in buffers:
            if not torch.equal(x.cpu(), before):
                with torch.no_grad():
                    x.copy_(before)
        restore_configs()

    return restore


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


def minimal_batches(model: Any) -> list[dict[str, Tensor]]:
    """Batches of one short input of zeros, sized by the config. The model may need the last one."""
    image = _image(model)
    if model.main_input_name == "pixel_values" and image is not None:
        return [{"pixel_values": image}]
    if model.main_input_name != "input_ids":
        return []
    ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
    # Fewer, because a call with as many queries as keys does not show cross-attention.
    decoder = {"decoder_input_ids": ids[:, :3]} if model.config.is_encoder_decoder else {}
    text = {"input_ids": ids, **decoder}
    if image is None or "pixel_values" not in inspect.signature(model.forward).parameters:
        return [text]
    return [text, {**text, "pixel_values": image}]


def _image(model: Any) -> Tensor | None:
    """An image of zeros in the size that a config of the model names, or None."""
    for config in configs_of(model).values():
        size = getattr(config, "image_size", None)
        size = [size, size] if isinstance(size, int) else size
        if isinstance(size, (list, tuple)) and len(size) == 2:
            shape = 1, getattr(config, "num_channels", 3), *size
            return torch.zeros(shape, device=model.device, dtype=model.dtype)
    return None


def chosen_names(
    calls: Mapping[str, ObservedCall], layers: Sequence[int | str] | None
) -> list[str]:
    names = list(calls)
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
    by_config = {name: config._attn_implementation for name, config in configs_of(model).items()}
    return {name: value for name, value in by_config.items() if value != NAME}


def set_implementations(
    model: Any, chosen: str | Mapping[str, str | None], excluded: Sequence[Any] = ()
) -> None:
    """Sets the attention implementations of a model and of all its parts.

    ``chosen`` is a name for all, or what `implementations` returned; ``excluded`` are configs that
    stay as they are. Transformers' own setter skips some parts, and raises for a sub-config without
    a sub-model, which has None.
    """
    fixed = [part.config for _, part in parts_of(model) if not calls_interface(part)]
    for name, config in configs_of(model).items():
        if any(config is other for other in (*fixed, *excluded)):
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
    return [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and (part is model or part.config is not model.config)
    ]


def batches_of(argument: str, inputs: Any, model: Any) -> list[dict[str, Any]]:
    """Inputs of any accepted type as keyword arguments of the model's forward."""
    main = model.main_input_name
    if isinstance(inputs, Tensor):
        unbatched = main == "input_ids" and inputs.dim() == 1
        return [{main: inputs[None] if unbatched else inputs}]
    if isinstance(inputs, Mapping):
        if isinstance(inputs.get(main), (list, tuple)):
            raise TypeError(
                f"{argument}: {main} must be a tensor, got {type(inputs[main]).__name__}; call the "
                "tokenizer with return_tensors='pt'"
            )
        return [dict(inputs)]
    if isinstance(inputs, (list, tuple)) and all(isinstance(x, (Tensor, Mapping)) for x in inputs):
        if not inputs:
            raise ValueError(f"{argument} must hold at least one batch, got none")
        return [batch for one in inputs for batch in batches_of(argument, one, model)]
    kind = type(inputs).__name__
    if isinstance(inputs, (list, tuple)):
        kind += f" of {', '.join(sorted({type(x).__name__ for x in inputs}))}"
    raise TypeError(
        f"{argument} must be a tensor of {main}, a mapping of the model's forward arguments, or a "
        f"list of these, got {kind}"
    )
