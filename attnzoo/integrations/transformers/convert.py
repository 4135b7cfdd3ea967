"""convert() and revert(): replace the attention of a transformers model, and undo it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from attnzoo.core.registry import get_variant, list_variants
from attnzoo.integrations.transformers.interface import NAME, ObservedCall, observe_calls
from attnzoo.nn import Attention

VERSION = 1
Batch = Tensor | Mapping[str, Any]
ModelT = TypeVar("ModelT")


def convert(
    model: ModelT,
    variant: str,
    layers: Sequence[int | str] | None = None,
    *,
    learn: tuple[str, ...] | list[str] | None = None,
    start: Literal["identity"] | None = None,
    calibrate: Batch | Sequence[Batch] | None = None,
    inputs: Batch | Sequence[Batch] | None = None,
    **params: Any,
) -> ModelT:
    """Replaces the attention of a transformers model by a variant, in place.

    Each attention module gets a child `attnzoo.nn.Attention` named ``attnzoo``, which owns the
    parameters of the variant. The model's attention implementation becomes "attnzoo". Layers
    that are not converted keep softmax. A second call can convert them to another variant.

    Args:
        model: a `transformers.PreTrainedModel` that uses transformers' AttentionInterface.
        variant: a name from `attnzoo.list_variants`.
        layers: the layers to convert: numbers in the order of execution, or module names. None is
            all of them.
        learn: names of the variant's parameters to learn, as for `attnzoo.nn.Attention`.
        start: "identity" starts with parameter values for which the variant equals softmax (ssmax:
            s = 0, b = 1; sink: b = -100), so that the model's outputs do not change. These
            parameters are learned, unless ``learn`` is given; see Notes for sink. None starts with
            the variant's own initial values.
        calibrate: inputs of typical length: a tensor of token ids, a mapping of the model's forward
            arguments, or a list of these. Sets the initial values of each layer such that the gain,
            the factor on the scores, is 1 on average over queries (ssmax: s = 1 / mean log n).
        inputs: inputs for the run that finds the attention modules; accepts the same types as
            ``calibrate``. None uses ``calibrate`` if given, else a minimal batch.
        **params: parameters of the variant, as for `attnzoo.nn.Attention`.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: an argument is wrong, or the model's attention has a feature that
            attnzoo does not support (a softcap, a sink, a position bias). The model is unchanged.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import convert
        >>> config = transformers.BertConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = convert(transformers.BertModel(config), "entmax", layers=[1], alpha=1.3)
        >>> model.encoder.layer[1].attention.self.attnzoo
        Attention('entmax', num_heads=4, alpha=1.3)

    Notes:
        At b = -100 the gradient of a sink vanishes in fp32, so training does not move it. To
        train a sink, start with ``convert(model, "sink", b=-10.0)``, which is close to softmax.

        The model is run once to find its attention modules, their order and numbers of heads.

        In an encoder, where all queries see equally many keys, a calibrated model stays close to
        the original. In a causal model it may differ as much as with the variant's own initial
        values: queries with many keys get sharper weights, queries with few keys flatter weights.

        Exclude the learned parameters from weight decay with `attnzoo.nn.parameter_groups`. In a
        model cast to bf16 as a whole the parameters are bf16 too; gains are computed in fp32.
    """
    _check_model(model)
    for other, given in (("start", start), ("inputs", inputs)):
        if calibrate is not None and given is not None:
            raise ValueError(f"{other} must be None when calibrate is given")
    if get_variant(variant).calibrate is None and calibrate is not None:
        known = ", ".join(name for name in list_variants() if get_variant(name).calibrate)
        raise ValueError(
            f"calibrate must be None: {variant!r} cannot be calibrated; variants that can: {known}"
        )
    if start is not None:
        learn, params = _from_identity(variant, start, learn, params)
    name = "inputs" if calibrate is None else "calibrate"
    given = inputs if calibrate is None else calibrate
    calls = attention_modules(model, None if given is None else _batches(name, given, model))
    chosen = _chosen(calls, layers)
    values = {
        name: {**(_calibrated(variant, call) if calibrate is not None else {}), **params}
        for name, call in calls.items()
        if name in chosen
    }
    children = {
        name: Attention(variant, calls[name].heads, learn=learn, **own)
        for name, own in values.items()
    }
    entries = {
        name: {
            "variant": variant, "num_heads": calls[name].heads,
            "learn": list(children[name].learned),
            "params": {key: json_value(value) for key, value in own.items()},
        } for name, own in values.items()
    }  # fmt: skip
    specs = [(part.config, _spec(part, prefix, entries)) for prefix, part in _parts(model)]
    attach(model, children)
    for config, spec in specs:
        if spec["layers"]:
            write_spec(config, spec)
    return model


def _parts(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the model and of each sub-model with its own config."""
    from transformers import PreTrainedModel

    return [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and (part is model or part.config is not model.config)
    ]


def _spec(part: Any, prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The spec for the config of a sub-model, with module names relative to that sub-model."""
    start = f"{prefix}." if prefix else ""
    inside = {n.removeprefix(start): e for n, e in entries.items() if n.startswith(start)}
    # Two models may share a config: keep only entries of layers that this model has converted.
    known = own_layers(part)
    before = getattr(part.config, NAME)["before"] if known else implementations(part)
    # A new dict, because copies of a config share the old one.
    return {"version": VERSION, "before": before, "layers": {**known, **inside}}


def write_spec(config: Any, spec: dict[str, Any]) -> None:
    """Writes the variants of the layers into a config.

    ``attn_implementation``, unlike ``_attn_implementation``, is saved, and transformers reads it
    when it loads the config. A process that has not imported this package then gets an error.
    """
    setattr(config, NAME, spec)
    config.attn_implementation = NAME


def own_layers(model: Any) -> dict[str, Any]:
    """The config's entries of the converted layers of this model, by module name."""
    spec = getattr(model.config, NAME, None) or {"layers": {}}
    children = {name for name, module in model.named_modules() if NAME in module._modules}
    layers = {}
    for name, entry in spec["layers"].items():
        matches = [n for n in possible_names(model, name) if n in children]
        layers |= dict.fromkeys(matches[:1], entry)
    return layers


def possible_names(model: Any, name: str) -> Iterator[str]:
    """A module name with and without the prefix of the base model, e.g. "model."."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix)
    yield prefix + name


def implementations(model: Any) -> dict[str, str]:
    """Attention implementations, keyed by the sub-config's name ("" is the model's own config)."""
    own = {"": model.config._attn_implementation}
    subs = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    return own | {n: c._attn_implementation for n, c in subs.items() if c is not None}


def attach(model: Any, children: Mapping[str, Attention], loading: bool = False) -> None:
    """Adds a child to each named module, on its device, and switches the model to "attnzoo".

    With ``loading`` the weights may still be on meta.
    """
    for name, attention in children.items():
        module = model.get_submodule(name)
        device = next((p.device for p in module.parameters()), model.device)
        if device.type == "meta" and not loading:
            raise ValueError(f"model must have its weights loaded, but those of {name} are on meta")
        # Transformers skips the initialization of modules with this attribute.
        attention._is_hf_initialized = device.type != "meta"
        module.add_module(NAME, attention.to(device).train(module.training))
    model.set_attn_implementation(NAME)


def revert(model: ModelT) -> ModelT:
    """Undoes `convert`, in place. The learned parameters of the variants are lost.

    Args:
        model: a converted model.

    Returns:
        The model with its former attention implementation.

    Raises:
        ValueError: the model was not converted.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import convert, revert
        >>> config = transformers.BertConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = convert(transformers.BertModel(config), "ssmax")
        >>> revert(model).config._attn_implementation
        'sdpa'
    """
    host: Any = model
    converted = [module for module in host.modules() if NAME in module._modules]
    spec = getattr(host.config, NAME, None)
    if not converted or not spec:
        raise ValueError(
            f"model must be a converted model, got {type(model).__name__} with softmax"
        )
    for module in converted:
        delattr(module, NAME)
    host.set_attn_implementation(spec["before"])
    for _, part in _parts(host):
        for name in (NAME, "attn_implementation"):
            part.config.__dict__.pop(name, None)
    return model


def json_value(value: Any) -> Any:
    return value.detach().tolist() if isinstance(value, Tensor) else value


def _calibrated(variant: str, call: ObservedCall) -> dict[str, Any]:
    calibrate = get_variant(variant).calibrate
    assert calibrate is not None
    if call.log_n == 0:
        raise ValueError("calibrate must hold sequences of more than one token")
    return calibrate(call.log_n)


def _from_identity(
    variant: str, start: str, learn: tuple[str, ...] | list[str] | None, params: dict[str, Any]
) -> tuple[tuple[str, ...] | list[str], dict[str, Any]]:
    """``learn`` and ``params``, with the parameters that make the variant equal to softmax."""
    if start != "identity":
        raise ValueError(f"start must be 'identity' or None, got {start!r}")
    found = get_variant(variant)
    if found.identity is None:
        able = [name for name in list_variants() if get_variant(name).identity is not None]
        raise ValueError(
            f"start must be None: no parameters make {variant!r} equal to softmax at every length; "
            f"variants with start='identity': {', '.join(able)}"
        )
    if twice := [name for name in found.identity if name in params]:
        names = ", ".join(twice)
        raise ValueError(f"{names} must not be given with start='identity', which sets {names}")
    if learn is None:
        learn = tuple(
            param.name
            for param in found.params
            if param.init is not None or (param.kind == "per_head" and param.name in found.identity)
        )
    return learn, {**found.identity, **params}


def _batches(argument: str, given: Any, model: Any) -> list[dict[str, Any]]:
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
        return [batch for one in given for batch in _batches(argument, one, model)]
    kind = type(given).__name__
    if isinstance(given, (list, tuple)):
        kind += f" of {', '.join(sorted({type(x).__name__ for x in given}))}"
    raise TypeError(
        f"{argument} must be a tensor of {main}, a mapping of the model's forward arguments, or a "
        f"list of these, got {kind}"
    )


def _check_model(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"model must use transformers' AttentionInterface, which {type(model).__name__} does "
            "not"
        )


def attention_modules(
    model: Any, batches: list[dict[str, Any]] | None = None
) -> dict[str, ObservedCall]:
    """The attention modules by name, in the order of execution. Does not change the model."""
    before, training = implementations(model), model.training
    try:
        model.set_attn_implementation(NAME)
        with observe_calls() as calls, torch.no_grad():
            for batch in [_minimal_batch(model)] if batches is None else batches:
                model.eval()(**batch)
    finally:
        model.train(training)
        model.set_attn_implementation(before)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, ObservedCall] = {}
    for call in calls:
        name = names[id(call.module)]
        found[name] = found[name].merge(call) if name in found else call
    if not found:
        raise ValueError(
            f"model must have attention layers, but {type(model).__name__} called none"
        )
    return found


def _minimal_batch(model: Any) -> dict[str, Tensor]:
    """A batch of one short input of zeros, sized by the config."""
    config, main, device = model.config, model.main_input_name, model.device
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = 1, getattr(config, "num_channels", 3), height, width
        return {main: torch.zeros(shape, device=device, dtype=model.dtype)}
    if main == "input_ids":
        ids = torch.zeros(1, 4, dtype=torch.long, device=device)
        return {main: ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    raise ValueError(
        f"inputs must be given for {type(model).__name__}, because its main input {main!r} has no "
        "default batch"
    )


def _chosen(found: Mapping[str, ObservedCall], layers: Sequence[int | str] | None) -> list[str]:
    names = list(found)
    if layers is None:
        return names
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise TypeError(
            f"layers must be a non-empty list of numbers or names, or None, got {layers!r}"
        )
    chosen = []
    for layer in layers:
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
