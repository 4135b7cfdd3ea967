"""Children of attention modules: variants and wrappers, of which some need the hidden states, or
several queries per head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from attnzoo.core.checks import DTYPES
from attnzoo.integrations.transformers.masks import NAME
from attnzoo.integrations.transformers.per_key import (
    CACHES,
    STORED,
    WAY_OUT,
    CacheWithParameters,
    per_key_names,
    stored_in,
)
from attnzoo.nn import WRAPPERS, Attention, Wrapper, host_attention
from attnzoo.nn.projections import Projections, split_projected

QUERY_LAYERS = ("q_proj", "query", "q_lin", "wq", "q")  # names of the layer that makes the queries
ONE_QUERY = ", ".join(name for name, kind in WRAPPERS.items() if kind.queries == 1)
HIDDEN = "attnzoo_hidden_states"  # the keyword that hands them to the attention function


def new_child(
    variant: str,
    num_heads: int,
    wrapper: Mapping[str, Any] | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    embed_dim: int | None = None,
) -> Attention | Wrapper:
    """The child of an attention module.

    Args:
        variant: a name from `attnzoo.list_variants`.
        num_heads: number of query heads of the model without a wrapper.
        wrapper: None, or a mapping with name, arguments, embed_dim, qk_dim, v_dim and layer.
        options: keywords for `Attention`. The value "projected" asks for a parameter that is made
            from the hidden states.
        dtype: dtype of the parameters, from `dtype_of`.
        embed_dim: number of features of the hidden states, for such parameters.

    Raises:
        ValueError, TypeError: an argument of the variant or of the wrapper is wrong.
    """
    if wrapper is None:
        names, options = split_projected(variant, options)
        passed = tuple(options.pop("given", ()))
        names = tuple(name for name in names if name not in passed)
        child = Attention(variant, num_heads, given=(*passed, *names), dtype=dtype, **options)
        if names:
            assert embed_dim is not None
            child.projections = Projections(
                variant, names, num_heads, embed_dim, embed_dim, dtype=dtype
            )
        return child
    host_options = {n: x for n, x in options.items() if n not in ("given", "head_dim")}
    return host_attention(
        (wrapper["name"], wrapper["arguments"]), variant, num_heads, wrapper["embed_dim"],
        host_options, key_dim=wrapper["embed_dim"], qk_dim=wrapper["qk_dim"],
        v_dim=wrapper["v_dim"], layer=wrapper["layer"], passed=options.get("given", ()),
        dtype=dtype,
    )  # fmt: skip


def dtype_of(module: nn.Module, hidden: Tensor | None = None) -> torch.dtype:
    """The dtype of an attention module's matrices, which its child gets too.

    Sharding (FSDP) needs one dtype. Quantized matrices have none that a parameter can have; then it
    is the dtype of the hidden states, or else torch's default dtype.
    """
    kinds = (p.dtype for p in module.parameters() if p.dim() > 1 and p.dtype in DTYPES)
    return next(kinds, torch.get_default_dtype() if hidden is None else hidden.dtype)


def inner(child: Attention | Wrapper) -> Attention:
    """The module that owns the parameters of the variant."""
    return child.attention if isinstance(child, Wrapper) else child


# Hidden states --------------------------------------------------------------------------------


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states (B, N, features) among the arguments of an attention module, or None."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.dim() == 3 else None


def pass_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before forward. Attention modules hand keywords on to their attention function."""
    hidden = hidden_states(args, kwargs)
    kwargs = {**kwargs, HIDDEN: hidden}
    for name in CACHES:
        stored = stored_in(kwargs.get(name), module._modules.get(NAME), hidden)
        if stored is not None:
            return args, {**kwargs, name: stored, STORED: stored}
    return args, kwargs


def from_hidden_states(
    module: nn.Module, child: Any, kwargs: Mapping[str, Any], keys: int, used: slice
) -> dict[str, Tensor]:
    """What the child makes from the hidden states of its module, as keywords for its forward.

    Args:
        module: the attention module.
        child: its child.
        kwargs: the keywords that the attention function got.
        keys: number of keys that it got.
        used: those of them that it uses.
    """
    if not getattr(child, "uses_hidden_states", False):
        return {}
    hidden: Tensor | None = kwargs.get(HIDDEN)
    stored: CacheWithParameters | None = kwargs.get(STORED)
    if hidden is None:
        raise ValueError(
            f"{_instead(child)}, because {type(module).__name__} hands no hidden states "
            "(B, N, features) on to its attention function"
        )
    made, per_key = (None, {}) if stored is None else (stored.made, stored.per_key)
    made = child.projected(hidden, hidden) if made is None else dict(made)
    for name in per_key_names(child):
        values = per_key.get(name, made[name])
        if values.shape[-1] != keys:
            raise ValueError(
                f"{child.variant}'s {name} must be known for all {keys} keys of "
                f"{type(module).__name__}, which hands on the hidden states of "
                f"{values.shape[-1]}: {WAY_OUT}"
            )
        made[name] = values[..., used]
    return made


def _instead(child: Any) -> str:
    """What to do for a module that does not hand on its hidden states."""
    attention = getattr(child, "attention", child)
    if attention.projections is None:
        return "wrapper must have no gate"
    names = ", ".join(attention.projections)
    return f"{attention.variant}'s {names} must be given to convert, as a number or a tensor (H,)"


@contextmanager
def observe_hidden_states(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Collects the hidden states of each module by its id, as empty tensors (0, features)."""
    collected: dict[int, Tensor] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_states(args, kwargs)
        if hidden is not None:
            collected[id(module)] = hidden.new_empty(0, hidden.shape[-1])

    hooks = []
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def check_hidden_states(module: nn.Module, child: Attention | Wrapper) -> None:
    """Raises if the child needs the hidden states and the module cannot hand them on."""
    if not child.uses_hidden_states:
        return
    taken = inspect.signature(module.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        raise ValueError(
            f"{_instead(child)}, because {type(module).__name__} takes no further keywords"
        )


# Several queries per head ---------------------------------------------------------------------


def query_layer(module: nn.Module, child: Attention | Wrapper | None) -> nn.Linear | None:
    """The layer that makes the queries, if a new child needs another number of queries.

    Raises:
        ValueError: there is no such layer.
    """
    former: Any = module._modules.get(NAME)
    if _queries(former) == _queries(child):
        return None
    wrapper: Any = child if isinstance(child, Wrapper) else former
    rows = _queries(former) * wrapper.num_heads * wrapper.qk_dim
    for name in QUERY_LAYERS:
        layer = module._modules.get(name)
        if type(layer) is nn.Linear and layer.out_features == rows:
            return layer
    raise ValueError(
        f"wrapper must use one query per head, because {type(module).__name__} has no "
        f"torch.nn.Linear with {rows} rows named {', '.join(QUERY_LAYERS)}; wrappers that do: "
        f"{ONE_QUERY}"
    )


def check_query_layer(model: Any, module: nn.Module, child: Attention | Wrapper) -> None:
    """Raises if a child needs another number of queries and the matrix cannot be changed."""
    layer = query_layer(module, child)
    if layer is None:
        return
    owners = [
        name for name, other in model.named_modules(remove_duplicate=False)
        if any(x is layer.weight for x in other._parameters.values())
    ]  # fmt: skip
    if len(owners) > 1:
        raise ValueError(
            f"wrapper must use one query per head, because {' and '.join(owners)} share the matrix "
            "of their queries"
        )


def _queries(child: Any) -> int:
    return 1 if child is None else child.queries


def set_queries(layer: nn.Linear, num_heads: int, before: int, after: int) -> None:
    """Changes the number of queries per head that a layer makes.

    The first queries of each head stay. The matrices of new queries are drawn with the standard
    deviation of the present ones, their biases are 0.
    """

    def changed(x: Tensor | None, std: Tensor | float) -> nn.Parameter | None:
        if x is None:
            return None
        parts = rearrange(x.detach(), "(h q d) ... -> h q d ...", h=num_heads, q=before)[:, :after]
        new = torch.randn_like(parts[:, :1].expand(-1, max(after - before, 0), *parts.shape[2:]))
        parts = torch.cat([parts, std * new], dim=1)
        return nn.Parameter(
            rearrange(parts, "h q d ... -> (h q d) ..."), requires_grad=x.requires_grad
        )

    std = layer.weight.detach().std()
    _set_matrix(layer, changed(layer.weight, std), changed(layer.bias, 0.0))


def _set_matrix(layer: nn.Linear, weight: Any, bias: Any) -> None:
    layer.weight, layer.bias = weight, bias
    layer.out_features = weight.shape[0]


# Children -------------------------------------------------------------------------------------


def put(module: nn.Module, child: Attention | Wrapper | None) -> Callable[[], None]:
    """Gives an attention module a child; None removes the child. Returns a function that undoes it.

    Changes the number of queries that the module makes to that of the child.
    """
    former: Any = module._modules.get(NAME)
    layer = query_layer(module, child)
    old = None if layer is None else (layer.weight, layer.bias)

    def undo() -> None:
        _set_child(module, former)
        if layer is not None and old is not None:
            _set_matrix(layer, *old)

    try:
        if layer is not None:
            set_queries(layer, (child or former).num_heads, _queries(former), _queries(child))
        _set_child(module, child)
    except BaseException:
        undo()
        raise
    return undo


def _set_child(module: nn.Module, child: nn.Module | None) -> None:
    if child is None:
        module._modules.pop(NAME, None)
    else:
        module.add_module(NAME, child)
    # A hook is copied and pickled with its module.
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is pass_hidden_states:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    if getattr(child, "uses_hidden_states", False):
        module.register_forward_pre_hook(pass_hidden_states, with_kwargs=True)
