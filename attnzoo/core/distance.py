"""`Distance`, a gain and a bias of the scores by the distance between query and key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnzoo.core.function_keys import DISTANCES, Keyed


@dataclass(frozen=True)
class Distance(Keyed):
    """The functions a and m in s_ij = gain_i · a(t) · z_ij + m(t) + …, with t = |p_i − p_j|.

    p_i and p_j are the positions of query and key. Both functions have a second argument,
    ``decay``, one number per head. Their values must be finite. Backends evaluate them block by
    block. For torch.compile, create instances outside of the compiled call, for example at the top
    of a module.

    Attributes:
        name: Name for error messages and `explain`.
        gain: ``gain(t, decay) -> a``, elementwise; None is a = 1.
        bias: ``bias(t, decay) -> m``, elementwise; None is m = 0.
        gain_slope: ``gain_slope(t, decay) -> ∂a/∂decay``; required if a decay gets a gradient.
        bias_slope: ``bias_slope(t, decay) -> ∂m/∂decay``; likewise.
        triton: The Triton implementation as "module:name", imported when a kernel needs it: a
            ``@triton.jit`` function of (t, decay) that returns (a, m), with a = 1 without ``gain``
            and m = 0 without ``bias``. t is an fp32 tile, decay a number or one per row of the
            tile. None: the kernels do not support this distance.
        triton_slope: The Triton implementation of the slopes, a function of (t, decay) that returns
            (∂a/∂decay, ∂m/∂decay), named like ``triton``. None: the kernels compute no gradient for
            ``decay``.

    Example:
        >>> import attnzoo
        >>> recency = attnzoo.Distance("recency", bias=lambda t, decay: -decay * t.log1p(),
        ...                            bias_slope=lambda t, decay: -t.log1p())
        >>> recency.gain is None
        True
    """

    name: str
    gain: Callable[[Tensor, Tensor], Tensor] | None = None
    bias: Callable[[Tensor, Tensor], Tensor] | None = None
    gain_slope: Callable[[Tensor, Tensor], Tensor] | None = None
    bias_slope: Callable[[Tensor, Tensor], Tensor] | None = None
    triton: str | None = None
    triton_slope: str | None = None

    def __post_init__(self) -> None:
        self._check_fields(
            optional=("gain", "bias", "gain_slope", "bias_slope"),
            triton=("triton", "triton_slope"),
        )
        if self.gain is None and self.bias is None:
            raise ValueError(f"distance {self.name!r}: gain or bias must be given, got None")
        for field in ("gain", "bias"):
            if getattr(self, field) is None and getattr(self, f"{field}_slope") is not None:
                raise ValueError(
                    f"distance {self.name!r}: {field}_slope must be None without {field}"
                )
        if self.triton is None and self.triton_slope is not None:
            raise ValueError(f"distance {self.name!r}: triton_slope must be None without triton")
        self._register(DISTANCES)

    @cached_property
    def of_kernels(self) -> tuple[Any, ...]:
        """The properties for which Triton kernels are compiled."""
        return self.triton, self.triton_slope

    def check_slopes(self) -> None:
        """Raise ValueError if a function lacks the slope that a gradient of ``decay`` needs."""
        for field in ("gain", "bias"):
            if getattr(self, field) is not None and getattr(self, f"{field}_slope") is None:
                raise ValueError(
                    f"distance {self.name!r}: {field}_slope must be given if decay requires a "
                    "gradient, got None"
                )


def _growth(t: Tensor, tau: Tensor) -> Tensor:
    """sqrt(1 + 2 log(1 + t/τ))."""
    return (1 + 2 * torch.log1p(t / tau)).sqrt()


def _growth_slope(t: Tensor, tau: Tensor) -> Tensor:
    return -t / (tau * (tau + t)) / _growth(t, tau)


TRITON = "attnzoo.backends.triton.common.distances:"  # followed by a function's name

# Anson et al. 2025, arXiv:2505.17083: decay is τ.
LOGARITHMIC = Distance(
    "logarithmic",
    gain=_growth,
    bias=lambda t, tau: -2 * torch.log1p(t / tau),
    gain_slope=_growth_slope,
    bias_slope=lambda t, tau: 2 * t / (tau * (tau + t)),
    triton=TRITON + "logarithmic",
    triton_slope=TRITON + "logarithmic_slope",
)
