"""Runs the form `Shares` in Triton kernels, forward and backward.

The forward takes memory linear in N. The backward also stores, until it ends, two fp32 numbers per
query and block of keys (see `kernels.Carried`): N² / 4 bytes per head with blocks of 32 keys.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.transforms import reject_transforms
from attnzoo.backends.triton.common.kernel_operands import layout_of, pad_columns
from attnzoo.backends.triton.flash.backend import max_logits, unsupported_call, without_padding
from attnzoo.backends.triton.shares import operators as ops
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, NoForm, Shares


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, NoForm):
        return form.why
    if not isinstance(form, Shares):
        return "supports the form shares only"
    if call.return_lse:
        return "does not support return_lse: there is no sum of exponentials"
    if call.dropout_p:
        return "does not support dropout (tiled does)"
    if call.needs_grad and call.mask is not None and call.mask.requires_grad:
        return "does not support a gradient for a float mask (tiled does)"
    return unsupported_call(call)


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, None]:
    reject_transforms("flash_shares", q, k, v, call.mask, call.relative_bias)
    layout = layout_of(call)
    # A query sees only keys before its own position.
    layout = layout._replace(right=-1 if layout.right is None else min(layout.right, -1))
    q, k, v = pad_columns(q), pad_columns(k), pad_columns(v)
    return without_padding(ops.shares_forward(q=q, k=k, v=v, layout=layout), call), None


BACKEND = Backend(
    "flash_shares", ("shares",), unsupported, run, max_logits=max_logits, walks_segments=True
)
