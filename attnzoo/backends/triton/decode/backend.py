"""Pairwise forms for a few query rows against many keys, in Triton kernels, without gradients.

The keys are split among programs, each of which reads its own once for all rows of a group of
heads. `flash` is for many rows, this is for the next token.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends.base import Backend
from attnzoo.backends.transforms import refuse_transforms
from attnzoo.backends.triton.decode import operators as ops
from attnzoo.backends.triton.flash import backend as flash
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, FromStatistics, Pairwise, Statistics

# By bytes of an element: the rows that read one key, queries × heads of a group, in one tile.
MOST_ROWS = {2: 64, 4: 32}


def unsupported(form: Form, call: Call) -> str | None:
    if (refusal := flash.unsupported(form, call)) is not None:
        return refusal
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
    refuse_transforms("decode", q, k, v)
    q, k, v = flash.readable(q, k, v)
    facts, scale = flash.facts_of(call), call.scale
    gain, products = form.gain, None
    if isinstance(gain, FromStatistics):
        products, *found = ops.decode_statistics(q, k, scale, *facts)
        gain = gain.row(Statistics(*found))
    if not isinstance(gain, Tensor):
        scale, gain = scale * gain, None
    gain, tau, shape, sink = (
        flash.row(x, call) for x in (gain, form.offset, form.shape, form.sink)
    )
    twin = (form.activation.triton, form.activation.unit, form.activation.vanishes)
    if form.normalize == "threshold":
        alpha = flash.alpha_of(form)
        products, tau = ops.decode_threshold(q, k, gain, shape, scale, *facts, twin[0], alpha)
    out, lse = ops.decode_forward(
        q, k, v, products, gain, tau, shape, sink, scale, *facts, *twin,
        flash.normalize(form), call.return_lse,
    )  # fmt: skip
    return out, lse if call.return_lse else None


BACKEND = Backend("decode", ("pairwise",), unsupported, run)
