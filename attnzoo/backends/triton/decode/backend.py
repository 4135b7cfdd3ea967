"""Pairwise forms for a few query rows against many keys, in Triton kernels, without gradients.

The keys are split among programs, each of which reads its own once for all rows of a group of
heads. `flash` is for many rows, this is for the next token.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.transforms import reject_transforms
from attnzoo.backends.triton.common.kernel_operands import layout_of, vectors_of
from attnzoo.backends.triton.decode import operators as ops
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, Pairwise, Statistics

# By bytes of an element: the rows that read one key, queries × heads of a group, in one tile.
MOST_ROWS = {2: 64, 4: 32}


def unsupported(form: Form, call: Call) -> str | None:
    if (reason := flash.unsupported(form, call)) is not None:
        return reason
    if call.needs_grad:
        return "has no backward; flash has"
    rows, most = packed_rows(call)
    if rows > most:
        return f"packs up to {most} rows that read one key, not {rows}; flash takes any"
    return None


def packed_rows(call: Call) -> tuple[int, int]:
    """Rows that read one key, and how many there may be."""
    most = MOST_ROWS.get(call.input_dtype.itemsize, 0)
    return call.queries * (call.heads // max(1, call.kv_heads)), most


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    assert form.activation.triton is not None
    reject_transforms("decode", q, k, v)
    q, k, v = flash.readable(q, k, v)
    layout, gain, products = layout_of(call), form.gain, None
    if isinstance(gain, FromStatistics):
        products, *found = ops.decode_statistics(q=q, k=k, layout=layout)
        gain = gain.gain(Statistics(*found))
    layout, vectors = vectors_of(form, gain, layout, call)
    kernel_form = flash.form_of(form)
    if form.normalize == "threshold":
        alpha = flash.alpha_of(form)
        products, tau = ops.decode_threshold(
            q=q, k=k, vectors=vectors, layout=layout, form=kernel_form, alpha=alpha
        )
        vectors = vectors._replace(offset=tau)
    return ops.decode_forward(
        q=q, k=k, v=v, products=products, vectors=vectors, layout=layout, form=kernel_form,
        want_lse=call.return_lse,
    )  # fmt: skip


BACKEND = Backend("decode", ("pairwise",), unsupported, run)
