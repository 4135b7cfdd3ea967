"""Validation: turns the arguments of a call into a `ValidatedCall`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnzoo.variants  # noqa: F401  (registers the shipped variants)
from attnzoo.backends.base import Backend
from attnzoo.backends.selection import choose
from attnzoo.core.arguments import ARGUMENTS, check_call
from attnzoo.core.call import WITHOUT_AUTOCAST, Call, in_full_precision
from attnzoo.core.checks import shown
from attnzoo.core.forms import Definition, Form, Linear, NoForm, Pairwise, Shares
from attnzoo.core.parameters import bind, checked_vectors
from attnzoo.core.registry import get_variant
from attnzoo.core.variant import Variant


class ValidatedCall(NamedTuple):
    """A validated call: q, k, v after autocast, the variant and its validated parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call
    variant: Variant
    params: dict[str, Any]
    unsupported: str | None  # why the variant does not support the call

    @property
    def definition(self) -> Definition:
        return definition_of(self.variant, self.params)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The variant's forms for this call, validated because users write variants too."""
        forms = self.variant.forms(self.call, **self.params)
        what = f"forms of variant {self.variant.name!r}"
        kinds = (Pairwise, Linear, Shares, NoForm)
        if not isinstance(forms, tuple) or not all(isinstance(x, kinds) for x in forms):
            raise TypeError(
                f"{what} must be a tuple of Pairwise, Linear, Shares or NoForm, got {shown(forms)}"
            )
        return tuple(
            checked_vectors(what, form, self.call) if isinstance(form, Pairwise) else form
            for form in forms
        )


class Choice(NamedTuple):
    """Which backend runs a call, with which form; ``forms`` are those it was chosen from."""

    backend: Backend
    form: Form
    forms: tuple[Form, ...]


def choose_backend(ready: ValidatedCall, backend: str | None) -> Choice:
    """Choose a backend, or raise an error if the named one cannot run the call.

    Every function that runs a validated call runs it as this function says. `explain` shows the
    candidates in the same order.
    """
    check_supported(ready)
    forms = ready.forms
    chosen = choose(ready.variant.name, (*forms, ready.definition), ready.call, backend)
    return Choice(*chosen, forms)


def definition_of(variant: Variant, params: dict[str, Any]) -> Definition:
    """The variant's definition, with tensor parameters that broadcast against scores."""
    shaped, unshaped = dict(params), []
    for param in variant.params:
        value = params[param.name]
        if not isinstance(value, Tensor):
            continue
        if param.kind == "tensor":
            unshaped.append(param.name)
        else:
            # A per-key tensor with one entry per head broadcasts like a per-query one.
            per_key = param.per_key and value.shape[-1] != 1
            shaped[param.name] = value.unsqueeze(-2 if per_key else -1)
    return Definition(variant.name, variant.weights, variant.scores, shaped, tuple(unshaped))


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    arguments: dict[str, Any],
    positions: tuple[int, int] | None = None,
) -> ValidatedCall:
    """Validate a call and bind the variant's parameters.

    Args:
        arguments: The keyword arguments of `attention` except backend, and the variant's own.
        positions: The positions of the first query and the first key. None: the first key is at 0,
            the last query at the last key.
    """
    chosen = get_variant(variant)
    uncast = q
    q, k, v = cast_by_autocast(q, k, v)
    common = {name: value for name, value in arguments.items() if name in ARGUMENTS}
    params = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
    mask = common.get("attn_mask")
    if q is not uncast and isinstance(mask, Tensor) and mask.dtype == uncast.dtype:
        common["attn_mask"] = mask.float()  # the mask had q's dtype before autocast
    call = check_call(q, k, v, **common)
    if positions is not None:
        call = replace(call, query_origin=positions[0], key_origin=positions[1])
    with in_full_precision(call.device):
        bound = bind(chosen, call, params)
        reason = why_unsupported(chosen, call, bound)
    inputs = [q, k, v, call.relative_bias, call.mask, *bound.values()]
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )
    return ValidatedCall(q, k, v, replace(call, needs_grad=needs_grad), chosen, bound, reason)


def why_unsupported(variant: Variant, call: Call, bound: dict[str, Any]) -> str | None:
    """Return why the variant does not support the call, or None if it does."""
    reason = variant.unsupported(call, **bound)
    if reason is not None and not isinstance(reason, str):
        raise TypeError(
            f"unsupported of variant {variant.name!r} must return a str or None, got "
            f"{shown(reason)}"
        )
    if reason is None and not variant.has_logits:
        reason = _needs_logits(variant, call)
    if reason is None and call.return_lse and variant.scores is None:
        return f"return_lse must be False for {variant.name}, which returns no log-sum-exp"
    return reason


def _needs_logits(variant: Variant, call: Call) -> str | None:
    if call.has_bias:
        return (
            f"{variant.name} has no additive score: attn_mask must be bool (True = attend), "
            "alibi None and relative_bias None"
        )
    if call.softcap is not None:
        return f"{variant.name} has no logits: softcap must be None, got {call.softcap}"
    if call.return_max_logits:
        return f"{variant.name} has no logits: return_max_logits must be False, got True"
    return None


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype to which autocast casts an input of attention; without autocast its own."""
    kind = x.device.type
    if kind in WITHOUT_AUTOCAST or not torch.is_autocast_enabled(kind):
        return x.dtype
    exempt = not x.is_floating_point() or x.dtype == torch.float64
    return x.dtype if exempt else torch.get_autocast_dtype(kind)


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast all but fp64 to the autocast dtype, if any, as scaled_dot_product_attention does."""
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
    if len(kinds) != 1:
        return tensors
    return tuple(x.to(autocast_dtype(x)) if isinstance(x, Tensor) else x for x in tensors)


def check_supported(ready: ValidatedCall) -> None:
    if ready.unsupported is not None:
        raise ValueError(ready.unsupported)
