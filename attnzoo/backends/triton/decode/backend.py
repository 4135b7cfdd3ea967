"""Runs pairwise forms of few queries, as in decoding, in Triton kernels, without gradients."""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.shared_operands import rule_of
from attnzoo.backends.transforms import reject_transforms, uses_transforms
from attnzoo.backends.triton.common.kernel_operands import (
    NOT_PAGED,
    Paged,
    is_read_in_place,
    layout_of,
    operands_of,
    pad_columns,
)
from attnzoo.backends.triton.decode import operators as ops
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, Pairwise, Statistics

# Limit of queries × heads per group, by bytes of an element: the rows of one tile.
MOST_ROWS = {2: 64, 4: 32}


def unsupported(form: Form, call: Call) -> str | None:
    if (reason := flash.unsupported(form, call)) is not None:
        return reason
    if isinstance(form, Pairwise) and form.normalize == "select":
        return "does not support a selection of keys (flash does)"
    if call.dropout_p:
        return "does not support dropout (flash does)"
    if call.needs_grad:
        return "does not support gradients (flash does)"
    if uses_transforms():
        return "does not support torch.func transforms (sdpa does for softmax, eager for all)"
    if call.pages is not None and not all(map(is_read_in_place, (call.pages.k, call.pages.v))):
        return "does not read pages in which keys or values are not adjacent blocks of 16 bytes"
    rows = call.queries * (call.heads // max(1, call.kv_heads))
    if rows > (most := MOST_ROWS[call.input_dtype.itemsize]):
        return (
            f"does not support more than {most} queries × query heads per key/value head, got "
            f"{rows} (flash does)"
        )
    return None


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    assert form.activation.triton is not None
    reject_transforms("decode", q, k, v, call.mask, call.relative_bias)
    q, k, v = pad_columns(q), pad_columns(k), pad_columns(v)
    layout, gain, products = layout_of(call), form.gain, None
    pages, paged = call.pages, NOT_PAGED
    if pages is not None:
        paged = Paged(pages.table, pages.used, call.keys)
    if isinstance(gain, FromStatistics):
        products, *statistics = ops.decode_statistics(q=q, k=k, paged=paged, layout=layout)
        gain = gain.of(Statistics(*statistics))
    layout, vectors, terms = operands_of(form, gain, call, layout)
    reject_transforms("decode", *vectors, *terms)
    attended = ops.decode_forward(
        q=q, k=k, v=v, products=products, paged=paged, vectors=vectors, terms=terms,
        layout=layout, rule=rule_of(form), want_lse=call.return_lse,
    )  # fmt: skip
    return flash.without_padding(attended.out, call), attended.lse


BACKEND = Backend(
    "decode", ("pairwise",), unsupported, run, max_logits=flash.max_logits, walks_segments=True,
    reads_pages=True,
)  # fmt: skip
