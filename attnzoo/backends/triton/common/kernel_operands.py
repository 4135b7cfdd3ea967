"""Operands of the Triton operators and memory layout of their results. Does not import Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.backends.shared_operands import Layout, Rule, Terms, Vectors
from attnzoo.core.call import Call
from attnzoo.core.forms import Pairwise, PerQuery
from attnzoo.core.relative_bias import is_alibi


class Solved(NamedTuple):
    """A threshold, and the tiles with nonzero weights, as `flash.threshold` writes them.

    None for forms without a threshold, which read all tiles. ``cut`` and ``last`` are of a
    selection of the largest scores, as `flash.selection` writes them.
    """

    peak: Tensor | None = None  # fp32 [B, H, Nq]: the largest score
    tau: Tensor | None = None  # fp32 [B, H, Nq]: τ relative to the peak
    blocks: Tensor | None = None  # int32 [B·H, tiles of queries, tiles of keys]: lists of key tiles
    counts: Tensor | None = None  # int32 [B·H, tiles of queries]: lengths of the lists
    live: Tensor | None = None  # uint8, shaped as blocks: 1 where a tile has nonzero weights
    cut: Tensor | None = None  # fp32 [B, H, Nq]: no selected score is below it
    last: Tensor | None = None  # int32 [B, H, Nq]: the last selected key with this score


UNSOLVED = Solved()  # of a form without a threshold or selection


class Paged(NamedTuple):
    """A paged cache of keys and values: k and v are (pages, Hkv, page size, D).

    None for other calls. The entries of the table from row · blocks on are the pages of a row. They
    hold the last ``used`` of its keys: key j of the call is entry j − (longest − used) there.
    """

    table: Tensor | None = None  # int32 [B, blocks]
    used: Tensor | None = None  # int32 [B]
    longest: int | None = None  # the number of keys of the call

    def keys(self, k: Tensor) -> int:
        """The number of keys of a call with keys k."""
        return k.shape[2] if self.longest is None else self.longest


NOT_PAGED = Paged()


def operands_of(
    form: Pairwise, gain: PerQuery, call: Call, layout: Layout
) -> tuple[Layout, Vectors, Terms]:
    """Return the operands of a call. Scale and softcap of the layout include a scalar gain.

    Vectors are expanded to (B, H, Nq), (B, H, Nk) or (B, H). Autograd then sums their gradients
    over the expanded dimensions.
    """

    def expanded(value: PerQuery | None) -> Tensor | None:
        return None if value is None else call.expanded(value)

    gain_vector, key_bias, decay = None, None, None
    # With a softcap, a gain of 0 would make scale / softcap 0 / 0.
    if isinstance(gain, Tensor) or (gain == 0.0 and layout.softcap is not None):
        gain_vector = call.expanded(gain)
    elif gain != 1.0:
        # gain · c · tanh(scale · q·k / c): both change, because the kernels take scale / c.
        softcap = None if layout.softcap is None else layout.softcap * gain
        layout = layout._replace(scale=layout.scale * gain, softcap=softcap)
    if form.key_bias is not None:
        key_bias = call.per_key(form.key_bias)
        key_bias = key_bias.expand(call.batch, call.heads, call.keys).contiguous()
    if form.decay is not None:
        decay = call.per_query(form.decay).expand(call.batch, call.heads, 1)[..., 0].contiguous()
    vectors = gain_vector, *map(expanded, (form.offset, form.shape, form.sink))
    return layout, Vectors(*vectors), Terms(key_bias, decay, expanded(form.factor))


def layout_of(call: Call) -> Layout:
    """Convert a bool mask to uint8 (0: hidden), ALiBi's slopes to (B, H, Nq), a table to (H, W)."""
    if call.mask is call.segments is call.relative_bias is None:
        return Layout(call.scale, call.left, call.right, None, None, None, None, call.softcap)
    mask, segments = call.mask, call.segments or (None, None)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    bias = call.relative_bias
    if bias is not None:
        bias = call.expanded(bias) if is_alibi(bias) else bias[0].contiguous()
    q_segments, k_segments = (x if x is None else x.contiguous() for x in segments)
    return Layout(
        call.scale, call.left, call.right, mask, q_segments, k_segments, bias, call.softcap
    )


def is_peaked(rule: Rule, values: Tensor) -> bool:
    """Whether products have φ and dS relative to their running maxima; see `tile.relative`."""
    return not rule.online and values.dtype == torch.float16


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


def is_read_in_place(x: Tensor) -> bool:
    """Whether `pad_columns` and `aligned` leave x as it is, if its address allows it.

    A graph does not know the address.
    """
    return x.stride(3) == 1 and not x.shape[3] % unit_of(x) and has_aligned_rows(x)


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Copy each tensor whose rows do not all begin at multiples of 16 bytes.

    For example, a slice of packed projections may start anywhere. Narrower loads would take many
    instructions and registers.
    """
    return [x if _is_aligned(x) else like(x, x.shape[3]).copy_(x) for x in tensors]


def aligned_layout(layout: Layout) -> Layout:
    """Copy a dense mask of which the kernels cannot read 16 bytes at a time, as torch's kernels do.

    A mask expanded over the queries becomes a key mask. One expanded over the keys is not copied.
    """
    mask = layout.mask
    if mask is None or mask.shape[2] == 1 or mask.stride(3) == 0:
        return layout
    if mask.stride(2) == 0:
        return layout._replace(mask=mask[:, :, :1])
    if _is_aligned(mask):
        return layout
    # Expanded dimensions are not copied. The kernels broadcast those of size 1.
    b, h = (slice(1) if step == 0 else slice(None) for step in mask.stride()[:2])
    mask, keys = mask[b, h], mask.shape[3]
    copy = mask.new_empty(*mask.shape[:3], keys + -keys % unit_of(mask))[..., :keys]
    return layout._replace(mask=copy.copy_(mask))


def _is_aligned(x: Tensor) -> bool:
    return x.stride(3) == 1 and not x.data_ptr() % 16 and has_aligned_rows(x)


def has_aligned_rows(x: Tensor) -> bool:
    """True if the strides are multiples of 16 bytes. Those of dimensions of size 1 are not used."""
    (b, h, n, _), unit = x.stride(), 16 // x.element_size()
    # A power of two divides all strides if it divides their bits.
    return not (b | h | n) % unit or all(
        step % unit == 0 or size == 1 for size, step in zip(x.shape, (b, h, n))
    )


def adds_terms(layout: Layout, vectors: Vectors, terms: Terms) -> bool:
    """True if scores are more than multiples of the products q·k."""
    added = layout.mask is not None and layout.mask.is_floating_point()
    return added or not (
        layout.relative_bias is terms.key_bias is vectors.offset is terms.decay is None
    )


def saves_weight_sum(
    rule: Rule, layout: Layout, vectors: Vectors, terms: Terms, want_lse: bool
) -> bool:
    """True if the forward saves a sum Z (``weight_sum``) beside the maximum m (``stat``).

    A shifted activation needs both. A softmax otherwise saves m + log Z, but an added term, such as
    a float mask of −1e9, may be common to all scores of a query. m + log Z would lose all digits of
    log Z. If lse is returned beside a sink, the backward needs Z with and without the sink.
    """
    if not rule.online:
        return rule.activation.shifted
    return adds_terms(layout, vectors, terms) or (want_lse and vectors.sink is not None)
