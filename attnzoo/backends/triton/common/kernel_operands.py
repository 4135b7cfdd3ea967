"""Operands of the Triton operators and memory layout of their results. Does not import Triton."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.core.call import Call
from attnzoo.core.forms import Pairwise, PerQuery


class Form(NamedTuple):
    """A form as the kernels receive it. ``normalize`` is "online", "sum", "threshold" or "none"."""

    activation: str  # "module:name" of the Triton function
    unit: float  # factor of the scores that the activation expects
    vanishes: bool  # φ(−∞) = 0
    normalize: str
    shape_slope: str | None = None  # "module:name" of the function for ∂φ/∂shape

    @property
    def act(self) -> Any:
        return _function("triton", self.activation)

    @property
    def shape_act(self) -> Any:
        """The Triton function for ∂φ/∂shape, or None."""
        name = self.shape_slope
        return None if name is None else _function("triton_shape_slope", name)


def _function(field: str, path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"Activation.{field} must name a function as 'module:name', got {path!r}: {error}"
        ) from error


class Maps(NamedTuple):
    """The tiles with nonzero weights, as written by `flash.threshold`. None means all tiles."""

    blocks: Tensor | None = None  # int32 [B·H, tiles of queries, tiles of keys]: lists of key tiles
    counts: Tensor | None = None  # int32 [B·H, tiles of queries]: lengths of the lists
    live: Tensor | None = None  # uint8, shaped as blocks: 1 where a tile has nonzero weights


def vectors_of(
    form: Pairwise, gain: PerQuery, layout: Layout, call: Call
) -> tuple[Layout, Vectors]:
    """Return the layout and the per-query vectors. The layout's scale includes a scalar gain.

    Vectors are expanded to (B, H, Nq). Autograd then sums their gradients over the expanded
    dimensions.
    """
    if isinstance(gain, Tensor):
        gain_vector = call.expanded(gain)
    else:
        gain_vector = None
        layout = layout if gain == 1.0 else layout._replace(scale=layout.scale * gain)
    offset, shape, sink = form.offset, form.shape, form.sink
    return layout, Vectors(
        gain_vector,
        None if offset is None else call.expanded(offset),
        None if shape is None else call.expanded(shape),
        None if sink is None else call.expanded(sink),
    )


def layout_of(call: Call) -> Layout:
    """Convert the layout: a bool mask to uint8 (0: hidden), ALiBi slopes to (B, H, Nq)."""
    if call.mask is call.segments is call.alibi is None:
        return Layout(call.scale, call.left, call.right, None, None, None, None)
    mask, segments = call.mask, call.segments or (None, None)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    alibi = None if call.alibi is None else call.expanded(call.alibi.to(call.dtype))
    q_segments, k_segments = (x if x is None else x.contiguous() for x in segments)
    return Layout(call.scale, call.left, call.right, mask, q_segments, k_segments, alibi)


def new_vector(q: Tensor, two: bool = False) -> Tensor:
    """Return an empty fp32 vector (B, H, Nq), or a pair (2, B, H, Nq) if ``two`` is true."""
    shape = (2, *q.shape[:3]) if two else q.shape[:3]
    return q.new_empty(shape, dtype=torch.float32)


def like(x: Tensor, dim: int) -> Tensor:
    """Return an empty (B, H, N, dim) tensor whose heads and positions have x's memory order."""
    b, h, n, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(b, n, h, dim).transpose(1, 2)
    return x.new_empty(b, h, n, dim)


def stands_apart(normalize: str, mask: Tensor | None) -> bool:
    """True if softmax saves its maximum m and sum Z as two vectors instead of m + log Z.

    A float mask may add −1e9 to all scores of a query. m + log Z would lose all digits of log Z.
    """
    return normalize == "online" and mask is not None and mask.is_floating_point()
