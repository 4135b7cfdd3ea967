"""Calibration and uncertainty of classifiers: expected calibration error, and AUROC."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """The expected calibration error, with bins of equal width (Guo et al. 2017, 1706.04599).

    ECE = Σ_b (n_b / N) · |mean of ``right`` in bin b − mean of ``confidence`` in bin b|. Bin b
    holds the confidences in (b/bins, (b+1)/bins]; a confidence of 0 belongs to the first bin. Empty
    bins add nothing.

    Args:
        confidence: (N,), the probability of the predicted class, in [0, 1].
        right: (N,) bool, whether the prediction is right.
        bins: the number of bins.

    Returns:
        A number in [0, 1]; NaN if N = 0 or a confidence is NaN.

    Raises:
        ValueError: shapes differ, a confidence is outside [0, 1], or ``bins`` < 1.

    Example:
        >>> calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([True, False]), bins=10)
        0.25
    """
    _check_shapes("confidence", confidence, right)
    if bins < 1:
        raise ValueError(f"bins must be >= 1, got {bins}")
    if confidence.isnan().any() or len(confidence) == 0:
        return math.nan
    if confidence.min() < 0 or confidence.max() > 1:
        low, high = confidence.min().item(), confidence.max().item()
        raise ValueError(f"confidence must be in [0, 1], got {low:g} to {high:g}")
    confidence = confidence.double()
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    index = torch.bucketize(confidence, edges)  # entry b has edges[b-1] < confidence <= edges[b]
    gap = right.double() - confidence
    sums = gap.new_zeros(bins).index_add_(0, index, gap)
    return sums.abs().sum().item() / len(gap)


def auroc(uncertainty: Tensor, right: Tensor) -> float:
    """The area under the ROC curve of the uncertainty as a detector of wrong predictions.

    This is the probability that a wrong prediction has a larger uncertainty than a right one. Ties
    count one half (the Mann-Whitney statistic).

    Args:
        uncertainty: (N,), such as 1 − the largest probability.
        right: (N,) bool, whether the prediction is right.

    Returns:
        A number in [0, 1]. NaN if all predictions are right or all are wrong, where the area is
        undefined, or if an uncertainty is NaN.

    Raises:
        ValueError: shapes differ.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.2]), torch.tensor([True, True, False]))
        0.75
    """
    _check_shapes("uncertainty", uncertainty, right)
    if right.all() or not right.any() or uncertainty.isnan().any():
        return math.nan
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(~right.cpu().numpy(), uncertainty.cpu().numpy()))


def _check_shapes(name: str, values: Tensor, right: Tensor) -> None:
    if values.dim() != 1 or values.shape != right.shape:
        raise ValueError(
            f"{name} and right must have the same shape (N,), got {tuple(values.shape)} and "
            f"{tuple(right.shape)}"
        )
    if right.dtype != torch.bool:
        raise ValueError(f"right must be bool, got {right.dtype}")
