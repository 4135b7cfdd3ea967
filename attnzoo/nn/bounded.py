"""Bounded: a learned value that stays inside an interval."""

from __future__ import annotations

from torch import Tensor, nn

from attnzoo.core.call import widened


class Bounded(nn.Module):
    """A learned fp32 tensor between low and high, at least (high − low)/1000 away from both.

    The optimizer updates ``original``; the value is a sigmoid of it, scaled to the interval.
    """

    def __init__(self, name: str, low: float, high: float, start: Tensor) -> None:
        super().__init__()
        self.name = name
        margin = (high - low) * 1e-3
        self.low, self.width = low + margin, high - low - 2 * margin
        self.original = nn.Parameter(self.inverse(start))

    def forward(self) -> Tensor:
        return self.low + self.width * widened(self.original).sigmoid()

    def inverse(self, value: Tensor) -> Tensor:
        """The ``original`` that gives this value."""
        high = self.low + self.width
        if not value.is_meta and not bool(((value > self.low) & (value < high)).all()):
            raise ValueError(
                f"{self.name} must start inside ({self.low:g}, {high:g}) to be learned, got "
                f"{value.tolist()}"
            )
        return ((value - self.low) / self.width).logit()
