"""What transformers' mask function hands to its attention function.

Transformers makes one mask per kind of layer in each forward and passes it to each layer of this
kind. `make_mask` recognizes causality, sliding windows, chunks, packed batches and padding, and
returns a `Mask`, which holds no more than a number per key. It returns None if every query sees
every key. All other masks are dense tensors: those of a mask function that is not recognized, and
in `torch.compile` those of windows and static caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from attnzoo.core.arguments import Segments, Window, check_call
from attnzoo.core.checks import is_int
from attnzoo.core.registry import get_variant
from attnzoo.nn import WRAPPERS
from attnzoo.nn.masks import as_bool

NAME = "attnzoo"
PADDING = torch.iinfo(torch.int32).max  # the segment of padding after the segments
ORIGIN = 2**30  # see `with_documents`


class Pattern(NamedTuple):
    """What a mask function of transformers means."""

    causal: bool = False
    window: int = 0  # 0: none
    both_sides: bool = False  # the window
    chunk: tuple[int, Tensor] | None = None  # size, left padding (B,)


class Mask(NamedTuple):
    """A mask as arguments of `attnzoo.attention` for the keys ``start : stop``.

    A tuple, because FSDP and accelerate move the tensors in tuples to other devices, and
    `torch.compile` traces them.
    """

    shape: tuple[int, int, int, int]  # of a dense mask in its place, (B, 1, Nq, Nk)
    stop: int
    start: int = 0
    causal: bool = False  # the queries are the last keys
    window: Window = None
    attn_mask: Tensor | None = None
    segment_ids: Segments = None
    chunk: int = 0  # size of the chunks, if segment_ids are chunks

    # `generate` makes masks before it calls the model; it and GPT-2 ask for these.
    ndim = 4

    def contiguous(self) -> Mask:
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `attnzoo.attention`. A single query needs no causality."""
        return {
            "attn_mask": self.attn_mask, "is_causal": self.causal and self.shape[2] > 1,
            "window": self.window, "segment_ids": self.segment_ids,
        }  # fmt: skip

    def __radd__(self, scores: Tensor) -> Tensor:
        """Masked scores (B, H, Nq, Nk) of a module that adds its mask itself (BigBird-Pegasus)."""
        q, k = scores[..., :1], scores[:, :, :1, self.start : self.stop].mT
        visible = check_call(q, k, k, **self.arguments).visible
        hidden = ~F.pad(visible, (self.start, scores.shape[-1] - self.stop))
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def with_bias(mask: Mask, bias: Tensor | None) -> dict[str, Any]:
    """The arguments of `attnzoo.attention` for a mask, and a bias (1 or B, H, Nq, Nk) if any.

    The bias of T5 is a dense tensor that all layers share. Its gradient is that of a float mask.
    """
    arguments, visible = mask.arguments, mask.attn_mask
    if bias is None:
        return arguments
    bias = bias[..., mask.start : mask.stop]
    if visible is not None and visible.dtype == torch.bool:
        bias = bias.masked_fill(~visible, float("-inf"))
    elif visible is not None:
        bias = bias + visible
    return arguments | {"attn_mask": bias}


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask | Tensor | None:
    """transformers' mask function: returns what the module's docstring lists."""
    documents, attention_mask = _read_documents(attention_mask, kv_length)
    pattern = find_pattern(mask_function) or _chunks_in_graph(attention_mask, kwargs)
    # A static cache keeps its length in a tensor, whose value a compiled graph cannot read.
    unknown = isinstance(q_offset, Tensor) and torch.compiler.is_compiling()
    end = None if unknown else int(q_offset) + q_length - kv_offset
    if pattern is None or not _is_expressible(pattern, q_length, kv_length, end, kwargs):
        if (pattern is None or pattern.causal) and end != kv_length:
            _check_not_positional(kwargs.get("config"))
        if documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(documents))
        return _dense(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    stop = kv_length if end is None or not pattern.causal else end
    segments = _segments(pattern.chunk, documents, kv_offset, stop)
    visible = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    visible = None if visible is None else visible[:, kv_offset : kv_offset + stop]
    size = pattern.window if pattern.window < stop else 0
    if not pattern.causal and not size and segments is None and visible is None:
        return None
    if q_length == 1 and segments is not None:
        same = segments == segments[:, -1:]
        visible, segments = same if visible is None else same & visible, None
    mask = Mask((batch_size, 1, q_length, kv_length), stop, causal=pattern.causal)
    if size and not pattern.causal:
        mask = mask._replace(window=(size, size))
    elif size:
        # The first query sees no key before ``start``, and a single query all later ones.
        start = max(stop - q_length - size + 1, 0)
        mask = mask._replace(start=start, window=size if q_length > 1 else None)
    if segments is not None:
        if visible is not None:  # padding gets segments of its own, and the segments stay sorted
            padding = torch.where(visible.cumsum(-1) == 0, -1, PADDING)
            segments = torch.where(visible, segments, padding)
        ids = segments.to(torch.int32).expand(batch_size, -1)[:, mask.start :]
        of_both = ids if q_length == ids.shape[1] else (ids[:, -q_length:], ids)
        chunk = 0 if pattern.chunk is None else pattern.chunk[0]
        return mask._replace(segment_ids=of_both, chunk=chunk)
    if visible is not None:
        return mask._replace(attn_mask=visible[:, None, None, mask.start :])
    return mask


def _is_expressible(
    pattern: Pattern, queries: int, keys: int, end: int | None, options: dict[str, Any]
) -> bool:
    """Whether a `Mask` can replace the dense mask.

    Queries and keys must be aligned as in `attnzoo.attention`. A model that changes the mask does
    not allow skipping it. Transformers does not allow it either for one query with a static cache.
    A model that selects keys reads the dense mask there too.
    """
    one_sided = pattern.chunk is not None or (pattern.window and not pattern.both_sides)
    if (pattern.causal and pattern.both_sides) or (one_sided and not pattern.causal):
        return False
    if pattern.causal:
        if end is None or not queries <= end <= keys:
            return False
        if options.get("allow_is_causal_skip") is not False:
            return True
        return queries == 1 and end < keys and not _reads_masks(options.get("config"))
    allowed = options.get("allow_is_bidirectional_skip") is not False
    return allowed and (not pattern.window or queries == keys)


def _reads_masks(config: Any) -> bool:
    """Whether modules of the model select keys from their mask, which must be a tensor then."""
    if getattr(config, "keep_window_size", None) is not None:  # Doge
        return True
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def read_mask(mask: Mask | Tensor | None, is_causal: bool, queries: int, keys: int) -> Mask:
    """A mask from `make_mask` or of another origin, for a call with so many queries and keys.

    ``is_causal`` is the module's flag. It counts only without a mask: the flag of some decoders is
    wrong, because the mask alone decides in eager attention.
    """
    if isinstance(mask, Mask):
        batch, _, rows, columns = mask.shape
        # BridgeTower makes the mask of one query for all queries; a dense mask would broadcast.
        if rows == 1 != queries and columns == keys and not mask.causal:
            return mask._replace(shape=(batch, 1, queries, keys))
        if rows != queries or columns != keys:
            raise ValueError(
                f"attention_mask must be made for {queries} queries and {keys} keys, as in this "
                f"call, got one for {rows} queries and {columns} keys"
            )
        return mask
    shape = (1, 1, queries, keys)
    if mask is not None:
        return Mask(shape, keys, attn_mask=_other_mask(mask))
    if is_causal and queries != keys:
        raise ValueError(
            f"attention_mask must be given for a causal call with {queries} queries and {keys} "
            "keys, got None"
        )
    return Mask(shape, keys, causal=is_causal)


def _other_mask(mask: Tensor) -> Tensor:
    """A dense mask with -inf for hidden keys; a bool mask if it adds nothing to any score."""
    if not mask.is_floating_point():
        return mask
    # Models hide keys with the most negative finite number instead of -inf.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    visible = as_bool(mask, hidden)
    return mask.masked_fill(hidden, float("-inf")) if visible is None else visible


# ---- mask functions of transformers ------------------------------------------------------------


def find_pattern(function: Callable[..., Any]) -> Pattern | None:
    """What a mask function of transformers means; None if it is not recognized.

    Transformers combines closures, which are recognized by their code and the variables they hold.
    """
    if function is causal_mask_function:
        return Pattern(causal=True)
    if function is bidirectional_mask_function:
        return Pattern()
    if torch.compiler.is_compiling():  # a traced closure does not show its variables
        return None
    kind = _KINDS.get(getattr(function, "__code__", None))
    variables = _variables(function)
    if kind == "and":
        return _all_of(variables.get("mask_functions", ()))
    size = variables.get("chunk_size" if kind == "chunk" else "sliding_window")
    if kind is None or not _is_size(size):
        return None
    if kind == "chunk":
        return Pattern(chunk=(size, variables["left_padding"]))
    return Pattern(window=size, both_sides=kind == "window to both sides")


def _chunks_in_graph(mask: Tensor | None, options: dict[str, Any]) -> Pattern | None:
    """The pattern of chunks in a graph of `torch.compile`, where the mask function is not readable.

    Transformers does not allow skipping a mask, or uses vmap, if it adds other functions to it.
    """
    config = options.get("config")
    size = getattr(config, "attention_chunk_size", None)
    if (
        not torch.compiler.is_compiling()
        or not _is_size(size)
        or options.get("local_size") != size
        or getattr(config, "sliding_window", None) == size
        or options.get("use_vmap")
        or options.get("allow_is_causal_skip") is False
    ):
        return None
    if mask is None:
        left_padding = torch.zeros(1, dtype=torch.long, device=options.get("device"))
    else:
        left_padding = (mask.cumsum(-1) == 0).sum(-1)
    return Pattern(causal=True, chunk=(size, left_padding))


def _all_of(functions: Any) -> Pattern | None:
    """The pattern of a conjunction of mask functions."""
    fields: dict[str, Any] = {}
    for function in functions:
        pattern = find_pattern(function)
        if pattern is None:
            return None
        new = {name: value for name, value in pattern._asdict().items() if value}
        if fields.keys() & new.keys() - {"causal"}:  # two windows or chunks have no common field
            return None
        fields |= new
    return Pattern(**fields) if functions else None


def _is_size(size: Any) -> TypeGuard[int]:
    return is_int(size) and size >= 1


def _variables(function: Any) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


_KINDS: dict[Any, str] = {
    and_masks().__code__: "and",
    sliding_window_overlay(1).__code__: "window",
    sliding_window_bidirectional_overlay(1).__code__: "window to both sides",
    chunked_overlay(1, torch.zeros(1)).__code__: "chunk",
}


def _segments(
    chunk: tuple[int, Tensor] | None, documents: Tensor | None, first: int, used: int
) -> Tensor | None:
    """The segment of each key, (B, keys) or (1, keys); None if there is only one.

    Args:
        chunk: the size of the chunks, and the left padding (B,).
        documents: the index of the first token of each token's document, (B, N).
        first: the position of the first key.
        used: the number of keys.
    """
    if documents is not None:
        documents = documents[:, :used]
    if chunk is None:
        return None if documents is None else documents.clamp_min(0)
    size, left_padding = chunk
    at = torch.arange(first, first + used, device=left_padding.device)
    if documents is not None:
        return chunks_of(documents, at - documents, size)
    if first + used <= size:
        return None
    return (at - left_padding[:, None]) // size


def with_documents(starts: Tensor, visible: Tensor | None) -> Tensor:
    """An attention mask that shows the documents of a packed batch to `make_mask`, int32 (B, N).

    0 marks a hidden token. All others hold the index of the first token of their document plus a
    constant, because that index is negative if the start of the document is missing. int32 tells
    this mask from the bool masks of transformers.
    """
    numbers = (starts + (ORIGIN + 1)).to(torch.int32)
    return numbers if visible is None else numbers.masked_fill(~visible, 0)


def _read_documents(mask: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The documents of visible tokens (B, keys), and the mask without them."""
    if mask is None or mask.dtype != torch.int32:
        return None, mask
    mask = F.pad(mask, (0, keys - mask.shape[-1]))
    return mask - (ORIGIN + 1), mask != 0


def chunks_of(documents: Tensor, positions: Tensor, size: int) -> Tensor:
    """Segment ids (B, N): the chunks of ``size`` positions of each document, ids (B, N)."""
    chunks = (positions // size).expand_as(documents)
    ids = torch.stack([documents, chunks.to(documents.dtype)])
    new = (ids[..., 1:] != ids[..., :-1]).any(0)
    return F.pad(new.cumsum(-1), (1, 0))


def _dense(*args: Any, **kwargs: Any) -> Tensor | None:
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        kwargs[name] = False
    make: Any = sdpa_mask  # accepts a tensor q_offset, but its annotation does not say so
    return make(*args, **kwargs)


def _check_not_positional(config: Any) -> None:
    """Raises for variants that need positions, which unused keys of a static cache would change."""
    layers = (getattr(config, NAME, None) or {}).get("layers", {})
    for name, layer in layers.items():
        variant, wrapper = layer["variant"], layer.get("wrapper")
        positional = get_variant(variant).needs_positions
        if wrapper is not None and (kind := WRAPPERS[wrapper["name"]]).positional:
            positional = positional or kind.__name__
        if positional is not None:
            raise ValueError(
                f"{positional} ({name}) does not support a static cache that is compiled or "
                "has a mask of the model's own: use a dynamic cache"
            )
