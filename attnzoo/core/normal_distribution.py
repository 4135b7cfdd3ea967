"""log Φ, the logarithm of the distribution function of the standard normal distribution.

`torch.special.log_ndtr` is accurate for every x, but on a CPU torch does not vectorize it. These
functions compute log Φ from one erfc, which torch vectorizes. They take less than half the time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOG_ROOT = 0.5 * math.log(2 * math.pi)  # the normal density is exp(−x²/2 − LOG_ROOT)
SMALLEST = -10.0  # smallest x for which the functions are accurate: erfc has no subnormal result


def log_cdf(x: Tensor) -> Tensor:
    """log Φ(x) for x ≥ `SMALLEST`, elementwise. Derivatives of any order are supported."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return torch.special.log_ndtr(x)  # _LogCdf has no forward-mode derivative
    return _LogCdf.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def log_cdf_and_tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """log Φ(x) and Φ(−|x|) for x ≥ `SMALLEST`, elementwise. Autograd cannot differentiate them."""
    tail = torch.special.erfc(x.abs().mul_(math.sqrt(0.5))).mul_(0.5)
    # lerp is faster than where. It selects exactly if both values are finite, hence the minimum.
    below = tail.clamp(min=torch.finfo(x.dtype).tiny).log_()
    return below.lerp((-tail).log1p_(), (x > 0).to(x.dtype)), tail


class _LogCdf(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return log_cdf_and_tail(x)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, log_cdf = ctx.saved_tensors
        # φ(x)/Φ(x), without a division of two small numbers
        return grad * (-0.5 * x.square() - log_cdf - LOG_ROOT).exp()
