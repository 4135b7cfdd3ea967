"""Fits a variant's law to the largest weights of a head at several n.

Ideal scores are fixed scores times one free factor, κ or Δ (see `Gap`). The law is the variant's
largest weight on ideal scores. The fit minimizes the squared error of log weight on a logarithmic
grid of the factor, then on finer grids around the best point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commandline.variants import VariantCall
from evals.measures.heads import weights_at
from evals.theory.laws import fixed_scores, shrinking_scores

STEP = 0.1  # step of the first grid in log10 of κ or Δ
GRID = torch.logspace(-2, 4, round(6 / STEP) + 1, dtype=torch.float64)  # values of κ or Δ
ZOOMS = ((0.2, 9), (0.05, 5), (0.005, 3))  # finer grids: half width in log10, number of points
DRAWS = 16  # number of sets of uniform draws
SPACINGS = 16  # only the spacings between the largest 16 draws are random
_MOST_SCORES = 2**21  # maximum number of scores in one call of attention
_TIE = 1e-10  # mean squared errors closer than this count as equal


@lru_cache(maxsize=12)
def uniform_draws(n: int) -> Tensor:
    """Sixteen fixed sets of n uniform draws, (16, n), each in descending order.

    u_j = 1 − Γ_j/Γ_{n+1}, where Γ_j is a sum of j exponential draws. The first 16 exponential draws
    come from a scrambled Sobol sequence, because they decide the largest weight. The others are set
    to their mean, 1.
    """
    count = min(SPACINGS, n + 1)
    points = torch.quasirandom.SobolEngine(count, scramble=True, seed=0).draw(
        DRAWS, dtype=torch.float64
    )
    spacings = torch.ones(DRAWS, n + 1, dtype=torch.float64)
    spacings[:, :count] = -torch.log1p(-points.clamp(max=1 - 1e-12))
    sums = spacings.cumsum(1)
    return 1 - sums[:, :n] / sums[:, n:]


@dataclass(frozen=True)
class Gap:
    """A kind of ideal scores. The fit multiplies them by a free factor, κ or Δ.

    Attributes:
        scores: a function of n that returns R sets of scores, (R, n).
        coarse: a function of n that returns one set, (1, n). The first grid uses it to save time.
    """

    name: str
    symbol: str
    scores: Callable[[int], Tensor]
    coarse: Callable[[int], Tensor]


SHRINKING = Gap("shrinking", "κ", uniform_draws, lambda n: shrinking_scores(n, 1.0)[None])
FIXED = Gap(
    "fixed", "Δ", lambda n: fixed_scores(n, 1.0)[None], lambda n: fixed_scores(n, 1.0)[None]
)
GAPS = (SHRINKING, FIXED)


def log_law(
    unit: Tensor, call: VariantCall, sizes: Tensor, learned: Mapping[str, Tensor]
) -> Tensor:
    """The log of the variant's largest weight on ``unit`` times each factor in ``sizes``.

    The largest weight is averaged over the R sets of scores before the log is taken.

    Args:
        unit: (R, n), R sets of scores without the factor.
        call: the variant.
        sizes: (G, C), a grid of factors for each of C heads.
        learned: learned parameters (C,) by name.

    Returns:
        Log weights (G, C).
    """
    (draws, n), heads = unit.shape, sizes.shape[1]
    params = {**call.params, **learned}
    parts = []
    for part in sizes.split(max(1, _MOST_SCORES // (unit.numel() * heads))):
        scores = part[:, None, :, None] * unit[:, None]
        weights = weights_at(scores.view(-1, heads, n), call.name, params).amax(-1)
        parts.append(weights.view(-1, draws, heads).mean(1))
    weights = torch.cat(parts).nan_to_num(0.0)
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()


@dataclass(frozen=True)
class Fit:
    """One gap fitted to heads of any shape (…), such as (seeds, heads).

    Attributes:
        gap: the kind of scores.
        sizes: (…), the fitted κ or Δ; NaN if fewer than two lengths have a weight above 0.
        errors: (…), the RMS error of log weight; NaN in the same cases.
        below: (…), whether the smallest κ or Δ of the grid fits equally well. Then the fitted one
            is an upper bound.
        above: (…), whether the largest one fits equally well. Then the fitted one is a lower
            bound.
    """

    gap: Gap
    sizes: Tensor
    errors: Tensor
    below: Tensor
    above: Tensor


def fit(
    gap: Gap,
    call: VariantCall,
    keys: Sequence[int],
    peaks: Tensor,
    learned: Mapping[str, Tensor] | None = None,
) -> Fit:
    """Fit a variant's law to the largest weights (L, …) of heads, measured at L numbers of keys.

    ``learned`` has the parameters that differ between heads, (…), by name. Weights that are NaN or
    not above 0 are left out.

    Raises:
        ValueError, TypeError: the variant does not support the ideal scores.
    """
    shape, peaks = peaks.shape[1:], peaks.flatten(1)
    by_head = {name: values.flatten() for name, values in (learned or {}).items()}
    usable = peaks > 0
    target = peaks.where(usable, 1.0).double().log()
    counts = usable.sum(0)

    def errors(sizes: Tensor, scores: Callable[[int], Tensor]) -> Tensor:
        """Mean squared error of log weight (G, C)."""
        total = torch.zeros(len(sizes), peaks.shape[1], dtype=torch.float64)
        for n, log_peaks, is_usable in zip(keys, target, usable, strict=True):
            total += (log_law(scores(n), call, sizes, by_head) - log_peaks).square() * is_usable
        return total / counts.clamp(min=1)

    # Without learned parameters all heads share the first grid.
    grid_errors = errors(GRID[:, None].expand(-1, peaks.shape[1] if by_head else 1), gap.coarse)
    smallest, index = grid_errors.min(0)
    best = GRID[index]
    for half_width, points in ZOOMS:
        around = torch.linspace(-half_width, half_width, points, dtype=torch.float64)[:, None]
        best = best * 10 ** _lowest(errors(best * 10**around, gap.scores), half_width)
    error = errors(best[None], gap.scores)[0].sqrt()
    enough = counts >= 2
    below, above = (grid_errors[end] <= smallest + _TIE for end in (0, -1))
    numbers = best.where(enough, math.nan), error.where(enough, math.nan)
    return Fit(gap, *(x.view(shape) for x in (*numbers, below & enough, above & enough)))


def _lowest(values: Tensor, half_width: float) -> Tensor:
    """The positions x (C,) of the minima of C functions, given by their values (G, C) at G points.

    The points go from −half_width to half_width. x is the lowest point of a parabola through the
    smallest value and its neighbours.
    """
    count = len(values)
    step = 2 * half_width / (count - 1)
    at = values.argmin(0, keepdim=True)
    left, middle, right = (
        values.gather(0, (at + side).clamp(0, count - 1))[0] for side in (-1, 0, 1)
    )
    bend = left - 2 * middle + right
    inner = (at[0] > 0) & (at[0] < count - 1) & (bend > 0)
    shift = ((left - right) / (2 * bend)).where(inner, 0.0)
    return at[0] * step - half_width + shift * step
