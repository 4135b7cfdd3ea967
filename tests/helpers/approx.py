"""Tensors whose operations propagate error bounds (running forward error analysis).

The rules are the classical ones (Higham, Accuracy and Stability of Numerical Algorithms, chapters
3 and 4), to first order. They hold for any order of summation. Each operation adds this error to
the propagated errors of its operands:

    one operation     eps · |result|
    a sum of n terms  n · eps/2 · Σ |terms|
    a function f      max |f(x ± error) − f(x)|, and eps · (size of the terms) per operation in f
    storing           one unit in the last place of the storage dtype
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Approx:
    """fp64 values with bounds on the errors of an implementation with machine epsilon ``eps``."""

    value: Tensor
    error: Tensor
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def mT(self) -> Approx:
        return replace(self, value=self.value.mT, error=self.error.mT)

    def __getitem__(self, index: Any) -> Approx:
        return replace(self, value=self.value[index], error=self.error[index])

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Approx:
        return replace(
            self, value=self.value.unflatten(dim, sizes), error=self.error.unflatten(dim, sizes)
        )

    def __neg__(self) -> Approx:
        return replace(self, value=-self.value)

    def __abs__(self) -> Approx:
        return replace(self, value=self.value.abs())

    def __add__(self, other: Approx) -> Approx:
        value = self.value + other.value
        return Approx(value, self.error + other.error, self.eps).rounded(1, value)

    def __sub__(self, other: Approx) -> Approx:
        return self + -other

    def __mul__(self, other: Approx) -> Approx:
        value = self.value * other.value
        error = self.value.abs() * other.error + self.error * (other.value.abs() + other.error)
        return Approx(value, error, self.eps).rounded(1, value)

    def __truediv__(self, other: Approx) -> Approx:
        value = self.value / other.value
        # If the denominator may be 0, the bound is huge but finite, because 0 · ∞ would be NaN.
        least = (other.value.abs() - other.error).clamp(min=1e-60)
        error = (self.error + value.abs() * other.error) / least
        return Approx(value, error, self.eps).rounded(1, value)

    def __matmul__(self, other: Approx) -> Approx:
        a, b = self.value.abs(), other.value.abs()
        error = a @ other.error + self.error @ (b + other.error)
        product = Approx(self.value @ other.value, error, self.eps)
        return product.rounded(self.shape[-1] / 2, a @ b)

    def sum(self, *dims: int, keepdim: bool = False) -> Approx:
        """The sum over ``dims``. The error bound assumes that dimensions are summed one by one."""
        value, error, size = (
            x.sum(dims, keepdim=keepdim) for x in (self.value, self.error, self.value.abs())
        )
        count = sum(self.shape[dim] for dim in dims)
        return Approx(value, error, self.eps).rounded(count / 2, size)

    def rounded(self, times: float, size: Tensor) -> Approx:
        """A copy with a larger error bound.

        The bound also includes ``times`` rounding errors of numbers as large as ``size``.
        """
        return replace(self, error=self.error + times * self.eps * size.abs())

    def where(self, mask: Tensor) -> Approx:
        """A copy with value and error set to 0 where the mask is False."""
        return replace(
            self, value=torch.where(mask, self.value, 0.0), error=torch.where(mask, self.error, 0.0)
        )

    def stored(self, dtype: torch.dtype) -> Approx:
        info = torch.finfo(dtype)
        unit = info.eps * self.value.abs() + info.eps * info.smallest_normal
        return replace(self, error=self.error + unit)

    def map(self, f: Callable[[Tensor], Tensor], times: float, size: Tensor) -> Approx:
        """f(x), computed in ``times`` operations on numbers as large as ``size``.

        The bound requires that f is monotone or smooth on x ± error.
        """
        value = f(self.value)
        ends = (f(self.value + sign * self.error) for sign in (-1, 1))
        error = torch.stack([(end - value).abs() for end in ends]).amax(0)
        return Approx(value, error, self.eps).rounded(times, size)
