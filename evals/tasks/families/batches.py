"""Batches of drawn sequences, and checks of what the function ``draw`` of a task returns."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor


class Batch:
    """Tensors of B sequences, the fields of a dataclass."""

    def to(self, device: str) -> Self:
        """The same batch on another device."""
        return type(self)(*(values.to(device) for values in vars(self).values()))


def check_type(batch: object, kind: type[Batch]) -> None:
    """Raise ValueError if ``draw`` did not return a batch of this type."""
    if not isinstance(batch, kind):
        raise ValueError(f"draw must return a {kind.__name__}, got {type(batch).__name__}")


def check_tensor(
    name: str, values: object, shape: tuple[int, ...], dtype: torch.dtype, axes: str = ""
) -> None:
    """Raise ValueError if ``values`` are not a finite tensor of this shape and dtype. ``axes``
    explains the shape in the message, such as "(stop - start, size(4)) = "."""
    actual = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if not isinstance(values, Tensor) or actual != shape:
        raise ValueError(f"{name} must be a tensor {axes}{shape}, got {actual}")
    if values.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {values.dtype}")
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite")


def check_range(name: str, values: Tensor, least: int, most: int, text: str = "") -> None:
    """Raise ValueError if ints are not from ``least`` to ``most``. ``text`` explains ``most``."""
    low, high = int(values.min()), int(values.max())
    if low < least or high > most:
        raise ValueError(f"{name} must be from {least} to {text}{most}, got {low} to {high}")
