"""Compares the k largest weights with all weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def agrees(got: Any, weights: Tensor, k: int, tolerance: float = 1e-10) -> None:
    """Raise unless ``got`` are k largest weights along the last dimension, in descending order."""
    values, indices = got
    assert values.shape == indices.shape == (*weights.shape[:-1], k)
    assert values.dtype == weights.dtype
    assert indices.dtype == torch.int64
    tight = dict(rtol=max(tolerance, 1e-10), atol=tolerance)
    torch.testing.assert_close(values, weights.topk(k, dim=-1).values, **tight)
    torch.testing.assert_close(weights.gather(-1, indices), values, **tight)
    ordered = indices.sort(dim=-1).values
    assert bool((ordered[..., 1:] != ordered[..., :-1]).all())
