"""Calls that were checked before: their sizes, dtypes and flags lead to the backend at once.

A key holds all that decides how a call is checked and which backend runs it. What depends on the
values of tensors (a parameter in its range, the slopes of ALiBi) is checked in every call.
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

MOST = 4096  # calls that are known
SMALL = 2**10  # queries × keys up to which masks of positions are kept

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (type(None), bool, int, float, str)
_LAYOUT = ("attn_mask", "alibi", "segment_ids")


class Known(NamedTuple):
    """A call that was run, without its tensors."""

    variant: Variant
    call: Call
    params: dict[str, Any]  # those that are no tensors
    vectors: tuple[tuple[str, Param], ...]  # those that are, each with its name in errors
    backend: Backend
    place: int  # of the form that ran, among the variant's; −1 is its definition
    has_tensors: bool  # among its parameters and layout arguments
    with_grad: bool  # run with gradients enabled
    outlines: tuple[Hashable, ...]  # of the forms

    def again(self, arguments: dict[str, Any], given: dict[str, Any]) -> tuple[Call, Form] | None:
        """This call with its own tensors; None where it has to be prepared anew."""
        call, params = self.call, self.params
        if self.has_tensors:
            tensors = {name: arguments[name] for name in _LAYOUT if arguments[name] is not None}
            if tensors:
                call = replace(call, **layout_tensors(tensors, call))
            own = {p.name: per_query(what, p, given[p.name], call) for what, p in self.vectors}
            params = params | own
            if self.variant.unsupported(call, **params) is not None:
                return None
        if self.place < 0 and not self.with_grad:
            return call, definition_of(self.variant, params)
        # With gradients also beside a definition: a checkpoint counts what its two runs save.
        # Forms of the same outline are not checked again.
        forms = self.variant.forms(call, **params)
        if tuple(map(_outline, forms)) != self.outlines:
            return None
        return call, definition_of(self.variant, params) if self.place < 0 else forms[self.place]


_KNOWN: dict[Hashable, Known] = {}


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    backend: str | None,
    arguments: dict[str, Any],
    params: dict[str, Any],
) -> Hashable | None:
    """What decides how the call is checked and run; None if it must be prepared anew.

    That is so for traced and transformed calls, under autocast, and for arguments of other types
    than tensors and Python's numbers.
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
    for some in (arguments, params):
        for name, x in some.items():
            if type(x) in _NUMBERS:
                key += (name, type(x), x)  # 1, 1.0 and True are equal, and are not the same
            elif type(x) is tuple and all(type(one) is int for one in x):
                key += (name, x)
            elif isinstance(x, Tensor) and type(x) in _PLAIN and not x.is_nested:
                key += (name, x.shape, x.dtype, x.device, x.layout, x.requires_grad)
            else:
                return None
    return tuple(key)


def find(
    key: Hashable | None, variant: str, arguments: dict[str, Any], params: dict[str, Any]
) -> tuple[Backend, Call, Form] | None:
    """What runs the call, if it is known and its variant and backend are still the registered."""
    known = None if key is None else _KNOWN.get(key)
    if known is None or known.variant is not get_variant(variant):
        return None
    if BACKENDS.get(known.backend.name) is not known.backend:
        return None
    again = known.again(arguments, params)
    return None if again is None else (known.backend, *again)


def remember(
    key: Hashable | None,
    ready: Prepared,
    forms: tuple[Form, ...],
    backend: Backend,
    form: Form,
    params: dict[str, Any],
) -> None:
    """Keep how the call was checked, and which backend runs which of its forms."""
    if key is None:
        return
    call = ready.call
    place = -1 if isinstance(form, Definition) else [x is form for x in forms].index(True)
    tensors = {name for name, x in params.items() if isinstance(x, Tensor)}
    vectors = tuple(
        (f"{ready.variant.name}'s {p.name}", p) for p in ready.variant.params if p.name in tensors
    )
    layout = any(x is not None for x in (call.mask, call.alibi, call.segments))
    if layout:
        call = replace(call, mask=None, alibi=None, segments=None)
    elif call.device.type == "cpu" and call.queries * call.keys <= SMALL:
        # On a GPU a captured graph would hold the address of what is forgotten here.
        call = call.remembering()
    own = {name: x for name, x in ready.params.items() if name not in tensors}
    if len(_KNOWN) >= MOST:
        oldest = list(_KNOWN)[0]  # noqa: RUF015 (an iterator fails where other threads write)
        _KNOWN.pop(oldest, None)
    _KNOWN[key] = Known(
        ready.variant,
        call,
        own,
        vectors,
        backend,
        place,
        has_tensors=layout or bool(tensors),
        with_grad=torch.is_grad_enabled(),
        outlines=tuple(map(_outline, forms)),
    )


def _outline(form: Form) -> Hashable:
    """What the choice of a backend may depend on."""
    if isinstance(form, Pairwise):
        vectors = (form.gain, form.offset, form.shape, form.sink)
        return form.activation, form.normalize, form.keep, *map(type, vectors), *map(_kind, vectors)
    return (form.kind, form.cancels) if isinstance(form, Linear) else form.kind


def _kind(vector: Any) -> Hashable:
    if isinstance(vector, Tensor):
        return vector.shape, vector.dtype, vector.requires_grad
    return vector.differentiable if isinstance(vector, FromStatistics) else type(vector)
