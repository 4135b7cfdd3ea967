"""Computes a variant's definition: dense weights times values, differentiable to any order."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.core.call import Call
from attnzoo.core.forms import Definition, Form
from attnzoo.core.variant import source_of


def unsupported(form: Form, call: Call) -> str | None:
    return None if isinstance(form, Definition) else "supports definitions only"


def weights(q: Tensor, k: Tensor, call: Call, form: Definition) -> tuple[Tensor, Tensor | None]:
    """Return the weights after dropout (B, H, Nq, Nk), and lse (B, H, Nq) if requested."""
    # q and k are cast once, so that gradients of their several uses are summed in call.dtype.
    q, k = q.to(call.dtype), k.to(call.dtype)
    if call.mask is not None and call.mask.dtype not in (torch.bool, call.dtype):
        call = replace(call, mask=call.mask.to(call.dtype))
    w = form.weights(q, k, call, **form.params)
    check(w, call, f"{source_of(form.weights)} of variant {form.name!r}")
    if call.dropout_p:
        w = torch.nn.functional.dropout(w, call.dropout_p)
    if not call.return_lse:
        return w, None
    assert form.scores is not None  # checked when the call was prepared
    scores = form.scores(q, k, call, **form.params)
    check(scores, call, f"scores of variant {form.name!r}")
    return w, call.logsumexp(scores)


def check(x: Tensor, call: Call, what: str) -> None:
    shape = (call.batch, call.heads, call.queries, call.keys)
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(
            f"{what} must have shape (B, H, Nq, Nk) = {shape}, got {tuple(x.shape)}; call.counts "
            "and call.log_n need [..., None] to broadcast against scores, tensor parameters do not"
        )
    if x.dtype != call.dtype:
        raise TypeError(
            f"{what} must have the dtype of call.scores(q, k), {call.dtype}, got {x.dtype}"
        )


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Definition)
    w, lse = weights(q, k, call, form)
    return call.by_group(w, v.to(call.dtype)), lse


def max_logits(q: Tensor, k: Tensor, call: Call) -> Tensor:
    logits = call.scores(q, k)
    if not call.sees_all:
        logits = logits.masked_fill(~call.visible, float("-inf"))
    of_heads = logits.transpose(0, 1).flatten(1)
    # The added entry is the maximum of no logits.
    return torch.nn.functional.pad(of_heads, (0, 1), value=float("-inf")).amax(-1)


BACKEND = Backend(
    "eager", ("definition",), unsupported, run, max_logits=max_logits, any_alignment=True
)
