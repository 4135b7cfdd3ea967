"""Results over some of the keys of a call, and how to merge them.

The keys of a call may be on several devices. Each part of the keys gives a `Partial`, and partials
of different keys merge in any order. A threshold is solved step by step: each step needs sums over
all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Rule
from attnzoo.backends.tiled.blocks import Block, blocks, flat_keys, keep_mask
from attnzoo.backends.tiled.scores import hide
from attnzoo.backends.tiled.walk import NEG_INF, PairwiseCall, Partial
from attnzoo.core.visibility import cut


def among(formed: PairwiseCall, keys: slice) -> PairwiseCall:
    """The call with only some of its keys. It cannot count the visible keys of whole rows."""
    call, terms = formed.call, formed.terms
    mask, segments, bias = call.mask, call.segments, terms.key_bias
    call = replace(
        call,
        keys=keys.stop - keys.start,
        key_origin=call.key_origin + keys.start,
        mask=None if mask is None else mask[..., keys],
        segments=None if segments is None else (segments[0], segments[1][:, keys]),
    )
    if bias is not None:
        terms = terms._replace(key_bias=cut(bias, slice(None), slice(None), keys))
    return formed._replace(call=call, terms=terms)


def nothing(formed: PairwiseCall) -> Partial:
    """The `Partial` of no keys."""
    call, rule = formed.call, formed.rule
    rows = (call.batch, call.heads, call.queries)
    out = torch.zeros(*rows, call.value_dim, dtype=call.dtype, device=call.device)
    tau = out.new_full(rows, NEG_INF) if rule.online else out.new_zeros(rows)
    return Partial(out, out.new_zeros(rows), tau)


def merge(rule: Rule, a: Partial, b: Partial) -> Partial:
    """The sums over the keys of two partials, which are overwritten."""
    if not rule.online and not rule.activation.shifted:
        return Partial(a.out.add_(b.out), a.z.add_(b.z), a.tau)
    tau = torch.maximum(a.tau, b.tau)
    anchor = tau.masked_fill(tau == NEG_INF, 0.0)
    first, second = ((x.tau - anchor).exp() for x in (a, b))
    out = a.out.mul_(first[..., None]).add_(b.out.mul_(second[..., None]))
    return Partial(out, a.z * first + b.z * second, tau)


def peaks(formed: PairwiseCall, q: Tensor, k: Tensor) -> Tensor:
    """The maximum of the scores of each query, −inf without keys: (B, H, Nq)."""
    largest = nothing(formed).z.fill_(NEG_INF)
    for block, s in _scores(formed, q, k):
        largest[block.part] = s.amax(-1)
    return largest


def threshold_sums(
    formed: PairwiseCall, q: Tensor, k: Tensor, peak: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ φ(s − peak − τ) and Σ φ'(s − peak − τ), both (B, H, Nq)."""
    z, slopes = torch.zeros_like(tau), torch.zeros_like(tau)
    for block, s in _scores(formed, q, k):
        phi, slope = _weigh(formed, block, s, peak, tau)
        z[block.part], slopes[block.part] = phi.sum(-1), slope.sum(-1)
    return z, slopes


class ThresholdPartial(NamedTuple):
    """Sums over some of the keys for a solved threshold: Σ φ v, Σ φ, Σ φ' v and Σ φ'."""

    out: Tensor
    z: Tensor
    slope_out: Tensor
    slope: Tensor


def threshold_partial(
    formed: PairwiseCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peak: Tensor,
    tau: Tensor,
    needs_grad: bool,
) -> ThresholdPartial:
    """The sums over the keys of the call. Those of φ' are 0 unless a gradient is needed."""
    call, seed, values = formed.call, formed.seed, flat_keys(v, formed.call)
    out, z, _ = nothing(formed)
    slope_out = torch.zeros_like(out) if needs_grad else out.new_zeros(())
    sums = ThresholdPartial(out, z, slope_out, torch.zeros_like(z))
    for block, s in _scores(formed, q, k):
        phi, slope = _weigh(formed, block, s, peak, tau)
        sums.z[block.part] = phi.sum(-1)
        pairs = [(sums.out, phi)]
        if needs_grad:
            sums.slope[block.part] = slope.sum(-1)
            pairs.append((sums.slope_out, slope))
        keep = None if seed is None else keep_mask(block, call, seed)
        block_values = values[block.kv, block.keys]
        for into, weights in pairs:
            flat = block.flat(weights if keep is None else weights * keep)
            into[block.part] = torch.bmm(flat, block_values).view(*block.shape, v.shape[-1])
    return sums


def _scores(formed: PairwiseCall, q: Tensor, k: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Blocks and their scores [b, h, rows, keys], −inf at hidden keys."""
    scores = formed.scores(k)
    for block in blocks(formed.call):
        scored = scores.of(block, scores.queries(block, q))
        hide(scored.s, scored.hidden, NEG_INF)
        yield block, scored.s


def _weigh(
    formed: PairwiseCall, block: Block, s: Tensor, peak: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """φ and φ' at s − peak − τ; s is overwritten."""
    shape, activation = formed.vectors.shape, formed.rule.activation
    wide = None if shape is None else block.of(shape)[..., None]
    s.sub_(block.of(peak)[..., None]).sub_(block.of(tau)[..., None])
    # φ and φ' of a threshold vanish at −∞, so hidden keys need no mask.
    activation.check_slopes()
    phi = activation.value(s, wide)
    return phi, activation.slope(s, phi, wide)
