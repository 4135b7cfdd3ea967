"""Numerical ranks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def rank(matrix: Tensor) -> int:
    """The number of singular values above σ_max · max(rows, columns) · ε of the dtype."""
    values = torch.linalg.svdvals(matrix)
    least = values[0] * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return int((values > least).sum())


def log_rank(matrix: Tensor) -> int | None:
    """The rank of log A; None if an entry is not > 0."""
    return rank(matrix.log()) if bool((matrix > 0).all()) else None
