"""The k largest weights of some rows of scores, from the variant's pairwise form if possible.

With φ = exp (if neither `mass` nor a gain from statistics is given), with a threshold, and with an
increasing φ without a normalizer, the k largest weights belong to the k largest scores. Besides
these, only a sum over the row or a threshold is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import e, log2

import torch
from torch import Tensor

from attnzoo.backends.tiled.threshold import solve_threshold
from attnzoo.core.checks import has_values
from attnzoo.core.device import is_cpu
from attnzoo.core.forms import FromStatistics, Pairwise
from attnzoo.functional.largest import Blocks, largest
from attnzoo.functional.score_rows import BoundVariant, RowCall, row_call

# Number of scores for which a definition is computed at once, on a CPU and on a GPU.
EXACT, EXACT_ON_GPU = 2**17, 2**24
SUMMED = 2**20  # number of scores whose exponentials are held at once on a CPU
# The number of blocks is multiplied by this while an entry outside of the blocks has a weight > 0.
WIDER = 4
# To solve for a threshold, the scores that can have a weight > 0 are copied if they are at most
# this share of the row.
FEW = 0.25

Column = Tensor | float  # a number, (R, 1) or (1, 1)


def top_weights(
    bound: BoundVariant, x: Tensor, mask: Tensor | None, k: int, dtype: torch.dtype, inplace: bool
) -> tuple[Tensor, Tensor]:
    """Values and indices of the k largest weights of each row.

    Args:
        x: Scores (R, n) in fp32 or fp64.
        mask: Bool (R, n) or (1, n), or None.
        dtype: The dtype of the scores that the user gave.
        inplace: Whether x may be overwritten.
    """
    call = row_call(x, mask, dtype)
    form = bound.pairwise(call)
    if form is None or not _in_order_of_scores(form):
        return _from_definition(bound, x, mask, k, dtype)
    gain = _column(form.gain)
    operands = (x, mask, form.gain, form.shape, form.offset, form.sink)
    if not all(has_values(operand) for operand in operands if isinstance(operand, Tensor)):
        return _without_values(bound, call, x, mask, gain, k)
    if not bool((gain > 0).all() if isinstance(gain, Tensor) else gain > 0):
        # The order changes with the sign, and 0 · −∞ would be NaN.
        x, inplace, gain = x.mul_(gain) if inplace else x * gain, True, 1.0
    if mask is not None:
        fill = x.masked_fill_ if inplace else x.masked_fill
        x = fill(~mask, float("-inf"))
    rows = Blocks(x)
    size = x.shape[-1]
    # The sum is computed before `largest`, because it also finds the block maxima that `largest`
    # needs.
    total = _exp_sum(form, rows, gain) if form.normalize == "sum" else None
    top, indices = largest(rows, k if form.keep is None else max(k, min(form.keep, size)))
    empty = None if mask is None else ~mask.any(-1, keepdim=True)
    if form.normalize == "none":
        at = top * gain - _column(form.offset)
        values = form.activation.value(at, _shape(form, x))
    elif form.normalize == "threshold":
        values = _threshold(form, rows, top, gain, empty)
    elif total is not None:
        values = ((top - top[:, :1]) * gain).exp() / total
        if form.sink is not None:  # if all scores of a row are −∞, the sink has all the weight
            values = values.masked_fill(top[:, :1] == float("-inf"), 0.0)
    else:
        values = _selected(form, top, gain)
    if empty is not None:
        values = values.masked_fill(empty, 0.0)
    return values[:, :k], indices[:, :k]


def parts(count: int, step: int) -> Iterator[slice]:
    """The rows of each step. A graph has one step, because the number of rows may be symbolic."""
    if torch.compiler.is_compiling():
        return iter((slice(0, count),))
    return (slice(at, min(at + step, count)) for at in range(0, count, max(step, 1)))


def _in_order_of_scores(form: Pairwise) -> bool:
    """Whether the functions below can compute the largest weights of this form."""
    phi = form.activation
    if isinstance(form.gain, FromStatistics) or form.mass is not None:
        return False
    if form.normalize == "none":
        return phi.vanishes and (phi.increasing or phi.exponential or phi.solvable)
    return form.normalize == "threshold" or phi.exponential


def _without_values(
    bound: BoundVariant, call: RowCall, x: Tensor, mask: Tensor | None, gain: Column, k: int
) -> tuple[Tensor, Tensor]:
    """The weights of the largest scores, from all weights.

    Fewer weights would suffice, but how many depends on values, which cannot be read in a graph, in
    a transform or on meta.
    """
    weights = bound.weights(call)
    if isinstance(gain, Tensor) or gain <= 0:  # the order changes with the sign
        x = x * gain
    if mask is not None:
        x = x.masked_fill(~mask, float("-inf"))
    indices = largest(Blocks(x), k)[1]
    return weights.gather(-1, indices), indices


def _from_definition(
    bound: BoundVariant, x: Tensor, mask: Tensor | None, k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    most = EXACT if is_cpu(x.device) else EXACT_ON_GPU
    tops = []
    for part in parts(x.shape[0], max(1, most // x.shape[-1])):
        seen = mask if mask is None or mask.shape[0] == 1 else mask[part]
        weights = bound.part(part).weights(row_call(x[part], seen, dtype))
        tops.append(largest(Blocks(weights), k))
    values, indices = zip(*tops)
    return torch.cat(values), torch.cat(indices)


def _selected(form: Pairwise, top: Tensor, gain: Column) -> Tensor:
    """The weights of "select" with φ = exp."""
    weights = ((top - top[:, :1]) * gain).exp()
    weights[:, form.keep :] = 0.0
    return weights / weights.sum(-1, keepdim=True)


def _exp_sum(form: Pairwise, rows: Blocks, gain: Column) -> Tensor:
    """Σ_j exp(gain (s_j − max s)) of each row, with the sink, (R, 1)."""
    # exp2 takes half the time of exp on CPUs. Rounding the product e = (s − max)·log2(e) changes a
    # term by about |e| units in the last place, but the term is only 2^e.
    x, factor = rows.x, gain * log2(e)
    step = max(1, len(x) // 4)
    if is_cpu(x.device):
        step = max(1, min(SUMMED // x.shape[-1], step))
    buffer, totals, peaks = x.new_empty(min(step, len(x)), x.shape[-1]), [], []
    for start in range(0, len(x), step):
        part = slice(start, min(start + step, len(x)))
        peaks.append(rows.peaks(part))
        at = torch.sub(x[part], peaks[-1], out=buffer[: part.stop - start])
        at.mul_(factor[part] if isinstance(factor, Tensor) and len(factor) > 1 else factor)
        totals.append(at.exp2_().sum(-1, keepdim=True))
    total = torch.cat(totals)
    if form.sink is None:
        return total
    return total + torch.as_tensor(_column(form.sink) - torch.cat(peaks) * gain).exp()


def _threshold(
    form: Pairwise, rows: Blocks, top: Tensor, gain: Column, empty: Tensor | None
) -> Tensor:
    """The weights φ(s − τ). τ is solved on the entries of a few blocks.

    More entries can only raise τ. If the largest entry outside of these blocks has weight 0, all
    entries outside have weight 0, and τ is the threshold of the whole row.
    """
    phi, shape = form.activation, _shape(form, rows.x)
    flat = None if shape is None else shape.expand(top.shape[0], 1)[:, 0]
    peak = top[:, :1]
    if empty is not None:
        peak = peak.masked_fill(empty, 0.0)  # −∞ − −∞ would be NaN
    blocks, tau = min(top.shape[-1] + 1, rows.x.shape[-1]), 0.0
    while True:
        entries = rows.candidates(blocks)
        next_largest = entries.excluded
        all_taken = next_largest is None
        values = _above(form, rows.x, peak, gain, tau) if all_taken else entries.values
        tau = solve_threshold((values - peak) * gain, flat, phi)[:, None]
        if all_taken or not bool((phi.value((next_largest - peak) * gain - tau, shape) > 0).any()):
            break
        blocks *= WIDER
    return phi.value((top - peak) * gain - tau, shape)


def _above(form: Pairwise, x: Tensor, peak: Tensor, gain: Column, tau: Column) -> Tensor:
    """Scores of each row, (R, m), unordered.

    They include every score that has a nonzero weight at threshold τ or a larger one.
    """
    alpha = form.activation.alpha
    if alpha is None:
        return x
    # φ(s − τ) is 0 for s <= τ − 1/(α − 1). The factor allows for rounding.
    reach = 1 / ((_column(form.shape) if alpha == "shape" else alpha) - 1)
    count = int((x >= peak + (tau - 1.001 * reach) / gain).sum(-1).max())
    if count > FEW * x.shape[-1]:
        return x
    return x.topk(max(count, 1), dim=-1, sorted=False).values


def _column(vector: Tensor | float | FromStatistics | None) -> Column:
    """A per-query vector (1, R, 1) or (1, 1, 1) as (R, 1) or (1, 1)."""
    assert isinstance(vector, (Tensor, float, int))
    return vector[0] if isinstance(vector, Tensor) else float(vector)


def _shape(form: Pairwise, x: Tensor) -> Tensor | None:
    if form.shape is None:
        return None
    return torch.as_tensor(_column(form.shape), dtype=x.dtype, device=x.device).view(-1, 1)
