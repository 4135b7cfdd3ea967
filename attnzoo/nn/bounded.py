"""Bounded: a learned value that stays inside an interval."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo.core.call import widened
from attnzoo.nn.sharding import assign


class Bounded(nn.Module):
    """A learned tensor inside the open interval (low, high), of which one end may be infinite.

    The optimizer updates ``original``. With two ends the value is a sigmoid of it, scaled to the
    interval, and at least (high − low)/1000 away from both. With one end the value differs from it
    by softplus(``original``) and at least 1e-12, so that 1/x and its gradient are finite. Softplus,
    unlike exp, does not overflow, has a slope of at most 1, and is near the identity for large
    values, which keep their precision.
    """

    def __init__(self, name: str, low: float, high: float, start: Tensor) -> None:
        super().__init__()
        self.name, self.start = name, start
        self.limits = low, high
        self.original = nn.Parameter(self.inverse(start))

    def _ends(self) -> tuple[float, float]:
        """The lowest and the highest value, which fp32 distinguishes from the limits."""
        low, high = self.limits
        if math.isfinite(low) and math.isfinite(high):
            margin = (high - low) * 1e-3
            return low + margin, high - margin
        return low + _margin(low), high - _margin(high)

    def forward(self) -> Tensor:
        x = widened(self.original)
        low, high = self._ends()
        if math.isinf(high):
            return low + F.softplus(x)
        if math.isinf(low):
            return high - F.softplus(x)
        return low + (high - low) * x.sigmoid()

    def inverse(self, value: Tensor) -> Tensor:
        """The ``original`` that gives this value."""
        (low, high), value = self._ends(), widened(value)
        if not value.is_meta and not bool(((value > low) & (value < high)).all()):
            raise ValueError(
                f"{self.name} must start inside ({low:g}, {high:g}) to be learned, got "
                f"{value.tolist()}"
            )
        if math.isfinite(low) and math.isfinite(high):
            return ((value - low) / (high - low)).logit()
        # log(e^x − 1), for large and for small x
        x = value - low if math.isinf(high) else high - value
        return x + torch.log(-torch.expm1(-x))

    def reset_parameters(self) -> None:
        """Sets the value to the initial one."""
        assign(self.original, self.inverse(self.start))


def _margin(end: float) -> float:
    eps = torch.finfo(torch.float32).eps
    return max(1e-12, 2 * eps * abs(end)) if math.isfinite(end) else 0.0
