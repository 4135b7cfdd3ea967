"""Groups of operands that operators on pairwise forms share. See `attnzoo.backends.operator`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """Scale, mask and layout arguments. The Triton backends pass a converted mask and alibi."""

    scale: float
    left: int | None
    right: int | None
    mask: Tensor | None  # [B|1, H|1, Nq|1, Nk]
    q_segments: Tensor | None  # int64 [B, Nq]
    k_segments: Tensor | None  # int64 [B, Nk]
    alibi: Tensor | None
    softcap: float | None = None


class Terms(NamedTuple):
    """What a form adds to the scores, or multiplies them or the weights with, beside `Vectors`."""

    key_bias: Tensor | None = None  # broadcasts to (B, H, Nk)
    decay: Tensor | None = None  # broadcasts to (B, H, 1)
    factor: Tensor | None = None  # broadcasts to (B, H, Nq)


class Vectors(NamedTuple):
    """The per-query vectors of a form. Kernels receive a solved threshold τ as ``offset``."""

    gain: Tensor | None = None
    offset: Tensor | None = None
    shape: Tensor | None = None
    sink: Tensor | None = None
