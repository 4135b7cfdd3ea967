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
from attnzoo.core.checks import runs_eagerly
from attnzoo.core.forms import Definition, Form, FromStatistics, Linear, Pairwise
from attnzoo.core.parameters import VECTORS, as_vector, vectors_in
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Param, Variant
from attnzoo.functional.prepare import Choice, ValidatedCall, definition_of

MAX_ENTRIES = 4096

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (type(None), bool, int, float, str)
_LAYOUT = ("attn_mask", "alibi", "relative_bias", "segment_ids")


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

    def rebuild(
        self, arguments: dict[str, Any], values: dict[str, Any]
    ) -> tuple[Call, Form] | None:
        """(Call, form) with the tensors of a new call; None if the new call needs validation."""
        call, params = self.call, self.params
        if self.has_tensors:
            tensors = {name: arguments[name] for name in _LAYOUT if arguments[name] is not None}
            if tensors:
                call = replace(call, **layout_tensors(tensors, call))
            vectors = {
                p.name: as_vector(what, p, values[p.name], call) for what, p in self.tensor_params
            }
            params = params | vectors
            if self.variant.unsupported(call, **params) is not None:
                return None
        if self.form_index < 0 and not self.with_grad:
            return call, definition_of(self.variant, params)
        # If gradients are enabled, compute the forms even if the definition runs, as an uncached
        # call does. In activation checkpointing, the forward may be uncached and the recomputation
        # cached. Both must save the same number of tensors.
        forms = self.variant.forms(call, **params)
        forms = tuple([vectors_in(call.dtype, f) if isinstance(f, Pairwise) else f for f in forms])
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
    if not runs_eagerly():
        return None
    if type(variant) is not str or type(backend) not in (str, type(None)):
        return None
    key: list[Hashable] = [variant, backend, torch.is_grad_enabled()]
    for x in (q, k, v):
        if type(x) not in _PLAIN or x.is_nested:
            return None
        key += (x.shape, x.dtype, x.device, x.layout, x.requires_grad)
    # The public question is per type of device, and the tensors may be on any.
    if torch._C._is_any_autocast_enabled():
        return None
    for x in arguments.values():  # always the same arguments, in the same order
        if x is None or x is False:
            key.append(x)
        elif not _add(key, x):
            return None
    for name, x in params.items():
        key.append(name)
        if not _add(key, x):
            return None
    return tuple(key)


def _add(key: list[Hashable], x: Any) -> bool:
    """Add an argument to a key. False if a call with this argument must not be cached."""
    kind = type(x)
    if kind in _NUMBERS:
        key += (kind, x)  # includes the type, because 1 == 1.0 == True
    elif kind in _PLAIN and not x.is_nested:
        key += (kind, x.shape, x.dtype, x.device, x.layout, x.requires_grad)
    elif kind is tuple and all(type(item) is int for item in x):
        key += (kind, x)
    else:
        return False
    return True


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
    ready: ValidatedCall,
    choice: Choice,
    params: dict[str, Any],
) -> None:
    """Cache a validated call with the backend and the form that run it."""
    if key is None:
        return
    call, form_index = ready.call, -1
    if not isinstance(choice.form, Definition):
        form_index = [form is choice.form for form in choice.forms].index(True)
    tensors = {name for name, x in params.items() if isinstance(x, Tensor)}
    tensor_params = tuple(
        (f"{ready.variant.name}'s {p.name}", p) for p in ready.variant.params if p.name in tensors
    )
    layout = any(x is not None for x in (call.mask, call.relative_bias, call.segments))
    call = (
        replace(call, mask=None, relative_bias=None, segments=None) if layout else call.with_cache()
    )
    constants = {name: x for name, x in ready.params.items() if name not in tensors}
    if len(_CACHE) >= MAX_ENTRIES:
        oldest = list(_CACHE)[0]  # noqa: RUF015 (an iterator fails if another thread writes)
        _CACHE.pop(oldest, None)
    _CACHE[key] = Entry(
        ready.variant,
        call,
        constants,
        tensor_params,
        choice.backend,
        form_index,
        has_tensors=layout or bool(tensors),
        with_grad=torch.is_grad_enabled(),
        outlines=tuple(map(_outline, choice.forms)),
    )


def _outline(form: Form) -> Hashable:
    """The properties of a form that may change which backend is chosen."""
    if isinstance(form, Pairwise):
        vectors = [_kind(getattr(form, name)) for name in VECTORS]
        settings = form.normalize, form.keep, form.mass, form.distance, form.eps
        return form.activation, *settings, *vectors
    return (form.kind, form.cancels) if isinstance(form, Linear) else form.kind


def _kind(vector: Any) -> Hashable:
    kind = type(vector)
    if kind is float or vector is None:
        return kind
    if isinstance(vector, Tensor):
        return kind, vector.shape, vector.dtype, vector.requires_grad
    return (kind, vector.differentiable) if isinstance(vector, FromStatistics) else kind
