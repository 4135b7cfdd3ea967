"""convert() and revert(): whose attention a model's layers use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attnzoo.core.registry import get_variant, list_variants
from attnzoo.integrations.transformers.interface import NAME, Seen, watched
from attnzoo.nn import Attention

VERSION = 1
Batch = Tensor | Mapping[str, Any]


def convert(
    model: Any,
    variant: str,
    layers: Sequence[int | str] | None = None,
    *,
    learn: tuple[str, ...] | list[str] | None = None,
    start: Literal["identity"] | None = None,
    calibrate: Batch | Sequence[Batch] | None = None,
    inputs: Batch | Sequence[Batch] | None = None,
    **params: Any,
) -> Any:
    """Puts a variant into the attention of a transformers model, in place.

    Each attention module gets a child `attnzoo.nn.Attention` named ``attnzoo``, which owns what the
    variant learns, and the model's implementation becomes "attnzoo", attention and masks. The
    modules are found by running the model once: how many heads they have, in which order they run,
    and whether they ask for a softcap or a position bias is in no attribute that all models share.
    Called again, other layers may get other variants;
    layers that never got one keep softmax.

    Args:
        model: a `transformers.PreTrainedModel` that takes its attention from AttentionInterface.
        variant: a name from `attnzoo.list_variants`.
        layers: numbers in the order in which the model runs them, or names of modules; None is all.
        learn, **params: as for `attnzoo.nn.Attention`.
        start: "identity" begins with parameters with which the variant is softmax (ssmax: s = 0 and
            b = 1, sink: b = -100), so the converted model computes what it did before. All of these
            are learned, unless ``learn`` says otherwise. None begins with the variant's own initial
            values.
        calibrate: inputs at the model's own length: a tensor of token ids, a mapping as for the
            model's forward, or a list of these. Initial values are then such that the mean
            temperature over all rows is 1 (ssmax: s = 1/mean log n), layer by layer. Where all rows
            see equally many keys, as in an encoder, that is close to the model's own attention.
            Under causality it need not be closer than the variant's own initial values: a mean of 1
            makes most rows sharper than they were, and those with few keys flatter.
        inputs: what to run the model with, in the same forms; None is ``calibrate``, or the
            smallest batch.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: naming the argument; also for a model whose attention has what no
            variant has (a softcap), or none at all. Nothing was changed then.

    Trained in bf16 as a whole the scales are bf16 too; gains are computed in fp32 anyway. Exclude
    the scales from weight decay: `attnzoo.nn.parameter_groups`.
    """
    _check_model(model)
    for other, given in (("start", start), ("inputs", inputs)):
        if calibrate is not None and given is not None:
            raise ValueError(f"give calibrate or {other}, not both")
    if get_variant(variant).calibrate is None and calibrate is not None:
        raise ValueError(f"calibrate: {variant!r} has no temperature that could be set to 1")
    if start is not None:
        learn, params = _from_identity(variant, start, learn, params)
    name = "inputs" if calibrate is None else "calibrate"
    given = inputs if calibrate is None else calibrate
    found = attention_modules(model, None if given is None else _batches(name, given, model))
    chosen = _chosen(found, layers)
    values = {
        name: {**(_calibrated(variant, seen) if calibrate is not None else {}), **params}
        for name, seen in found.items()
        if name in chosen
    }
    made = {
        name: Attention(variant, found[name].heads, learn=learn, **own)
        for name, own in values.items()
    }
    entries = {
        name: {
            "variant": variant, "num_heads": found[name].heads, "learn": list(made[name].learned),
            "params": {key: plain(value) for key, value in own.items()},
        } for name, own in values.items()
    }  # fmt: skip
    specs = [(part.config, _spec(part, prefix, entries)) for prefix, part in _parts(model)]
    attach(model, made)
    for config, spec in specs:
        if spec["layers"]:
            describe(config, spec)
    return model


def _parts(model: Any) -> list[tuple[str, Any]]:
    """The model, and the models inside it with configs of their own: each may be loaded alone."""
    from transformers import PreTrainedModel

    return [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and (part is model or part.config is not model.config)
    ]


def _spec(part: Any, prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What the config of a part is to say: of its layers, by their names in it."""
    start = f"{prefix}." if prefix else ""
    inside = {n.removeprefix(start): e for n, e in entries.items() if n.startswith(start)}
    # What a config says of layers that have no child is of another model with that config.
    known = own_layers(part)
    before = getattr(part.config, NAME)["before"] if known else implementations(part)
    # A new one: configs are copied, and a copy shall not share it.
    return {"version": VERSION, "before": before, "layers": {**known, **inside}}


def describe(config: Any, spec: dict[str, Any]) -> None:
    """What is saved: the layers' variants, and a name that other processes do not know.

    ``attn_implementation`` is read by transformers when it loads a config, and unlike
    ``_attn_implementation`` it is saved. A process without this
    package then gets an error.
    """
    setattr(config, NAME, spec)
    config.attn_implementation = NAME


def own_layers(model: Any) -> dict[str, Any]:
    """What the config says of the layers that have a child, by their names in this model."""
    spec = getattr(model.config, NAME, None) or {"layers": {}}
    children = {name for name, module in model.named_modules() if NAME in module._modules}
    found = {}
    for name, entry in spec["layers"].items():
        fitting = [n for n in spellings(model, name) if n in children]
        found |= dict.fromkeys(fitting[:1], entry)
    return found


def spellings(model: Any, name: str) -> Iterator[str]:
    """A name, with and without the prefix that a head puts before its base model's names."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix)
    yield prefix + name


def implementations(model: Any) -> dict[str, str]:
    """As `set_attn_implementation` takes them: the model's own, and those of its sub-configs."""
    own = {"": model.config._attn_implementation}
    subs = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    return own | {n: c._attn_implementation for n, c in subs.items() if c is not None}


def attach(model: Any, made: Mapping[str, Attention], loading: bool = False) -> None:
    """Each to its module, where that one's weights are, and the model switched.

    ``loading``: the weights may still be on meta.
    """
    for name, attention in made.items():
        module = model.get_submodule(name)
        device = next((p.device for p in module.parameters()), model.device)
        if device.type == "meta" and not loading:
            raise ValueError(f"model: the weights of {name} are not loaded, or were moved off")
        # Transformers' mark of modules that are not to be initialized again.
        attention._is_hf_initialized = device.type != "meta"
        module.add_module(NAME, attention.to(device).train(module.training))
    model.set_attn_implementation(NAME)


def revert(model: Any) -> Any:
    """The model as it was before `convert`, without what the variants learned.

    Raises:
        ValueError: if it was not converted.
    """
    owners = [module for module in model.modules() if NAME in module._modules]
    spec = getattr(model.config, NAME, None)
    if not owners or not spec:
        raise ValueError(f"model was not converted: {type(model).__name__}")
    for module in owners:
        delattr(module, NAME)
    model.set_attn_implementation(spec["before"])
    for _, part in _parts(model):
        for name in (NAME, "attn_implementation"):
            part.config.__dict__.pop(name, None)
    return model


def plain(value: Any) -> Any:
    """For JSON."""
    return value.detach().tolist() if isinstance(value, Tensor) else value


def _calibrated(variant: str, seen: Seen) -> dict[str, Any]:
    set_to_one = get_variant(variant).calibrate
    assert set_to_one is not None
    if seen.log_n == 0:
        raise ValueError("calibrate: give sequences of more than one token")
    return set_to_one(seen.log_n)


def _from_identity(
    variant: str, start: str, learn: tuple[str, ...] | list[str] | None, params: dict[str, Any]
) -> tuple[tuple[str, ...] | list[str], dict[str, Any]]:
    """What to learn, and the parameters with which the variant is softmax among the others."""
    if start != "identity":
        raise ValueError(f"start must be 'identity' or None, got {start!r}")
    found = get_variant(variant)
    if found.identity is None:
        able = [name for name in list_variants() if get_variant(name).identity is not None]
        raise ValueError(
            f"start: no parameters make {variant!r} softmax, so it cannot start at the model's own "
            f"attention; these can: {', '.join(able)}"
        )
    if twice := [name for name in found.identity if name in params]:
        raise ValueError(f"start='identity' sets {', '.join(twice)}: leave it out")
    if learn is None:
        learn = tuple(
            param.name
            for param in found.params
            if param.init is not None or (param.kind == "per_head" and param.name in found.identity)
        )
    return learn, {**found.identity, **params}


def _batches(what: str, given: Any, model: Any) -> list[dict[str, Any]]:
    """Inputs in any of their usual forms, as keywords of the model's forward."""
    main = model.main_input_name
    if isinstance(given, Tensor):
        alone = main == "input_ids" and given.dim() == 1
        return [{main: given[None] if alone else given}]
    if isinstance(given, Mapping):
        if isinstance(given.get(main), (list, tuple)):
            raise TypeError(
                f"{what}: {main} must be a tensor, got {type(given[main]).__name__}; a tokenizer "
                "gives tensors with return_tensors='pt'"
            )
        return [dict(given)]
    if isinstance(given, (list, tuple)) and all(isinstance(x, (Tensor, Mapping)) for x in given):
        if not given:
            raise ValueError(f"{what} must hold at least one batch, got none")
        return [batch for one in given for batch in _batches(what, one, model)]
    kind = type(given).__name__
    if isinstance(given, (list, tuple)):
        kind += f" of {', '.join(sorted({type(x).__name__ for x in given}))}"
    raise TypeError(
        f"{what} must be a tensor of {main}, a mapping as for the model's forward, or a list of "
        f"these; got {kind}"
    )


def _check_model(model: Any) -> None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"model: {type(model).__name__} does not take its attention from transformers' "
            "AttentionInterface, so nothing can be put in its place"
        )


def attention_modules(model: Any, batches: list[dict[str, Any]] | None = None) -> dict[str, Seen]:
    """By name, in the order in which the model calls them; the model is left as it was."""
    before, training = implementations(model), model.training
    try:
        model.set_attn_implementation(NAME)
        with watched() as seen, torch.no_grad():
            for batch in [_smallest(model)] if batches is None else batches:
                model.eval()(**batch)
    finally:
        model.train(training)
        model.set_attn_implementation(before)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, Seen] = {}
    for one in seen:
        name = names[id(one.module)]
        found[name] = found[name].and_(one) if name in found else one
    if not found:
        raise ValueError(f"model has no attention that was called: {type(model).__name__}")
    return found


def _smallest(model: Any) -> dict[str, Tensor]:
    """A batch of one, made of what the configuration says."""
    config, main, device = model.config, model.main_input_name, model.device
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = 1, getattr(config, "num_channels", 3), height, width
        return {main: torch.zeros(shape, device=device, dtype=model.dtype)}
    if main == "input_ids":
        ids = torch.zeros(1, 4, dtype=torch.long, device=device)
        return {main: ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    raise ValueError(f"inputs: give a batch to run {type(model).__name__} with, it takes {main}")


def _chosen(found: Mapping[str, Seen], layers: Sequence[int | str] | None) -> list[str]:
    names = list(found)
    if layers is None:
        return names
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise TypeError(f"layers must be a list of numbers or names, or None; got {layers!r}")
    chosen = []
    for layer in layers:
        if isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(names) <= layer < len(names):
                raise ValueError(f"layers must be from 0 to {len(names) - 1}, got {layer}")
            layer = names[layer]
        if layer not in names:
            raise ValueError(f"layers must be of {', '.join(names)}; got {layer!r}")
        chosen.append(layer)
    return chosen
