"""Cache of validated calls, keyed by sizes, dtypes and flags: a repeated call skips validation.

The key holds everything that decides how a call is validated and which backend runs it. Checks that
depend on the values of tensors (the range of a parameter, finite ALiBi slopes) run in every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends import BACKENDS
from attnzoo.backends.base import Backend
from attnzoo.core.arguments import layout_tensors
from attnzoo.core.call import Call
from attnzoo.core.forms import (
    Definition,
    Form,
    FromStatistics,
    Linear,
    Pairwise,
    Param,
    Variant,
)
from attnzoo.core.parameters import per_query
from attnzoo.core.registry import get_variant
from attnzoo.functional.prepare import Prepared, definition_of

MAX_ENTRIES = 4096

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (type(None), bool, int, float, str)
_LAYOUT = ("attn_mask", "alibi", "segment_ids")


class Entry(NamedTuple):
    """A validated call without its tensors."""

    variant: Variant
    call: Call
    params: dict[str, Any]  # the parameters that are not tensors
    tensor_params: tuple[tuple[str, Param], ...]  # (name in errors, Param)
    backend: Backend
    form_index: int  # index into the variant's forms; −1 is the definition
    has_tensors: bool  # a parameter, mask, ALiBi or segment_ids is a tensor
    with_grad: bool  # gradients were enabled
    outlines: tuple[Hashable, ...]  # one per form; see `_outline`

    def rebuild(self, arguments: dict[str, Any], given: dict[str, Any]) -> tuple[Call, Form] | None:
        """(Call, form) with the tensors of a new call; None if the new call needs validation."""
        call, params = self.call, self.params
        if self.has_tensors:
            tensors = {name: arguments[name] for name in _LAYOUT if arguments[name] is not None}
            if tensors:
                call = replace(call, **layout_tensors(tensors, call))
            own = {
                p.name: per_query(what, p, given[p.name], call) for what, p in self.tensor_params
            }
            params = params | own
            if self.variant.unsupported(call, **params) is not None:
                return None
        if self.form_index < 0 and not self.with_grad:
            return call, definition_of(self.variant, params)
        # If gradients are enabled, compute the forms even if the definition runs, as an uncached
        # call does. In activation checkpointing, the forward may be uncached and the recomputation
        # cached. Both must save the same number of tensors.
        forms = self.variant.forms(call, **params)
        if tuple(map(_outline, forms)) != self.outlines:
            return None
        if self.form_index < 0:
            return call, definition_of(self.variant, params)
        return call, forms[self.form_index]


_CACHE: dict[Hashable, Entry] = {}


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    params: dict[str, Any],
) -> Hashable | None:
    """The key of a call; None if it must not be cached.

    Calls are not cached under tracing, transforms or autocast, or if an argument has a type other
    than a tensor, a Python scalar or a tuple of ints.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    ):
        return None
    if type(variant) is not str or type(backend) not in (str, type(None)):
        return None
    key: list[Hashable] = [variant, backend, torch.is_grad_enabled()]
    for x in (q, k, v):
        if type(x) not in _PLAIN or x.is_nested:
            return None
        key += (x.shape, x.dtype, x.device, x.layout, x.requires_grad)
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return None
    for group in (arguments, params):
        for name, x in group.items():
            if type(x) in _NUMBERS:
                key += (name, type(x), x)  # includes the type, because 1 == 1.0 == True
            elif type(x) is tuple and all(type(item) is int for item in x):
                key += (name, x)
            elif isinstance(x, Tensor) and type(x) in _PLAIN and not x.is_nested:
                key += (name, x.shape, x.dtype, x.device, x.layout, x.requires_grad)
            else:
                return None
    return tuple(key)


def find(
    key: Hashable | None, variant: str, arguments: dict[str, Any], params: dict[str, Any]
) -> tuple[Backend, Call, Form] | None:
    """(backend, Call, form) from the cache; None if the call is not cached or needs validation."""
    entry = None if key is None else _CACHE.get(key)
    if entry is None or entry.variant is not get_variant(variant):
        return None
    if BACKENDS.get(entry.backend.name) is not entry.backend:
        return None
    rebuilt = entry.rebuild(arguments, params)
    return None if rebuilt is None else (entry.backend, *rebuilt)


def remember(
    key: Hashable | None,
    ready: Prepared,
    forms: tuple[Form, ...],
    backend: Backend,
    form: Form,
    params: dict[str, Any],
) -> None:
    """Cache a validated call with the backend and the form that run it."""
    if key is None:
        return
    call = ready.call
    form_index = -1 if isinstance(form, Definition) else [x is form for x in forms].index(True)
    tensors = {name for name, x in params.items() if isinstance(x, Tensor)}
    tensor_params = tuple(
        (f"{ready.variant.name}'s {p.name}", p) for p in ready.variant.params if p.name in tensors
    )
    layout = any(x is not None for x in (call.mask, call.alibi, call.segments))
    if layout:
        call = replace(call, mask=None, alibi=None, segments=None)
    else:
        call = call.keeping()
    own = {name: x for name, x in ready.params.items() if name not in tensors}
    if len(_CACHE) >= MAX_ENTRIES:
        oldest = list(_CACHE)[0]  # noqa: RUF015 (an iterator fails if another thread writes)
        _CACHE.pop(oldest, None)
    _CACHE[key] = Entry(
        ready.variant,
        call,
        own,
        tensor_params,
        backend,
        form_index,
        has_tensors=layout or bool(tensors),
        with_grad=torch.is_grad_enabled(),
        outlines=tuple(map(_outline, forms)),
    )


def _outline(form: Form) -> Hashable:
    """The properties of a form that may change which backend is chosen."""
    if isinstance(form, Pairwise):
        vectors = (form.gain, form.offset, form.shape, form.sink)
        return form.activation, form.normalize, form.keep, *map(type, vectors), *map(_kind, vectors)
    return (form.kind, form.cancels) if isinstance(form, Linear) else form.kind


def _kind(vector: Any) -> Hashable:
    if isinstance(vector, Tensor):
        return vector.shape, vector.dtype, vector.requires_grad
    return vector.differentiable if isinstance(vector, FromStatistics) else type(vector)
