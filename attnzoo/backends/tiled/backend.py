"""Runs any variant on any device, one block of queries at a time, with memory linear in N.

The operators in this folder compute pairwise and linear forms. Their backward recomputes the
weights φ(s − τ)/Z from the saved τ and Z. A variant without such a form is computed by its
definition, in checkpointed blocks. The loop over these blocks is plain Python, which torch.compile
unrolls. The definition supports every call, except under torch.func transforms.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_exporting
from torch.utils.checkpoint import checkpoint

from attnzoo.backends import eager
from attnzoo.backends.base import Backend
from attnzoo.backends.tiled import operators as ops
from attnzoo.backends.tiled.blocks import Block, blocks, layout_of
from attnzoo.backends.tiled.statistics import max_logits, with_gain
from attnzoo.backends.tiled.walk import NEG_INF, PairwiseCall
from attnzoo.backends.transforms import reject_transforms
from attnzoo.core.activations import IDENTITY
from attnzoo.core.call import Call
from attnzoo.core.checks import is_symbolic
from attnzoo.core.forms import Definition, Form, Linear, Pairwise
from attnzoo.core.registry import get_variant
from attnzoo.core.visibility import cut


def unsupported(form: Form, call: Call) -> str | None:
    if isinstance(form, Linear) and call.softcap is not None:
        return "does not support softcap for a linear form: there is no score to cap"
    if isinstance(form, Definition) and is_exporting() and is_symbolic(call.queries, call.keys):
        return "cannot export a variant without a form for lengths that vary (eager does)"
    if isinstance(form, Definition) or not call.return_lse:
        return None
    if isinstance(form, Pairwise) and form.activation.exponential:
        if form.normalize in ("sum", "select"):
            return None
        return (
            f"does not support return_lse with normalize={form.normalize!r} (the variant's "
            "definition does)"
        )
    return "does not support return_lse unless φ is exp (the variant's definition does)"


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, form: Form) -> tuple[Tensor, Tensor | None]:
    if isinstance(form, Definition):
        return _by_definition(q, k, v, call, form)
    if isinstance(form, Linear):
        # A linear form is a pairwise form on its features, with φ the identity.
        if form.per_query_head:
            call, (k, v) = call.with_repeated_keys(k, v)
        q = form.of_queries(call.scale * q.to(call.dtype), call.query_positions)
        k = form.features(k.to(call.dtype), call.key_positions)
        call, form = replace(call, scale=1.0), Pairwise(IDENTITY, "sum")
    assert isinstance(form, Pairwise)
    _, rule, vectors, terms, seed = PairwiseCall.of(call, with_gain(form, q, k, call, "tiled"))
    reject_transforms("tiled", q, k, v, call.mask, call.relative_bias, *vectors, *terms)
    result = ops.tiled_forward(
        q=q, k=k, v=v, layout=layout_of(call), origin=call.query_origin - call.key_origin,
        vectors=vectors, terms=terms, rule=rule, seed=seed, dropout_p=call.dropout_p,
        want_lse=call.return_lse,
    )  # fmt: skip
    return result.out, result.lse


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, call: Call, form: Definition
) -> tuple[Tensor, Tensor | None]:
    reject_transforms("tiled", q, k, v, call.mask, call.relative_bias)
    # Without blocks, the output would have no gradient.
    if 0 in (call.batch, call.queries, call.keys):
        return eager.run(q, k, v, call, form)
    call = call.with_full_rows(absolute=get_variant(form.name).absolute)
    # Inputs are cast once, so that gradients of the blocks are summed in call.dtype.
    q, k, v = (x.to(call.dtype) for x in (q, k, v))
    if call.mask is not None and call.mask.is_floating_point():
        call = replace(call, mask=call.mask.to(call.dtype))
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=call.dtype, device=q.device)
    lse = torch.full(q.shape[:3], NEG_INF, dtype=call.dtype, device=q.device)
    for block in blocks(call):
        heads = slice(block.heads.start // call.group, block.heads.stop // call.group)
        keys = (block.batches, heads, block.keys)
        part = block.part
        params = {name: _cut_param(x, name, block, form) for name, x in form.params.items()}
        # Both are made outside of the checkpoint, in which the compiler of torch 2.11 cannot trace
        # dataclasses.replace.
        step = partial(eager.run, call=block.call, form=replace(form, params=params))
        inputs = (q[part], k[keys], v[keys])
        if call.needs_grad:
            # The random state is saved, because a definition may draw random numbers.
            done, block_lse = checkpoint(step, *inputs, use_reentrant=False)
        else:
            done, block_lse = step(*inputs)
        out[part] = done
        if block_lse is not None:
            lse[part] = block_lse
    return out, lse if call.return_lse else None


def _cut_param(value: Any, name: str, block: Block, form: Definition) -> Any:
    """The block's part of a parameter of a definition."""
    if not isinstance(value, Tensor):
        return value
    if name in form.head_tensors:
        return value[block.heads]
    # Vectors broadcast against the scores. Only per-key vectors have more than one key.
    return cut(value, *block.part, block.keys)


BACKEND = Backend(
    "tiled", ("pairwise", "linear", "definition"), unsupported, run, max_logits=max_logits,
    any_alignment=True,
)  # fmt: skip
