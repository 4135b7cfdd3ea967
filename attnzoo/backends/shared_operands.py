"""Operands that operators on pairwise forms share; see `attnzoo.backends.operator`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """The mask and layout arguments of a call: what says which keys a query sees, and how far off.

    ``mask`` and ``alibi`` are as the backend reads them.
    """

    scale: float
    left: int | None
    right: int | None
    mask: Tensor | None  # [B|1, H|1, Nq|1, Nk]
    q_segments: Tensor | None  # int64 [B, Nq]
    k_segments: Tensor | None  # int64 [B, Nk]
    alibi: Tensor | None


class Vectors(NamedTuple):
    """The per-query vectors of a form. A solved threshold enters as the offset that it is."""

    gain: Tensor | None = None
    offset: Tensor | None = None
    shape: Tensor | None = None
    sink: Tensor | None = None
