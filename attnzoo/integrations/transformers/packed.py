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
from transformers import masking_utils

from attnzoo.core.arguments import Segments
from attnzoo.core.checks import check_dense, is_recorded, runs_eagerly
from attnzoo.core.varlen_arguments import check_ends
from attnzoo.integrations.transformers.masks import (
    NAME,
    ORIGIN,
    PADDING,
    Mask,
    chunks_of,
    with_documents,
)
from attnzoo.nn.segments import restarted

_preprocess = masking_utils._preprocess_mask_arguments


class _ForwardSegments:
    """The segments of the forward in progress, computed by its first layer."""

    def __init__(self, source: Tensor, shape: tuple[int, int], segments: Segments) -> None:
        self.source, self.shape, self.segments = weakref.ref(source), shape, segments
        self.version = source._version
        self.layers: set[int] = set()

    def is_of(self, source: Tensor, shape: tuple[int, int]) -> bool:
        """Whether the segments are those of this tensor with its present values."""
        same = self.source() is source and self.shape == shape
        return same and self.version == source._version


_last_forward: _ForwardSegments | None = None


def packed_segments(
    module: nn.Module,
    mask: Mask,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
    kwargs: dict[str, Any],
) -> Segments:
    """The segments of a call: those of the mask, or of a packed batch that it does not show.

    Reads the values of position ids once per forward, or in each layer if they are an inference
    tensor, and of sequence lengths only on a CPU. A graph cannot read them: there every causal call
    without a cache has segments, also if its rows hold one document each.

    Args:
        is_causal: the module's flag. It counts in a graph, where the mask may be dense.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is None and kwargs.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_q must be given with cu_seq_lens_k, got None")
    if lengths is not None:
        other = kwargs.get("cu_seq_lens_k")
        other = lengths if other is None else other
        check_dense("cu_seq_lens_q", lengths)
        documents = _once(module, lengths, (batch, queries), partial(_from_lengths, "q"))
        if other is lengths and keys == queries:
            return _combined(documents, documents, mask)
        of_keys = _from_lengths("k", other, (batch, mask.stop))[:, mask.start :]
        return _combined(documents, of_keys, mask)
    positions = kwargs.get("position_ids")
    if (
        mask.segment_ids is not None
        or not isinstance(positions, Tensor)
        or queries != keys
        or positions.shape not in ((1, queries), (batch, queries))
    ):
        return mask.segment_ids
    if not _readable(positions):
        if not (mask.causal or (is_causal and _is_dense(mask))):
            return None
        return document_starts(positions.expand(batch, -1), _visible_tokens(mask, batch))[0]
    if not mask.causal:
        return None
    steps = _once(module, positions, (batch, queries), _from_positions)
    if steps is None or mask.attn_mask is None:
        return steps[0] if steps is not None and steps[1] else None
    starts, packed = document_starts(positions.expand(batch, -1), _visible_tokens(mask, batch))
    return starts if bool(packed) else None


def _is_dense(mask: Mask) -> bool:
    return mask.attn_mask is not None and mask.attn_mask.shape[2] > 1


def _visible_tokens(mask: Mask, batch: int) -> Tensor | None:
    """The tokens that may see themselves, (B, N); None for all."""
    visible = mask.attn_mask
    if visible is None:
        return None
    visible = visible[:, 0].diagonal(dim1=1, dim2=2) if _is_dense(mask) else visible[:, 0, 0]
    visible = visible if visible.dtype == torch.bool else visible > float("-inf")
    return visible.expand(batch, -1)


def _combined(queries: Tensor, keys: Tensor, mask: Mask) -> Segments:
    """The documents of queries and keys that cu_seq_lens shows, with chunks and padding."""
    if mask.segment_ids is None and not mask.chunk:
        return queries if keys is queries else (queries, keys)
    if queries.shape != keys.shape:
        raise ValueError(
            "cu_seq_lens_k must be those of cu_seq_lens_q for a model with chunked attention or "
            f"position_ids that restart, got {queries.shape[1]} queries and {keys.shape[1]} keys"
        )
    query_ids, key_ids = queries, keys
    if mask.chunk:
        query_ids = chunks_of(queries, restarted(queries), mask.chunk)
        key_ids = query_ids if keys is queries else chunks_of(keys, restarted(keys), mask.chunk)
    if mask.segment_ids is not None:
        assert isinstance(mask.segment_ids, Tensor)  # as many queries as keys
        padding = (mask.segment_ids < 0) | (mask.segment_ids == PADDING)
        key_ids = torch.where(padding, PADDING, key_ids)
    return query_ids, key_ids


def _once(module: nn.Module, source: Tensor, shape: tuple[int, int], make: Any) -> Any:
    """``make(source, shape)``, made by the first layer of a forward and used by the others.

    If a layer asks a second time, a new forward has begun.
    """
    global _last_forward
    if not runs_eagerly() or source.is_inference():  # an inference tensor does not count writes
        return make(source, shape)
    last = _last_forward
    if last is None or not last.is_of(source, shape) or id(module) in last.layers:
        _last_forward = last = _ForwardSegments(source, shape, make(source, shape))
    last.layers.add(id(module))
    return last.segments


def _from_lengths(side: str, cumulative: Tensor, shape: tuple[int, int]) -> Tensor:
    """Segment ids (B, N) from the cumulative lengths of the sequences in all B · N tokens.

    Args:
        side: "q" for cu_seq_lens_q, "k" for cu_seq_lens_k.
    """
    of = "the queries" if side == "q" else "the keys"
    check_ends(f"cu_seq_lens_{side}", cumulative, of, cumulative, shape[0] * shape[1])
    tokens = torch.arange(shape[0] * shape[1], device=cumulative.device)
    return torch.bucketize(tokens, cumulative[1:], right=True, out_int32=True).view(shape)


def _from_positions(positions: Tensor, shape: tuple[int, int]) -> tuple[Tensor, bool] | None:
    """`document_starts` without padding; None if all steps are 1."""
    if bool((positions.diff() == 1).all()):
        return None
    starts, packed = document_starts(positions.expand(shape), None)
    return starts, bool(packed)


def document_starts(
    positions: Tensor, visible: Tensor | None, *, jumps: bool = False
) -> tuple[Tensor, Tensor]:
    """The index of the first token of each token's document, and whether any row is packed.

    A row is packed if every step of its positions is either 1 or a return to a start, and at least
    one is a return. A start is the first position, or 0, as the first document of a row may be the
    end of one. The positions of hidden tokens do not matter, and those of later tokens may count
    them or not.

    Args:
        positions: (B, N).
        visible: (B, N), or None for all.
        jumps: whether all steps other than 1 start a document.

    Returns:
        int64 (B, N), which does not decrease, and a bool tensor of one element. The first document
        of a packed row starts before the row if its first position is not 0.
    """
    at = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    visible = torch.ones_like(at, dtype=torch.bool) if visible is None else visible
    last = at.masked_fill(~visible, -1).cummax(-1).values  # the last visible token so far
    before = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    gap, step = at - before, positions - positions.gather(-1, before.clamp_min(0))
    first = positions.gather(-1, visible.int().argmax(-1, keepdim=True))
    new = visible & (before >= 0) & (step != 1) & (step != gap)
    if not jumps:
        # A position below ``gap`` is of a document that starts after the last visible token.
        restarts = (positions < gap) | (positions == first)
        new = new & (restarts | ~new).all(-1, keepdim=True)
    starts = at.masked_fill(~(new | (visible & (before < 0))), -ORIGIN)
    missing = positions[:, :1] * new.any(-1, keepdim=True)  # tokens of the first document
    starts = torch.cat([starts[:, :1] - missing, starts[:, 1:]], dim=-1)
    return starts.cummax(-1).values, new.any()


def preprocess_mask_arguments(
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Replaces a function of transformers, which finds packed batches only without mask and cache.

    If attnzoo makes the mask, the attention mask that it returns shows the documents.
    """
    if isinstance(attention_mask, Mask):  # `generate` has made it before
        return True, attention_mask, *[None] * 5
    attnzoo = config._attn_implementation == NAME
    result: Any = _preprocess(
        config, inputs_embeds, attention_mask, past_key_values,
        None if attnzoo else position_ids, *args, **kwargs,
    )  # fmt: skip
    is_done, mask, _, queries, _, offset, _ = result
    batch = inputs_embeds.shape[0]
    if (
        not attnzoo
        or is_done
        or queries == 1
        or not isinstance(position_ids, Tensor)
        or position_ids.shape not in ((1, queries), (batch, queries))
    ):
        return result
    positions = position_ids.to(inputs_embeds.device).expand(batch, -1)
    readable = _readable(positions)
    if not readable and (isinstance(offset, Tensor) or offset):
        return result
    offset = int(offset)
    visible = None if mask is None else mask[:, offset : offset + queries]
    jumps = mask is None and past_key_values is None  # as in transformers
    starts, packed = document_starts(positions, visible, jumps=jumps)
    if readable and not bool(packed):
        return result
    if offset:
        if bool((positions[:, 1:] == 0).any()):
            raise ValueError(
                "position_ids must not restart in a call that continues a cache, which holds "
                f"{offset} tokens, got {positions.tolist()}"
            )
        return result
    return is_done, with_documents(starts, visible), *result[2:]


def _readable(positions: Tensor) -> bool:
    """Whether values may be read: not in a trace and not in the capture of a CUDA graph."""
    capturing = positions.is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_recorded() and not capturing


masking_utils._preprocess_mask_arguments = preprocess_mask_arguments
