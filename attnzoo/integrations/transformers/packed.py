"""Packed batches that a mask does not show: sequence lengths and position ids that layers receive.

Transformers' mask shows a packed batch only if the model passes its position ids on to the mask,
and if there is no cache. The arguments of flash attention and the position ids reach every layer.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.core.arguments import Segments
from attnzoo.core.checks import check_dense, is_recorded, runs_eagerly
from attnzoo.core.varlen_arguments import check_ends
from attnzoo.integrations.transformers.masks import PADDING, Layout, chunks_of
from attnzoo.nn.segments import restarted


class _Found:
    """The segments of the forward in progress, found by its first layer."""

    def __init__(self, source: Tensor, shape: tuple[int, int], segments: Segments) -> None:
        self.source, self.shape, self.segments = weakref.ref(source), shape, segments
        self.version = source._version
        self.layers: set[int] = set()

    def is_of(self, source: Tensor, shape: tuple[int, int]) -> bool:
        """Whether the segments are those of this tensor with its present values."""
        same = self.source() is source and self.shape == shape
        return same and self.version == source._version


_found: _Found | None = None


def packed_segments(
    module: nn.Module,
    mask: Tensor | None,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    kwargs: dict[str, Any],
) -> Segments:
    """The segments of a packed batch; None if it is not packed.

    Reads the values of position ids once per forward, or in each layer if they are an inference
    tensor, and of sequence lengths only on a CPU.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is None and kwargs.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_q must be given with cu_seq_lens_k, got None")
    if lengths is not None:
        other = kwargs.get("cu_seq_lens_k")
        other = lengths if other is None else other
        check_dense("cu_seq_lens_q", lengths)
        own = _once(module, lengths, (batch, queries), partial(_from_lengths, "q"))
        if other is lengths and keys == queries:
            return own
        return own, _from_lengths("k", other, (batch, layout.stop))[:, layout.start :]
    positions = kwargs.get("position_ids")
    # A mask that holds values shows padding, for which position ids restart too, or chunks.
    empty = mask is None or mask.numel() == 0 or (layout.chunk and not layout.padded)
    if (
        not (empty and layout.is_causal and queries == keys)
        or not isinstance(positions, Tensor)
        or positions.shape[-1] != queries
    ):
        return None
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or not _readable(positions):
        return None
    return _once(module, positions, (batch, queries), _from_positions)


def chunked(documents: Segments, layout: Layout) -> Segments:
    """The chunks of each document of a packed batch; the documents if the layout has no chunks."""
    if not layout.chunk or documents is None:
        return documents
    queries, keys = (documents, documents) if isinstance(documents, Tensor) else documents
    if queries.shape != keys.shape:
        raise ValueError(
            "cu_seq_lens_k must be those of cu_seq_lens_q for a model with chunked attention, got "
            f"{queries.shape[1]} queries and {keys.shape[1]} keys"
        )
    found = chunks_of(queries, restarted(queries), layout.chunk)
    others = found if keys is queries else chunks_of(keys, restarted(keys), layout.chunk)
    if layout.padded:
        assert isinstance(layout.segment_ids, Tensor)  # as many queries as keys
        padding = (layout.segment_ids < 0) | (layout.segment_ids == PADDING)
        others = torch.where(padding, PADDING, others)
    return found, others


def _once(module: nn.Module, source: Tensor, shape: tuple[int, int], make: Any) -> Any:
    """``make(source, shape)``, made by the first layer of a forward and used by the others.

    A layer that asks twice starts another forward.
    """
    global _found
    if not runs_eagerly() or source.is_inference():  # an inference tensor does not count writes
        return make(source, shape)
    found = _found
    if found is None or not found.is_of(source, shape) or id(module) in found.layers:
        _found = found = _Found(source, shape, make(source, shape))
    found.layers.add(id(module))
    return found.segments


def _from_lengths(side: str, cumulative: Tensor, shape: tuple[int, int]) -> Tensor:
    """Segment ids (B, N) from the cumulative lengths of the sequences in all B · N tokens.

    Args:
        side: "q" for cu_seq_lens_q, "k" for cu_seq_lens_k.
    """
    of = "the queries" if side == "q" else "the keys"
    check_ends(f"cu_seq_lens_{side}", cumulative, of, cumulative, shape[0] * shape[1])
    tokens = torch.arange(shape[0] * shape[1], device=cumulative.device)
    return torch.bucketize(tokens, cumulative[1:], right=True, out_int32=True).view(shape)


def _from_positions(positions: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Segment ids (B, N) if all steps other than 1 go back to a start, else None.

    A start is the first position, or 0, as the first document of a row may be the end of one.
    """
    later = positions[:, 1:]
    new = later != positions[:, :-1] + 1
    restarts = ~new | (later == positions[:, :1]) | (later == 0)
    if not bool(new.any() & restarts.all()):
        return None
    ids = torch.nn.functional.pad(new.cumsum(-1, dtype=torch.int32), (1, 0))
    return ids.expand(shape)


def _readable(positions: Tensor) -> bool:
    """Whether values may be read: not in a trace and not in the capture of a CUDA graph."""
    capturing = positions.is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_recorded() and not capturing
