"""attention(): check → name → bind → choose → run. The one place where variants meet backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnzoo.variants  # noqa: F401  (registers the zoo)
from attnzoo.backends import eager, linear, sdpa
from attnzoo.backends.selection import linear_work, preference
from attnzoo.backends.tiled import backend as tiled
from attnzoo.backends.triton.decode import backend as decode
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.backends.triton.linear import backend as flash_linear
from attnzoo.core.call import Call, in_full_precision
from attnzoo.core.forms import Definition, Form, Linear, NoForm, Pairwise, Variant
from attnzoo.core.parameters import bind, check_rows
from attnzoo.core.registry import get_variant
from attnzoo.core.validation import ARGUMENTS, Segments, Window, check_call
from attnzoo.core.values import shown

BACKENDS = {
    "sdpa": sdpa,
    "decode": decode,
    "flash": flash,
    "flash_linear": flash_linear,
    "linear": linear,
    "tiled": tiled,
    "eager": eager,
}


class Candidate(NamedTuple):
    backend: str
    form: Form
    objection: str | None
    note: str = ""  # what decided its place


@dataclass(frozen=True)
class Plan:
    """What `attention` would do with a call, and why.

    ``chosen`` is the backend's name, or None where the variant refuses the call (``refusal`` says
    why) or a named backend objects. ``str()`` is the table of backends, forms and reasons in the
    order of preference.
    """

    variant: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    refusal: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.variant}: refused\n  {self.refusal}"
        rows = [f"{self.variant}: {self.chosen}"]
        taken = False
        for backend, form, objection, note in self.candidates:
            first = objection is None and backend == self.chosen and not taken
            taken = taken or first
            reason = objection or ("chosen" if first else "able") + note
            rows.append(f"  {backend:<12} {form.kind:<11} {reason}")
        return "\n".join(rows)


class Prepared(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    call: Call
    variant: Variant
    params: dict[str, Any]
    refusal: str | None

    @property
    def definition(self) -> Definition:
        """The variant's definition, its parameters shaped as `Variant` says."""
        params = {n: x[..., None] if isinstance(x, Tensor) else x for n, x in self.params.items()}
        zoo = self.variant
        return Definition(zoo.name, zoo.weights, zoo.scores, params)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The variant's forms for this call, checked: they may be a user's own."""
        forms = self.variant.forms(self.call, **self.params)
        what = f"forms of variant {self.variant.name!r}"
        if not isinstance(forms, tuple) or not all(isinstance(x, Form) for x in forms):
            raise TypeError(
                f"{what} must be a tuple of Pairwise, Linear or NoForm, got {shown(forms)}"
            )
        for form in forms:
            if isinstance(form, Pairwise):
                check_rows(what, form, self.call)
        return forms


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Window = None,
    alibi: Tensor | None = None,
    segment_ids: Segments = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
    **params: Any,
) -> Any:
    """Attention with any normalizer: o_i = Σ_j w_ij v_j, w as the variant says.

    Args:
        q: queries, (B, H, Nq, D); fp16, bf16, fp32 or fp64.
        k: keys, (B, Hkv, Nk, D), same dtype and device.
        v: values, (B, Hkv, Nk, Dv).
        variant: a name from `list_variants`.
        attn_mask: broadcasts to (B, H, Nq, Nk). Bool: True = attend. Float: added to the scores
            after the gain; −inf is invisible, every finite entry is visible. With query dimension
            1 it is a mask of keys.
        is_causal: query i, at position Nk − Nq + i, sees the keys up to its own position (bottom
            right, unlike torch for Nq ≠ Nk). With ``attn_mask`` both hold.
        scale: of q·k; None is D^-½.
        enable_gqa: let H be a multiple of Hkv.
        window: W keys i − W + 1 … i when causal; (left, right) when not.
        alibi: slopes (H,); −slope·|i − j| is added after the gain.
        segment_ids: int (B, N), or a pair for queries and keys: only keys of the row's own segment
            are visible.
        dropout_p: on the weights after normalization, scaled by 1/(1 − p). Draws differ between
            backends.
        backend: None chooses (see `explain`); a name is used or refused, never replaced.
        return_lse: also return log Σ_j exp(s_ij), sink excluded, for variants with φ = exp.
        **params: of the variant: a float, a tensor () or (H,) with H the query heads, or
            (B, H, Nq) where the variant says so.

    Returns:
        (B, H, Nq, Dv) in q's dtype; with ``return_lse`` also lse, (B, H, Nq), fp32 (fp64 for fp64
        inputs). A row without visible keys is 0, its lse −inf, its gradient 0.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 2, 8, 100, 64).unbind()
        >>> attnzoo.attention(q, k, v, "ssmax", is_causal=True, s=0.2).shape
        torch.Size([2, 8, 100, 64])

    Differs from ``scaled_dot_product_attention``: bottom-right causality, mask and causality
    together, rows without keys. Under autocast q, k and v are cast to its dtype, as there.
    """
    arguments = dict(
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        alibi=alibi,
        segment_ids=segment_ids,
        dropout_p=dropout_p,
        return_lse=return_lse,
        **params,
    )
    ready = prepare(q, k, v, variant, arguments)
    q, k, v, call = ready.q, ready.k, ready.v, ready.call
    with in_full_precision(call.device):
        name, form = _choose(ready, backend)
        out, lse = BACKENDS[name].run(q, k, v, call, form)
    out = out.to(call.input_dtype)
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Any:
    """The weights w that `attention` would put on the values: (B, H, Nq, Nk) in q's dtype.

    Takes the arguments of `attention` and materializes the weights from the variant's definition,
    so ``backend`` may only be None or "eager". With ``return_lse`` returns (weights, lse).

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> w = attnzoo.attention_weights(q, k, v, "sparsemax", is_causal=True)
        >>> bool((w.sum(-1) - 1).abs().max() < 1e-5)
        True
    """
    if backend not in (None, "eager"):
        raise ValueError(
            f"backend of attention_weights must be None or 'eager', got {shown(backend)}"
        )
    ready = prepare(q, k, v, variant, arguments)
    raise_refusal(ready)
    with in_full_precision(ready.call.device):
        w, lse = eager.weights(ready.q, ready.k, ready.call, ready.definition)
    w = w.to(ready.call.input_dtype)
    return (w, lse) if ready.call.return_lse else w


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "softmax",
    *,
    backend: str | None = None,
    **arguments: Any,
) -> Plan:
    """What `attention` would do with these arguments, without doing it.

    Returns:
        a `Plan`: ``.chosen`` is the backend, its text the table of candidates and reasons. A named
        ``backend`` that objects, and a variant that refuses, show as ``chosen`` None.

    Example:
        >>> import torch, attnzoo
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind()
        >>> attnzoo.explain(q, k, v, "ssmax", is_causal=True).chosen
        'sdpa'
    """
    ready = prepare(q, k, v, variant, arguments)
    _check_backend(backend)
    if ready.refusal is not None:
        return Plan(variant, None, (), ready.refusal)
    found = tuple(_with_note(candidate, ready.call) for candidate in _candidates(ready))
    able = [c.backend for c in found if c.objection is None and backend in (None, c.backend)]
    return Plan(variant, able[0] if able else None, found)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    arguments: dict[str, Any],
    origin: int | None = None,
) -> Prepared:
    """Everything that can be wrong with a call is found here.

    ``origin``: the position of the first query and of the first key, where a state came before.
    """
    zoo = get_variant(variant)
    given = q
    q, k, v = _autocast(q, k, v)
    facts = {name: value for name, value in arguments.items() if name in ARGUMENTS}
    params = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
    mask = facts.get("attn_mask")
    if q is not given and isinstance(mask, Tensor) and mask.dtype == given.dtype:
        facts["attn_mask"] = mask.float()  # it fitted q as it came; fp32 holds all 16-bit values
    call = check_call(q, k, v, **facts)
    if origin is not None:
        call = replace(call, query_origin=origin, key_origin=origin)
    with in_full_precision(call.device):
        bound = bind(zoo, call, params)
        refusal = zoo.refuse(call, **bound)
        if refusal is not None and not isinstance(refusal, str):
            raise TypeError(
                f"refuse of variant {zoo.name!r} must be a str or None, got {shown(refusal)}"
            )
        if refusal is None and call.return_lse and zoo.scores is None:
            refusal = f"return_lse: {variant} is no softmax of scores, it has no log-sum-exp"
    inputs = [q, k, v, call.alibi, call.mask, *bound.values()]
    needs = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )
    return Prepared(q, k, v, replace(call, needs_grad=needs), zoo, bound, refusal)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, what it does to scaled_dot_product_attention: all but fp64 in its dtype."""
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)}
    if len(kinds) != 1 or not torch.amp.is_autocast_available(kind := kinds.pop()):
        return tensors
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def raise_refusal(ready: Prepared) -> None:
    if ready.refusal is not None:
        raise ValueError(ready.refusal)


def _check_backend(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(
            f"backend must be None or one of {', '.join(BACKENDS)}, got {shown(backend)}"
        )


def _candidates(ready: Prepared) -> Iterator[Candidate]:
    """In the order of preference, each asked when its turn comes; without notes."""
    name = ready.variant.name
    forms: tuple[Form, ...] = (*ready.forms, ready.definition)
    kinds = {form.kind for form in forms}
    absent = [k for k in ("pairwise", "linear") if k not in kinds]
    forms += tuple(NoForm(kind, f"{name} has no {kind} form") for kind in absent)
    for backend, form in preference(forms, ready.call):
        yield Candidate(backend, form, BACKENDS[backend].unsupported(form, ready.call))


def _with_note(candidate: Candidate, call: Call) -> Candidate:
    # For `explain` only: in a compiled call the work is a symbol, which no format takes.
    form = candidate.form
    if candidate.backend not in ("linear", "flash_linear") or not isinstance(form, Linear):
        return candidate
    return candidate._replace(note=f": {linear_work(form, call):.2g} × the work of all pairs")


def _choose(ready: Prepared, backend: str | None) -> tuple[str, Form]:
    _check_backend(backend)
    raise_refusal(ready)
    reasons = []
    for name, form, objection, _ in _candidates(ready):
        if backend not in (None, name):
            continue
        if objection is None:
            return name, form
        reasons.append(f"{form.kind}: {objection}")
    raise ValueError(
        f"backend {backend!r} cannot run {ready.variant.name!r} here: {'; '.join(reasons)}"
    )
