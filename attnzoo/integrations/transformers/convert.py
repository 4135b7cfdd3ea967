"""convert() and revert(): replace the attention of a transformers model, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from attnzoo.core.checks import check_bool
from attnzoo.core.variant import Variant
from attnzoo.integrations.transformers.adapted import adapt
from attnzoo.integrations.transformers.checks import (
    check_convertible,
    check_loaded,
    check_logits,
    check_model,
    check_score_terms,
    check_whole_heads,
    chosen_variant,
    embed_dim,
    possible_identity,
    taken_sink,
    warn_of_training,
    wrapper_entry,
)
from attnzoo.integrations.transformers.host_gains import check_gain
from attnzoo.integrations.transformers.interface import ObservedCall, set_mark, variants_with
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.modules import (
    Batch,
    attention_modules,
    batches_of,
    chosen_names,
    configs_of,
    restorer,
    run_model,
    set_implementations,
)
from attnzoo.integrations.transformers.position_bias import set_rows
from attnzoo.integrations.transformers.spec import (
    clear_spec,
    former_implementations,
    keep_entry,
    new_entry,
    write_specs,
)
from attnzoo.integrations.transformers.wrapped import (
    ONE_QUERY,
    check_hidden_states,
    check_query_layer,
    dtype_of,
    new_child,
    put,
)
from attnzoo.nn import Attention, Wrapper
from attnzoo.nn.parameters import Names
from attnzoo.nn.wrappers import Choice

ModelT = TypeVar("ModelT")


def convert(
    model: ModelT,
    variant: str,
    layers: Sequence[int | str] | None = None,
    *,
    learn: Names | None = None,
    start: Literal["identity"] | None = None,
    calibrate: Batch | Sequence[Batch] | None = None,
    inputs: Batch | Sequence[Batch] | None = None,
    wrapper: Choice = None,
    warn: bool = True,
    **params: Any,
) -> ModelT:
    """Replaces the attention of a transformers model by a variant, in place.

    Each attention module gets a child named ``attnzoo``, an `attnzoo.nn.Attention` or a wrapper
    around one, which owns the parameters of the variant. The model's attention implementation
    becomes "attnzoo". Layers that are not converted keep softmax. A second call can convert them to
    another variant.

    Args:
        model: a `transformers.PreTrainedModel` that uses transformers' AttentionInterface, or whose
            attention is MPNet's.
        variant: a name from `attnzoo.list_variants`.
        layers: the layers to convert: numbers in the order of execution, or module names. None is
            all layers that run on ``inputs``. The minimal batch of a model for text and images is
            a text if it runs on one: give ``inputs`` with an image to convert the layers of the
            images too.
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
        wrapper: a name from `attnzoo.nn.WRAPPERS`, or a pair (name, arguments of the wrapper); see
            Notes. None is no wrapper.
        warn: whether to warn if the model was loaded, so that it is trained, and the variant's
            weights are not a softmax of scores, or there is a wrapper: it then needs training. A
            model is taken as loaded if its ``name_or_path`` is not empty; a new model made from
            the config of a checkpoint has it too.
        **params: parameters of the variant, as for `attnzoo.nn.Attention`. If a parameter has a
            projection, and neither a value nor an initial value, or the value "projected", each
            layer learns the projection, as in `attnzoo.nn.MultiheadAttention`; see Notes.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: an argument is wrong, or the model's attention has a feature that
            attnzoo or the variant does not support. The model is unchanged.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import convert
        >>> config = transformers.BertConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = convert(transformers.BertModel(config), "entmax", layers=[1], alpha=1.3)
        >>> model.encoder.layer[1].attention.self.attnzoo
        Attention('entmax', num_heads=4, alpha=1.3)

    Notes:
        The model's own scaling and softcap stay as they are; gains and biases of the variant come
        after the softcap. Sinks of the model, learned or made from the hidden states, stay the
        model's. Only variants that have a parameter for them can be used then (sink: b), and
        ``params`` must not set it. All attentions of a head in a wrapper get the sink of the head.

        Some models multiply their queries by a factor that grows with the position (Llama 4,
        Mistral Large 4). It stays in the queries. Variants with such a gain (`Variant.length_gain`)
        raise an error there. In models that select keys, a variant sees the selected keys only.

        At b = -100 the gradient of a sink vanishes in fp32, so training does not move it. To
        train a sink, start with ``convert(model, "sink", b=-10.0)``, which is close to softmax.

        The model is run once to find its attention modules, their order and numbers of heads, and
        once after the conversion. If that fails, the conversion is undone.

        In an encoder, where all queries see equally many keys, a calibrated model stays close to
        the original. In a causal model it may differ as much as with the variant's own initial
        values: queries with many keys get sharper weights, queries with few keys flatter weights.

        A gate of a wrapper, and a parameter with a projection, are made from the hidden states that
        the attention module gets; most models hand them on. A parameter with one value per key
        (forgetting) is kept in the model's dynamic or static cache, as further features of the
        values; with other caches pass ``use_cache=False``, or give it a value.

        ``layer`` of `attnzoo.nn.Differential` is the module's ``layer_idx``, or else its place in
        the order of execution.

        A wrapper with Q > 1 queries per head (differential_v2, mixture) needs a module that makes
        its queries with a `torch.nn.Linear`. Its matrix gets Q·H·D rows: each head's first query
        is the model's own, the others are drawn with the same standard deviation. The matrix is a
        new parameter, so create the optimizer after `convert`.

        Exclude the learned parameters from weight decay with `attnzoo.nn.parameter_groups`. They
        have the dtype of the attention module's matrices, and are cast to fp32 in each call.
    """
    check_convertible(model)
    chosen = chosen_variant(variant, params)
    check_bool("warn", warn)
    for other, value in (("start", start), ("inputs", inputs)):
        if calibrate is not None and value is not None:
            raise ValueError(f"{other} must be None when calibrate is given")
    if chosen.calibrate is None and calibrate is not None:
        raise ValueError(
            f"calibrate must be None: {variant!r} cannot be calibrated; variants that can: "
            f"{variants_with(lambda one: one.calibrate)}"
        )
    identity = {} if start is None else _identity(chosen, start, params, wrapper)
    name = "inputs" if calibrate is None else "calibrate"
    samples = inputs if calibrate is None else calibrate
    batches = None if samples is None else batches_of(name, samples, model)
    calls, batch, idle = attention_modules(model, batches)
    children: dict[str, Attention | Wrapper] = {}
    for name in chosen_names(calls, layers):
        call = calls[name]
        values = params if calibrate is None else {**_calibrated(chosen, call), **params}
        children[name] = _child(model, call, chosen, values, identity, learn, wrapper)
        check_loaded(name, call.module)
    undo, before = [restorer(model)], former_implementations(model)
    with undone(undo):
        attach(model, children, undo)
        set_implementations(model, NAME, idle)
        _run_once(model, batch, children)
        write_specs(model, before)
        if warn:
            warn_of_training(model, chosen, wrapper, start)
    return model


def _child(
    model: Any,
    call: ObservedCall,
    variant: Variant,
    params: dict[str, Any],
    identity: dict[str, Any],
    learn: Names | None,
    wrapper: Choice,
) -> Attention | Wrapper:
    """The child of the module that made a call. It keeps the entry that describes it."""
    sink = taken_sink(model, variant, call, params)
    params = params | {name: value for name, value in identity.items() if name != sink}
    check_logits(call, variant)
    entry = wrapper_entry(wrapper, call)
    check_gain(variant, None if entry is None else entry["name"], call.module)
    options = {
        "learn": _learned(variant, learn, identity, sink), "softcap": call.softcap,
        "given": () if sink is None else (sink,), "head_dim": call.qk_dim, **params,
    }  # fmt: skip
    dtype = dtype_of(call.module, call.hidden)
    features = embed_dim(call)
    child = new_child(variant.name, call.heads, entry, options, dtype, features)
    keep_entry(child, new_entry(child, call, params, entry, features))
    check_whole_heads(call, child, wrapper)
    check_score_terms(call, child)
    check_hidden_states(call.module, child)
    check_query_layer(model, call.module, child)
    return child


@contextmanager
def undone(undo: list[Callable[[], None]]) -> Iterator[None]:
    """If the body raises, calls the functions in ``undo``, the last one first."""
    try:
        yield
    except BaseException:
        for function in reversed(undo):
            function()
        raise


def _run_once(
    model: Any, batch: dict[str, Any], children: Mapping[str, Attention | Wrapper]
) -> None:
    try:
        run_model(model, [batch])
    except Exception as error:
        hint = ""
        if isinstance(error, RuntimeError) and any(x.queries > 1 for x in children.values()):
            hint = (
                "; a model that computes with the queries of each head before its attention needs "
                f"a wrapper with one query per head: {ONE_QUERY}"
            )
        raise ValueError(
            f"model must run after the conversion, but {type(model).__name__} raised: {error}{hint}"
        ) from error


def attach(
    model: Any, children: Mapping[str, Attention | Wrapper], undo: list[Callable[[], None]]
) -> None:
    """Adds a child to each named module, on its device.

    The weights may be on meta. Functions that remove the children are appended to ``undo``.
    """
    for name, child in children.items():
        module = model.get_submodule(name)
        device = next((p.device for p in module.parameters()), model.device)
        # Transformers skips the initialization of modules with this attribute.
        for part in child.modules():
            part._is_hf_initialized = device.type != "meta"  # pyright: ignore
        undo.append(put(module, child.to(device).train(module.training)))
    undo.append(set_mark(model, True))
    undo.append(set_rows(model, True))
    undo.append(adapt(model, True))


def revert(model: ModelT) -> ModelT:
    """Undoes `convert`, in place. The learned parameters of variants and wrappers are lost.

    Args:
        model: a converted model.

    Returns:
        The model with its former attention implementation.

    Raises:
        ValueError: the model was not converted.
        TypeError: the model is not a `transformers.PreTrainedModel`.

    Example:
        >>> import transformers
        >>> from attnzoo.integrations.transformers import convert, revert
        >>> config = transformers.BertConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = convert(transformers.BertModel(config), "ssmax")
        >>> revert(model).config._attn_implementation
        'sdpa'
    """
    check_model(model)
    host: Any = model
    converted = [module for module in host.modules() if NAME in module._modules]
    spec = getattr(host.config, NAME, None)
    if not converted or not spec:
        raise ValueError(
            f"model must be a converted model, got {type(model).__name__} with softmax"
        )
    undo = [restorer(host)]
    with undone(undo):
        for module in converted:
            undo.append(put(module, None))
        undo.append(set_mark(host, False))
        undo.append(set_rows(host, False))
        undo.append(adapt(host, False))
        for config in configs_of(host).values():
            clear_spec(config)
        if host._can_set_attn_implementation():
            # Transformers loads the code of an implementation, if that is needed.
            host.set_attn_implementation({"": spec["before"].get("", "eager")})
        set_implementations(host, spec["before"])
    return model


def _calibrated(variant: Variant, call: ObservedCall) -> dict[str, Any]:
    assert variant.calibrate is not None
    if call.log_n == 0:
        raise ValueError("calibrate must hold sequences of more than one token")
    return variant.calibrate(call.log_n)


def _identity(
    variant: Variant, start: str, params: dict[str, Any], wrapper: Choice
) -> dict[str, Any]:
    """The parameters that make the variant equal to softmax."""
    if start != "identity":
        raise ValueError(f"start must be 'identity' or None, got {start!r}")
    if wrapper is not None:
        raise ValueError(f"start must be None with a wrapper, got {start!r} with {wrapper!r}")
    identity = possible_identity(variant)
    if identity is None:
        raise ValueError(
            f"start must be None: no parameters make {variant.name!r} equal to softmax at every "
            "length; variants with start='identity': "
            f"{variants_with(lambda one: possible_identity(one) is not None)}"
        )
    if twice := [name for name in identity if name in params]:
        names = ", ".join(twice)
        raise ValueError(f"{names} must not be given with start='identity', which sets {names}")
    return identity


def _learned(
    variant: Variant, learn: Names | None, identity: dict[str, Any], sink: str | None
) -> Names | None:
    """The parameters to learn; None is the variant's default."""
    if learn is not None or not identity:
        return learn
    return tuple(
        param.name
        for param in variant.params
        if param.name != sink
        and (param.init is not None or (param.kind == "per_head" and param.name in identity))
    )
