"""Computes lse and entropy of the logits (with bias, without gain), or their maximum, in one pass.

m = max s,  Z = Σ e^{s−m},  T = Σ (s−m) e^{s−m},  lse = m + log Z,  H = log Z − T/Z
dS = p · (dlse − dH (log p + H)),  p = e^{s − lse}
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.tiled.blocks import Scratch, blocks, call_of, layout_of
from attnzoo.backends.tiled.scores import ScoreGradients, Scores
from attnzoo.backends.transforms import reject_transforms
from attnzoo.core.call import Call, in_full_precision, score_dtype
from attnzoo.core.forms import FromStatistics, Pairwise, Statistics

# exp(FLOOR) is 0 in fp32 and fp64. A score clamped to FLOOR adds nothing to Z and T.
FLOOR = -1e4


class PartialStatistics(NamedTuple):
    """Statistics over some of the keys of each query, all (B, H, Nq).

    lse is peak + log_sum. The two are apart, because at −1e9 an lse has no digits of the sum.
    Without keys peak is −inf, and the others are finite.
    """

    peak: Tensor
    log_sum: Tensor
    entropy: Tensor

    @property
    def all_keys(self) -> Statistics:
        return Statistics(self.peak + self.log_sum, self.entropy)


def with_gain(form: Pairwise, q: Tensor, k: Tensor, call: Call, backend: str) -> Pairwise:
    """Compute a gain that depends on statistics; return the form with this gain as a vector."""
    if not isinstance(form.gain, FromStatistics):
        return form
    reject_transforms(backend, q, k, call.mask, call.relative_bias)
    origin = call.query_origin - call.key_origin
    with torch.set_grad_enabled(torch.is_grad_enabled() and form.gain.differentiable):
        statistics = tiled_statistics(q=q, k=k, layout=layout_of(call), origin=origin)
    # set_grad_enabled must not cover this line: parameters of the gain may need gradients.
    # A query without keys has lse −∞ and entropy 0.
    return replace(form, gain=form.gain.of(statistics))


@operator
def tiled_statistics(*, q: Tensor, k: Tensor, layout: Layout, origin: int) -> Statistics:
    with in_full_precision(q.device):
        return statistics(call_of(q, k, layout, origin), q, k).all_keys


@tiled_statistics.fake
def _(*, q: Tensor) -> Statistics:
    lse = q.new_empty(q.shape[:3], dtype=score_dtype(q))
    return Statistics(lse, torch.empty_like(lse))


tiled_statistics.flops(flops.one_pass)


@tiled_statistics.backward("q", "k", "mask", "relative_bias")
def tiled_statistics_backward(
    *, q: Tensor, k: Tensor, layout: Layout, origin: int, lse: Tensor, entropy: Tensor,
    dlse: Tensor, dentropy: Tensor, wanted: list[str],
) -> dict[str, Tensor]:  # fmt: skip
    call = call_of(q, k, layout, origin)
    with in_full_precision(q.device):
        return statistics_gradients(call, q, k, None, Statistics(dlse, dentropy), wanted)


@tiled_statistics_backward.flops
def _(*, q: Tensor, k: Tensor, layout: Layout, wanted: list[str]) -> int:
    products = 1 + ("q" in wanted) + ("k" in wanted)
    return products * flops.one_pass(q, k, layout)


def statistics(call: Call, q: Tensor, k: Tensor) -> PartialStatistics:
    """The statistics over the keys of the call."""
    scores, second = Scores(call, k), Scratch(call)
    shape = (call.batch, call.heads, call.queries)
    peak = torch.full(shape, float("-inf"), dtype=call.dtype, device=call.device)
    log_sum, entropy = torch.zeros_like(peak), torch.zeros_like(peak)
    for block in blocks(call):
        s = scores.of(block, scores.queries(block, q)).s
        m = s.amax(-1)
        empty = m == float("-inf")
        s.sub_(m.masked_fill(empty, 0.0)[..., None]).clamp_(min=FLOOR)
        e = torch.exp(s, out=second.view(*s.shape))
        z = e.sum(-1).clamp(min=torch.finfo(call.dtype).tiny)
        part = block.part
        peak[part], log_sum[part] = m, z.log()
        entropy[part] = (z.log() - s.mul_(e).sum(-1) / z).masked_fill(empty, 0.0)
    return PartialStatistics(peak, log_sum, entropy)


@operator
def tiled_max_logits(*, q: Tensor, k: Tensor, layout: Layout, origin: int) -> Tensor:
    with in_full_precision(q.device):
        call = call_of(q, k, layout, origin)
        scores, largest = Scores(call, k), q.new_full(q.shape[1:2], -math.inf, dtype=call.dtype)
        for block in blocks(call):
            top = scores.of(block, scores.queries(block, q)).s.amax((0, 2, 3))
            largest[block.heads] = torch.maximum(largest[block.heads], top)
    return largest


@tiled_max_logits.fake
def _(*, q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1:2], dtype=score_dtype(q))


tiled_max_logits.flops(flops.one_pass)


def max_logits(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """The largest logit of each head (H,), for a call without softcap and bias."""
    reject_transforms("tiled", q, k, call.mask)
    origin = call.query_origin - call.key_origin
    return tiled_max_logits(q=q, k=k, layout=layout_of(call), origin=origin)


def statistics_gradients(
    call: Call,
    q: Tensor,
    k: Tensor,
    total: PartialStatistics | None,
    dtotal: Statistics,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The gradients of q, k and the operands in ``wanted``, by operand name.

    Args:
        call: The call of q and k, or of q and some of the keys.
        total: The statistics over all keys; None if the call has all keys. They are then computed
            again, because an lse is not enough.
        dtotal: The gradients of the statistics.
    """
    scores, second = Scores(call, k), Scratch(call)
    grads = ScoreGradients(scores, q, wanted)
    for block in blocks(call):
        queries = scores.queries(block, q)
        scored = scores.of(block, queries)
        s = scored.s
        top = s.amax(-1) if total is None else block.of(total.peak)
        log_p = s.sub_(top.masked_fill(top == float("-inf"), 0.0)[..., None])
        if total is None:
            p = torch.exp(log_p, out=second.view(*s.shape))
            z = p.sum(-1, keepdim=True).clamp_(min=torch.finfo(call.dtype).tiny)
            log_p, p = log_p.sub_(z.log()), p.div_(z)
        else:
            p = torch.exp(log_p.sub_(block.of(total.log_sum)[..., None]), out=second.view(*s.shape))
        log_p.clamp_(min=FLOOR)
        entropy = -torch.linalg.vecdot(p, log_p) if total is None else block.of(total.entropy)
        dh = block.of(dtotal.entropy)
        constant_part = block.of(dtotal.lse) - dh * entropy
        ds = log_p.mul_(-dh[..., None]).add_(constant_part[..., None]).mul_(p)
        grads.add(block, ds, queries, scored)
    return grads.named(k)
