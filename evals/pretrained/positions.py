"""The loss at each position of a context, in nats per token.

Only tokens of the text count, not planted facts. Positions are collected in bins whose edges do not
depend on the length: 1, 32, 48, 64, 96, 128, 192, 256, … So the curves of two lengths can be
compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FIRST = 32


def edges(length: int) -> list[int]:
    """The first position of each bin, and the length as the end of the last bin.

    >>> edges(300)
    [1, 32, 48, 64, 96, 128, 192, 256, 300]
    """
    starts, step = [1], _FIRST
    while step < length:
        starts += [step, step + step // 2]
        step *= 2
    return [edge for edge in starts if edge < length] + [length]


def by_position(losses: Tensor, is_text: Tensor) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The means of a context, and its sums by bin.

    Args:
        losses: (N − 1,), the loss of predicting token 1, 2, … N − 1.
        is_text: (N,), whether a token is of the text.

    Returns:
        Metrics: ``loss``, and ``loss_end`` of the last quarter of the positions. Curves:
        ``loss_sum`` and ``loss_count`` of each bin, and ``loss_edges``, which are `edges`(N).
    """
    bounds, size = edges(len(is_text)), len(is_text)
    positions = torch.arange(1, size)[is_text[1:]]
    losses = losses.double()[is_text[1:]]
    bins = torch.bucketize(positions, torch.tensor(bounds[1:]), right=True)
    sums, counts = (
        torch.zeros(len(bounds) - 1, dtype=torch.float64).index_add_(0, bins, values)
        for values in (losses, torch.ones_like(losses))
    )
    end = losses[positions >= size - size // 4]
    metrics = {"loss": float(losses.mean()), "loss_end": float(end.mean())}
    curves = {"loss_edges": bounds, "loss_sum": sums, "loss_count": counts}
    return (
        {name: value for name, value in metrics.items() if math.isfinite(value)},
        {name: list(map(float, values)) for name, values in curves.items()},
    )
