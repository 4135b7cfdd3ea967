"""Row statistics in one pass over the keys: lse and entropy of the un-gained scores, bias included.

With Z = Σ e^{s−m} and T = Σ (s−m) e^{s−m}:  lse = m + log Z,  H = log Z − T/Z.
Their gradient: dS = p · (dlse − dH (log p + H)), p = e^{s − lse}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.blocks import (
    ScoreGradients,
    Scratch,
    block_scores,
    blocks,
    constant,
    flat_keys,
    once,
    scaled_queries,
)
from attnzoo.call import Call
from attnzoo.forms import FromStatistics, Pairwise, Statistics

# exp is 0 in fp32 and fp64 below this, so a score clamped here drops out of both sums.
FLOOR = -1e4


def with_rows(form: Pairwise, q: Tensor, k: Tensor, call: Call) -> Pairwise:
    """The form with its gain as a row, after the pass that it may need."""
    if not isinstance(form.gain, FromStatistics):
        return form
    with torch.set_grad_enabled(torch.is_grad_enabled() and form.gain.differentiable):
        found = Statistics(*_RowStatistics.apply(constant(call), q, k, call.mask, call.alibi))
    # A row without keys has lse −inf, entropy 0. A parameter of the row has its gradient anyway.
    return replace(form, gain=form.gain.row(found))


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, mask: Tensor | None, alibi: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.call = call
        call = replace(call, mask=mask, alibi=alibi)
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
        ctx.save_for_backward(q, k, mask, alibi, lse, entropy)
        return lse, entropy

    @staticmethod
    def backward(ctx: Any, dlse: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, mask, alibi, *_ = ctx.saved_tensors
        with torch.no_grad():
            grads = _RowStatistics.gradients(ctx, dlse, dentropy)
        return None, *once(grads, q, k, mask, alibi, dlse, dentropy)

    @staticmethod
    def gradients(ctx: Any, dlse: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, mask, alibi, lse, entropy = ctx.saved_tensors
        call = replace(ctx.call, mask=mask, alibi=alibi)
        grads = ScoreGradients(call, q, k, None)
        scratch, second = Scratch(call), Scratch(call)
        for block in blocks(call):
            scaled = scaled_queries(block, q, None)
            s, _ = block_scores(block, scaled, grads.keys, scratch, vanishes=True)
            part = block.of(lse)
            empty = part == float("-inf")
            log_p = s.sub_(part.masked_fill(empty, 0.0)[..., None]).clamp_(min=FLOOR)
            p = torch.exp(log_p, out=second.view(*s.shape))
            dh = block.of(dentropy)
            constant_part = block.of(dlse) - dh * block.of(entropy)
            ds = log_p.mul_(-dh[..., None]).add_(constant_part[..., None]).mul_(p)
            grads.add(block, ds, scaled)
        dq, dk, dmask, dalibi, _ = grads.tensors(k, mask, alibi)
        return dq, dk, dmask, dalibi
