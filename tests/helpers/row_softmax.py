"""Rows for tests of softmax algorithms, the fp64 definition, and its error bounds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helpers.approx import Approx

EPS = torch.finfo(torch.float32).eps
# Per entry of a lane: roundings of the exponential, the product and the sum.
PER_ENTRY = 4


def exact(x: Tensor) -> Tensor:
    """Softmax of the rows in fp64. A row of −∞ has weights 0."""
    x = x.double()
    return torch.where((x == -torch.inf).all(1, keepdim=True), 0.0, torch.softmax(x, 1))


def budget(x: Tensor, lanes: int) -> Approx:
    """The weights of rows without NaN, +∞ and rows of −∞, with error bounds of an fp32 algorithm.

    The logarithm of a weight is the entry minus the maximum, computed in one step or in several
    that add up to it, and converted to base 2: three roundings of the difference. Each lane adds
    columns / lanes entries, and may multiply the sum by a new factor for each of them. Weights
    below the normal fp32 numbers may be 0.
    """
    values = x.double()
    shifted = values - values.amax(1, keepdim=True)
    seen = values != -torch.inf
    shifted = torch.where(seen, shifted, 0.0)
    d = Approx(shifted, torch.zeros_like(shifted), EPS).rounded(3, shifted)
    steps = -(-x.shape[1] // lanes)
    e = d.map(torch.exp, PER_ENTRY * (steps + 1), shifted.exp()).where(seen)
    weights = (e / e.sum(1, keepdim=True)).stored(x.dtype)
    return replace(weights, error=weights.error + 2 * torch.finfo(torch.float32).smallest_normal)


def assert_softmax(actual: Tensor, x: Tensor, lanes: int) -> None:
    """Checks the weights of rows without NaN, +∞ and rows of −∞."""
    allowed = budget(x, lanes)
    torch.testing.assert_close(allowed.value, exact(x), rtol=1e-9, atol=1e-300)
    excess = (actual.double() - allowed.value).abs() / allowed.error
    assert actual.dtype == x.dtype
    assert float(excess.max()) <= 1, f"{float(excess.max()):.2f} times the error budget"


def special_rows(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows that overflow, or divide 0 by 0, in a careless implementation."""
    x = 5 * torch.randn(columns)
    hidden = x.clone()
    hidden[::2] = -torch.inf
    mixed = x.clone()
    mixed[0], mixed[1] = 1e4, -1e4
    rows = {
        "large": x + 1e4, "small": x - 1e4, "both": mixed, "hidden": hidden,
        "lowest": torch.full((columns,), torch.finfo(dtype).min),
    }  # fmt: skip
    return {name: row.to(dtype) for name, row in rows.items()}
