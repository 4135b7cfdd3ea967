"""Laser: attention to exponentials of the values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.checks import is_number, plain, shown
from attnzoo.nn.wrappers.base import Wrapper


class Laser(Wrapper):
    """Attention to exponentials of the values: o = log Σ_j w_j·exp(v̂_j).

    The values are clamped softly, v̂ = c·tanh(v / c). The gradient of o with respect to a logit
    does not vanish when the weights saturate, if a value of little weight is large.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`.
        clamp: c > 0. exp(c) must be a finite number of the dtype, so c is at most 11 in fp16 and
            at most 88 in other dtypes.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch
        >>> from attnzoo.nn import Laser
        >>> attend = Laser("softmax", num_heads=4, embed_dim=32)
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([2, 4, 16, 8])

    References:
        Duvvuri and Dhillon 2024, arXiv:2411.03493, Equations 5 and 6.

    Notes:
        The authors subtract the largest value over all keys before exp, which changes nothing in
        exact arithmetic. The clamp replaces that here, because the largest value of the future is
        not known in decoding.

        Meant for weights that sum to 1. If they sum to less, as with a sink, o gets smaller. The
        output of a query without weights is 0.

        exp(v̂) is rounded to the dtype of q, which is an absolute error of o: at most 0.002 in
        bf16. A cache holds exp(v̂).
    """

    def __init__(
        self, variant: str, num_heads: int, embed_dim: int, *, clamp: float = 15.0, **options: Any
    ) -> None:
        clamp = plain(clamp)
        if not is_number(clamp):
            raise TypeError(f"clamp must be a number > 0, got {shown(clamp)}")
        if not 0 < clamp <= 88:
            raise ValueError(f"clamp must be > 0 and at most 88, got {clamp}")
        self.clamp = float(clamp)
        super().__init__(variant, num_heads, embed_dim, **options)

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        used = torch.get_autocast_dtype(v.device.type) if _autocast(v) else v.dtype
        if self.clamp > math.log(torch.finfo(used).max):
            raise ValueError(f"clamp must be at most 11 for {used}, got {self.clamp}")
        clamped = self.clamp * torch.tanh(_wide(v) / self.clamp)
        return q, k, clamped.exp().to(v.dtype), options

    def _output(self, out: Tensor, gate: Tensor | None) -> Tensor:
        out = _wide(out)
        return torch.where(out == 0, 1, out).log()

    def extra_repr(self) -> str:
        """The number of heads and the clamp, for repr()."""
        return f"num_heads={self.num_heads}, clamp={self.clamp:g}"


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
