"""Operands of the Triton operators and memory layout of their results. Does not import Triton."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.backends.shared_operands import Layout, Vectors
from attnzoo.core.call import Call
from attnzoo.core.forms import Pairwise, PerQuery


class Form(NamedTuple):
    """A form as the kernels receive it.

    ``normalize`` is "online" (softmax, with a running maximum), "sum", "threshold" or "none".
    """

    activation: str  # "module:name" of the Triton function
    unit: float  # factor of the scores that the activation expects
    vanishes: bool  # φ(−∞) = 0
    normalize: str
    shape_slope: str | None = None  # "module:name" of the function for ∂φ/∂shape
    normalizer: bool = False  # the Triton function returns (φ, φ', μ, μ')
    shifted: bool = False  # φ and μ are relative to M
    eps: float = 0.0  # added to the normalizer
    distance: str | None = None  # "module:name" of the function for (a, m) of a `Distance`
    distance_slope: str | None = None  # "module:name" of the function for their slopes

    # The Triton functions; None where the form names none
    act = property(lambda f: _function("Activation.triton", f.activation))
    shape_act = property(lambda f: _function("Activation.triton_shape_slope", f.shape_slope))
    distance_act = property(lambda f: _function("Distance.triton", f.distance))
    distance_slope_act = property(lambda f: _function("Distance.triton_slope", f.distance_slope))


def _function(field: str, path: str | None) -> Any:
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{field} must name a function as 'module:name', got {path!r}: {error}"
        ) from error


class Maps(NamedTuple):
    """The tiles with nonzero weights, as written by `flash.threshold`. None means all tiles."""

    blocks: Tensor | None = None  # int32 [B·H, tiles of queries, tiles of keys]: lists of key tiles
    counts: Tensor | None = None  # int32 [B·H, tiles of queries]: lengths of the lists
    live: Tensor | None = None  # uint8, shaped as blocks: 1 where a tile has nonzero weights


class Extras(NamedTuple):
    """Vectors beside those of `Vectors`, contiguous."""

    key_bias: Tensor | None = None  # [B, H, Nk]
    base: Tensor | None = None  # [B, H, Nq]; see `vectors_of`
    factor: Tensor | None = None  # [B, H, Nq]
    decay: Tensor | None = None  # [B, H]
    peak: Tensor | None = None  # [B, H, Nq]: what a threshold is relative to, see `flash.threshold`


def vectors_of(
    form: Pairwise, gain: PerQuery, layout: Layout, call: Call
) -> tuple[Layout, Vectors, Extras]:
    """Return the layout and the vectors. Scale and softcap of the layout include a scalar gain.

    Vectors are expanded to (B, H, Nq), (B, H, Nk) or (B, H). Autograd then sums their gradients
    over the expanded dimensions.

    The kernels subtract `Vectors.offset` from the scores at the end, where φ also takes a solved
    threshold. An offset that belongs to a key bias, or to the scores of a normalized form, is
    passed as ``base`` instead.
    """

    def expanded(value: PerQuery | None) -> Tensor | None:
        return None if value is None else call.expanded(value)

    gain_vector = None
    if isinstance(gain, Tensor) or (gain == 0.0 and layout.softcap is not None):
        gain_vector = call.expanded(gain)
    elif gain != 1.0:
        # gain · c · tanh(z / c) with both scale and c multiplied by the gain.
        softcap = None if layout.softcap is None else layout.softcap * gain
        layout = layout._replace(scale=layout.scale * gain, softcap=softcap)
    offset, base, key_bias, decay = expanded(form.offset), None, None, None
    if form.normalize != "none" or form.key_bias is not None:
        offset, base = None, offset
    if form.key_bias is not None:
        key_bias = call.per_key(form.key_bias)
        key_bias = key_bias.expand(call.batch, call.heads, call.keys).contiguous()
    if form.decay is not None:
        decay = call.per_query(form.decay).expand(call.batch, call.heads, 1)[..., 0].contiguous()
    vectors = Vectors(gain_vector, offset, expanded(form.shape), expanded(form.sink))
    return layout, vectors, Extras(key_bias, base, expanded(form.factor), decay)


def layout_of(call: Call) -> Layout:
    """Convert the layout: a bool mask to uint8 (0: hidden), ALiBi slopes to (B, H, Nq)."""
    if call.mask is call.segments is call.alibi is None:
        return Layout(call.scale, call.left, call.right, None, None, None, None, call.softcap)
    mask, segments = call.mask, call.segments or (None, None)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    alibi = None if call.alibi is None else call.expanded(call.alibi.to(call.dtype))
    q_segments, k_segments = (x if x is None else x.contiguous() for x in segments)
    return Layout(
        call.scale, call.left, call.right, mask, q_segments, k_segments, alibi, call.softcap
    )


def is_peaked(form: Form, values: Tensor) -> bool:
    """Whether products have φ and dS relative to their running maxima; see `tile.relative`."""
    return form.normalize != "online" and values.dtype == torch.float16


def new_vector(q: Tensor) -> Tensor:
    """Return an empty fp32 vector (B, H, Nq)."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def like(x: Tensor, dim: int) -> Tensor:
    """Return an empty (B, H, N, dim) tensor whose heads and positions have x's memory order."""
    b, h, n, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(b, n, h, dim).transpose(1, 2)
    return x.new_empty(b, h, n, dim)


def unit_of(x: Tensor) -> int:
    """Number of elements in 16 bytes, the width of the kernels' loads and the unit of strides."""
    return 16 // x.element_size()


def pad_columns(x: Tensor) -> Tensor:
    """Return x with columns of 0 up to a multiple of 16 bytes. torch's kernels pad so too."""
    missing = -x.shape[3] % unit_of(x)
    return pad(x, (0, missing)) if missing else x


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Copy each tensor whose rows do not all begin at multiples of 16 bytes.

    For example, a slice of packed projections may start anywhere. Narrower loads would take many
    instructions and registers.
    """
    return [x if _is_aligned(x) else like(x, x.shape[3]).copy_(x) for x in tensors]


def _is_aligned(x: Tensor) -> bool:
    if x.stride(3) != 1 or x.data_ptr() % 16:
        return False
    unit = unit_of(x)
    # Steps along dimensions of size 1 are never taken.
    return all(step % unit == 0 or n == 1 for n, step in zip(x.shape, x.stride()[:3]))


def adds_terms(layout: Layout, extras: Extras) -> bool:
    """True if scores are more than multiples of the products q·k."""
    added = layout.mask is not None and layout.mask.is_floating_point()
    return added or not (layout.alibi is extras.key_bias is extras.base is extras.decay is None)


def saves_weight_sum(
    form: Form, layout: Layout, vectors: Vectors, extras: Extras, want_lse: bool
) -> bool:
    """True if the forward saves a sum Z (``weight_sum``) beside the maximum m (``stat``).

    A shifted activation needs both. A softmax otherwise saves m + log Z, but an added term, such as
    a float mask of −1e9, may be common to all scores of a query. m + log Z would lose all digits of
    log Z. If lse is returned beside a sink, the backward needs Z with and without the sink.
    """
    if form.normalize != "online":
        return form.shifted
    return adds_terms(layout, extras) or (want_lse and vectors.sink is not None)
