"""Row statistics in one pass over the keys: lse and entropy of the un-gained scores, bias included.

With Z = Σ e^{s−m} and T = Σ (s−m) e^{s−m}:  lse = m + log Z,  H = log Z − T/Z.
Their gradient: dS = p · (dlse − dH (log p + H)), p = e^{s − lse}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.operator import operator
from attnzoo.backends.tiled.blocks import (
    ScoreGradients,
    Scratch,
    block_scores,
    blocks,
    call_of,
    fake_gradient,
    flat_keys,
    numbers_of,
    scaled_queries,
    solid,
)
from attnzoo.backends.transforms import refuse_transforms
from attnzoo.backends.triton.flash.operators import NO_DOUBLE
from attnzoo.core.call import Call, in_full_precision, score_dtype
from attnzoo.core.forms import FromStatistics, Pairwise, Statistics

# exp is 0 in fp32 and fp64 below this, so a score clamped here drops out of both sums.
FLOOR = -1e4


def with_rows(form: Pairwise, q: Tensor, k: Tensor, call: Call, backend: str) -> Pairwise:
    """The form with its gain as a row, after the pass that it may need."""
    if not isinstance(form.gain, FromStatistics):
        return form
    refuse_transforms(backend, q, k, call.mask, call.alibi)
    segments = call.segments or (None, None)
    with torch.set_grad_enabled(torch.is_grad_enabled() and form.gain.differentiable):
        found = tiled_statistics(q, k, call.mask, call.alibi, *segments, **numbers_of(call))
    # A row without keys has lse −inf, entropy 0. A parameter of the row has its gradient anyway.
    return replace(form, gain=form.gain.row(Statistics(*found)))


@operator("tiled_statistics")
def tiled_statistics(
    q: Tensor, k: Tensor, mask: Tensor | None, alibi: Tensor | None,
    q_segments: Tensor | None, k_segments: Tensor | None,
    *, scale: float, left: int | None, right: int | None, query_origin: int, key_origin: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rows lse and entropy."""
    call = call_of(
        q, k, mask, alibi, q_segments, k_segments, scale=scale, left=left, right=right,
        query_origin=query_origin, key_origin=key_origin,
    )  # fmt: skip
    with in_full_precision(q.device):
        return _statistics(call, q, k)


@torch.library.register_fake("attnzoo::tiled_statistics")
def _(q: Tensor, *others: Any, **numbers: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=score_dtype(q))
    return lse, torch.empty_like(lse)


@operator("tiled_statistics_backward")
def tiled_statistics_backward(
    dlse: Tensor, dentropy: Tensor, q: Tensor, k: Tensor, mask: Tensor | None,
    alibi: Tensor | None, q_segments: Tensor | None, k_segments: Tensor | None,
    lse: Tensor, entropy: Tensor,
    *, scale: float, left: int | None, right: int | None, query_origin: int, key_origin: int,
    wants_mask: bool, wants_alibi: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, mask and alibi; without elements where none is wanted."""
    call = call_of(
        q, k, mask, alibi, q_segments, k_segments, scale=scale, left=left, right=right,
        query_origin=query_origin, key_origin=key_origin,
    )  # fmt: skip
    with in_full_precision(q.device):
        grads = ScoreGradients(call, q, k, None, wants_mask, wants_alibi)
        _statistics_gradients(call, grads, dlse, dentropy, lse, entropy)
        dq, dk, dmask, dalibi = solid(q, *grads.tensors(k)[:4])
    return dq, dk, dmask, dalibi


@torch.library.register_fake("attnzoo::tiled_statistics_backward")
def _(
    dlse: Tensor, dentropy: Tensor, q: Tensor, k: Tensor, mask: Tensor | None,
    alibi: Tensor | None, *others: Any, wants_mask: bool, wants_alibi: bool, **numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = ((q, True), (k, True), (mask, wants_mask), (alibi, wants_alibi))
    return tuple(fake_gradient(q, x, wants) for x, wants in wanted)


def _save(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.numbers = keyword_only_inputs


def _backward(ctx: Any, dlse: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    dq, dk, dmask, dalibi = tiled_statistics_backward(
        dlse, dentropy, *ctx.saved_tensors, **ctx.numbers,
        wants_mask=needs[2], wants_alibi=needs[3],
    )  # fmt: skip
    return dq, dk, dmask if needs[2] else None, dalibi if needs[3] else None, None, None


torch.library.register_autograd("attnzoo::tiled_statistics", _backward, setup_context=_save)


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(NO_DOUBLE)


torch.library.register_autograd("attnzoo::tiled_statistics_backward", _refuse)


def _statistics(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    keys, scratch, second = flat_keys(k, call), Scratch(call), Scratch(call)
    shape = (call.batch, call.heads, call.queries)
    lse = torch.full(shape, float("-inf"), dtype=call.dtype, device=call.device)
    entropy = torch.zeros_like(lse)
    for block in blocks(call):
        scaled = scaled_queries(block, q, None)
        s, _ = block_scores(block, scaled, keys, scratch, vanishes=True)
        m = s.amax(-1)
        empty = m == float("-inf")
        s.sub_(m.masked_fill(empty, 0.0)[..., None]).clamp_(min=FLOOR)
        e = torch.exp(s, out=second.view(*s.shape))
        z = e.sum(-1).clamp(min=torch.finfo(call.dtype).tiny)
        part = block.part
        lse[part] = m + z.log()
        entropy[part] = (z.log() - s.mul_(e).sum(-1) / z).masked_fill(empty, 0.0)
    return lse, entropy


def _statistics_gradients(
    call: Call, grads: ScoreGradients, dlse: Tensor, dentropy: Tensor, lse: Tensor, entropy: Tensor
) -> None:
    scratch, second = Scratch(call), Scratch(call)
    for block in blocks(call):
        scaled = scaled_queries(block, grads.q, None)
        s, _ = block_scores(block, scaled, grads.keys, scratch, vanishes=True)
        part = block.of(lse)
        empty = part == float("-inf")
        log_p = s.sub_(part.masked_fill(empty, 0.0)[..., None]).clamp_(min=FLOOR)
        p = torch.exp(log_p, out=second.view(*s.shape))
        dh = block.of(dentropy)
        constant_part = block.of(dlse) - dh * block.of(entropy)
        ds = log_p.mul_(-dh[..., None]).add_(constant_part[..., None]).mul_(p)
        grads.add(block, ds, scaled)
