"""Laser: attention to exponentials of the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.core.call import widened
from attnzoo.core.checks import is_number, plain, shown
from attnzoo.core.registry import get_variant
from attnzoo.functional.prepare import autocast_dtype
from attnzoo.nn.wrappers.base import Wrapper

# A backend sums N·exp(c) in fp32 before it divides: exp(88) is the limit of fp32. In fp16, exp(−c)
# must be a normal number, and dropout with p < 0.85 must not make exp(c) infinite.
LARGEST, LARGEST_FP16 = 60.0, 9.0


class Laser(Wrapper):
    """Attention to exponentials of the values: o = log Σ_j w_j·exp(v̂_j).

    The values are clamped softly, v̂ = c·tanh(v / c). The gradient of o with respect to a logit
    does not vanish when the weights saturate, if a value of little weight is large.

    Args:
        variant, num_heads, embed_dim, qk_dim, v_dim, key_dim, layer, device, dtype, **options: as
            for `Wrapper`.
        clamp: c, above 0 and at most 60. In fp16, at most 9.

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
        output of a query without weights is 0. Variants with negative weights raise an error. In
        fp16 a small sum would underflow, so that variants whose weights need not sum to 1 raise an
        error.

        exp(v̂) and the sum are rounded to the dtype of q. Each is an absolute error of o: at most
        0.004 in bf16 and 0.0005 in fp16. The backward divides the gradient of o by exp(o), between
        exp(−c) and exp(c). In fp16 it can therefore overflow, or become 0: prefer bf16 to train, or
        a clamp such as 4. A cache holds exp(v̂).
    """

    def __init__(
        self, variant: str, num_heads: int, embed_dim: int, *, clamp: float = 15.0, **options: Any
    ) -> None:
        clamp = plain(clamp)
        wrong = f"clamp must be a number > 0 and at most {LARGEST:g}, got {shown(clamp)}"
        if not is_number(clamp):
            raise TypeError(wrong)
        if not 0 < clamp <= LARGEST:
            raise ValueError(wrong)
        self.clamp = float(clamp)
        super().__init__(variant, num_heads, embed_dim, **options)
        if get_variant(self.variant).signed:
            raise ValueError(
                "variant must have weights >= 0 for Laser, which takes the logarithm of their sum, "
                f"got {self.variant!r}"
            )

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        if autocast_dtype(v) == torch.float16:
            if self.clamp > LARGEST_FP16:
                raise ValueError(
                    f"clamp must be at most {LARGEST_FP16:g} in fp16, got {self.clamp}"
                )
            if not get_variant(self.variant).normalized:
                raise TypeError(
                    f"v must be bf16, fp32 or fp64 for Laser with {self.variant}, whose weights "
                    "need not sum to 1, got torch.float16"
                )
        clamped = self.clamp * torch.tanh(widened(v) / self.clamp)
        return q, k, clamped.exp().to(v.dtype), options

    def _output(self, out: Tensor, gate: Tensor | None, v: Tensor) -> Tensor:
        out = widened(out)
        return torch.where(out == 0, 1, out).log()

    def extra_repr(self) -> str:
        """The number of heads and the clamp, for repr()."""
        return f"num_heads={self.num_heads}, clamp={self.clamp:g}"
