"""Pairwise forms for a few query rows against many keys, in Triton kernels, without gradients.

The keys are split among programs, each of which reads its own once for all rows of a group of
heads; see `attnzoo.kernels.decode`. What `flash` does for many rows, this does for the next token.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.backends import decode_ops as ops
from attnzoo.backends import flash
from attnzoo.backends.threshold import ALPHA
from attnzoo.call import Call
from attnzoo.forms import Form, FromStatistics, Pairwise, Statistics

# Rows that read one key: queries × query heads per key/value head. What one tile holds.
MOST_ROWS = 64


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, Pairwise) and call.needs_grad:
        return "has no backward; flash has"
    if (rows := packed_rows(call)) > MOST_ROWS:
        return f"packs up to {MOST_ROWS} rows that read one key, not {rows}; flash takes any"
    return flash.unsupported(form, call)


def packed_rows(call: Call) -> int:
    return call.queries * (call.heads // max(1, call.kv_heads))


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    assert isinstance(form, Pairwise)
    assert form.activation.triton is not None
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
        alpha = ALPHA.get(form.activation.name)
        products, tau = ops.decode_threshold(q, k, gain, shape, scale, *facts, twin[0], alpha)
    out, lse = ops.decode_forward(
        q, k, v, products, gain, tau, shape, sink, scale, *facts, *twin,
        flash.normalize(form), call.return_lse,
    )  # fmt: skip
    return out, lse if call.return_lse else None
