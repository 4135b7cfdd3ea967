"""What transformers' mask function hands to its attention function, as small tensors.

Transformers makes one mask per kind of layer in each forward, and passes it to each layer as one
tensor. `make_mask` recognizes causality, sliding windows, chunks, packed batches and padding, and
returns what they need; `read_mask` turns this into arguments of `attnzoo.attention`:

- None: not causal, without window, padding or segments.
- uint8 (B, W + 1, kind, keys in use): a key mask.
- int32 (B, W + 1, kind, keys in use): the segment of each key. The queries are the last keys.
- uint8 (keys in use, W + 1, kind, 0): neither of them.

W is the window, 0 for none, and ``kind`` is one of the constants below; for chunks W is their size.
Both are sizes, because sizes are known without reading a GPU, and they cost no memory, because the
tensor is expanded. Transformers itself makes no masks of these dtypes. All other masks are dense
and include causality: those of a mask function that is not recognized, and in `torch.compile` those
of windows and static caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from attnzoo.core.arguments import Segments, Window
from attnzoo.core.checks import is_int
from attnzoo.core.registry import get_variant
from attnzoo.nn.masks import as_bool

NAME = "attnzoo"
PADDING = torch.iinfo(torch.int32).max  # the segment of padding after the segments
ORIGIN = 2**30  # see `with_documents`
# Kinds of masks. All but the last two are causal.
CAUSAL, CHUNKS, TO_BOTH_SIDES, BIDIRECTIONAL = range(1, 5)


class Pattern(NamedTuple):
    """What a mask function of transformers means."""

    causal: bool = False
    window: int = 0  # 0: none
    both_sides: bool = False  # the window
    chunk: tuple[int, Tensor] | None = None  # size, left padding (B,)
    documents: Tensor | None = None  # of a packed batch, (B, N): the index of their first tokens


class MaskLayout(NamedTuple):
    """Arguments of `attnzoo.attention` for the keys ``start : stop``."""

    attn_mask: Tensor | None
    is_causal: bool
    window: Window
    segment_ids: Segments
    start: int
    stop: int
    chunk: int = 0  # size of the chunks, if segment_ids are chunks


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: returns what the module's docstring lists, else a dense mask."""
    documents, attention_mask = _read_documents(attention_mask, kv_length)
    pattern = find_pattern(mask_function) or _chunks_in_graph(attention_mask, kwargs)
    if pattern is not None:
        pattern = pattern._replace(documents=documents)
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
    used = end if pattern.causal and end is not None else kv_length
    window = pattern.window if pattern.window < used else 0
    kind = CAUSAL if pattern.causal else TO_BOTH_SIDES if window else BIDIRECTIONAL
    device = kwargs.get("device", "cpu")
    segments = _segments(pattern, kv_offset, used)
    seen = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    seen = None if seen is None else seen[:, kv_offset : kv_offset + used]
    if q_length == 1:
        seen, segments = _seen_by_one(seen, segments), None
        if pattern.causal and kwargs.get("allow_is_causal_skip") is False:  # see _is_expressible
            last = torch.arange(used, device=device)[None] >= (used - window if window else 0)
            seen, window = last if seen is None else seen & last, 0
    if segments is not None:
        if seen is not None:  # padding gets segments of its own, and the segments stay sorted
            padding = torch.where(seen.cumsum(-1) == 0, -1, PADDING)
            segments = torch.where(seen, segments, padding)
        if pattern.chunk is not None:
            window, kind = pattern.chunk[0], CHUNKS
        values = segments.to(torch.int32)
    elif seen is not None:
        values = seen.to(torch.uint8)
    elif window or pattern.causal:
        return torch.empty(used, window + 1, kind, 0, dtype=torch.uint8, device=device)
    else:
        return None
    return values[:, None, None].expand(batch_size, window + 1, kind, used)


def _is_expressible(
    pattern: Pattern, queries: int, keys: int, end: int | None, options: dict[str, Any]
) -> bool:
    """Whether a small tensor can replace the dense mask.

    Queries and keys must be aligned as in `attnzoo.attention`. A model that changes the mask does
    not allow skipping it. Transformers does not allow it either for one query with a static cache,
    whose mask becomes a key mask of the keys in use.
    """
    one_sided = pattern.chunk is not None or (pattern.window and not pattern.both_sides)
    if (pattern.causal and pattern.both_sides) or (one_sided and not pattern.causal):
        return False
    if pattern.causal:
        if end is None or not queries <= end <= keys:
            return False
        return options.get("allow_is_causal_skip") is not False or (queries == 1 and end < keys)
    allowed = options.get("allow_is_bidirectional_skip") is not False
    return allowed and (not pattern.window or queries == keys)


def _seen_by_one(seen: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """The keys that the only query sees, the last token."""
    if segments is None:
        return seen
    same_segment = segments == segments[:, -1:]
    return same_segment if seen is None else same_segment & seen


def is_causal(mask: Tensor | None, flag: bool) -> bool:
    """Whether a call with this mask is causal. ``flag`` is whether the module says that it is.

    The flag of some decoders is wrong, because the mask alone decides in eager attention.
    """
    if mask is None or mask.dtype not in (torch.uint8, torch.int32):
        return flag
    return mask.shape[2] not in (TO_BOTH_SIDES, BIDIRECTIONAL)


def read_mask(mask: Tensor | None, flag: bool, queries: int, keys: int) -> MaskLayout:
    """The arguments of `attnzoo.attention` for a mask from `make_mask` or of another origin.

    ``flag`` is whether the module says that it is causal.
    """
    causal = is_causal(mask, flag)
    if mask is None:
        if causal and queries != keys:
            raise ValueError(
                f"attention_mask must be given for a causal call with {queries} queries and {keys} "
                "keys, got None"
            )
        return MaskLayout(None, causal and queries > 1, None, None, 0, keys)
    if mask.dtype not in (torch.uint8, torch.int32):
        return MaskLayout(_other_mask(mask), False, None, None, 0, keys)
    window, kind, stop = mask.shape[1] - 1, mask.shape[2], mask.shape[3] or mask.shape[0]
    chunk = window if kind == CHUNKS else 0
    window = 0 if chunk else window
    if window and kind == TO_BOTH_SIDES:
        bounds: Window = (window, window)
        start = 0
    elif window:
        # The first query sees no key before ``start``.
        start = max(stop - queries - window + 1, 0)
        bounds = window if queries > 1 else None
    else:
        bounds, start = None, 0
    causal = causal and queries > 1
    if mask.shape[3] == 0:
        return MaskLayout(None, causal, bounds, None, start, stop)
    values = mask[:, :1, :1, start:]
    if mask.dtype == torch.uint8:
        return MaskLayout(values.view(torch.bool), causal, bounds, None, start, stop)
    ids = values[:, 0, 0]
    segments = ids if queries == stop - start else (ids[:, stop - start - queries :], ids)
    return MaskLayout(None, causal, bounds, segments, start, stop, chunk)


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
    held = _variables(function)
    if kind == "and":
        return _all_of(held.get("mask_functions", ()))
    if kind in ("window", "window to both sides") and _is_size(size := held.get("sliding_window")):
        return Pattern(window=size, both_sides=kind == "window to both sides")
    if kind == "chunk" and _is_size(size := held.get("chunk_size")) and "left_padding" in held:
        return Pattern(chunk=(size, held["left_padding"]))
    return None


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
    if not functions:
        return None
    pattern = Pattern()
    for function in functions:
        part = find_pattern(function)
        if part is None:
            return None
        for name, value in part._asdict().items():
            if not _is_set(value):
                continue
            # Two windows, chunks or packings have no common field.
            if name != "causal" and _is_set(getattr(pattern, name)):
                return None
            pattern = pattern._replace(**{name: value})
    return pattern


def _is_set(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value))


def _is_size(size: Any) -> TypeGuard[int]:
    return is_int(size) and size >= 1


def _variables(function: Any) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


def _code_of(factory: str, *args: Any) -> Any:
    """The code of the mask functions that a factory of transformers makes, if it exists."""
    make = getattr(masking_utils, factory, None)
    return None if make is None else make(*args).__code__


_ANY = torch.zeros(1, 1, dtype=torch.long)
_KINDS = {
    and_masks().__code__: "and",
    _code_of("sliding_window_overlay", 1): "window",
    _code_of("sliding_window_bidirectional_overlay", 1): "window to both sides",
    _code_of("chunked_overlay", 1, _ANY): "chunk",
}
_KINDS.pop(None, None)


def _segments(pattern: Pattern, first: int, used: int) -> Tensor | None:
    """The segment of each key, (B, keys) or (1, keys); None if there is only one."""
    documents = None if pattern.documents is None else pattern.documents[:, :used]
    if pattern.chunk is None:
        return None if documents is None else documents.clamp_min(0)
    size, left_padding = pattern.chunk
    at = torch.arange(first, first + used, device=left_padding.device)
    if documents is not None:
        return chunks_of(documents, at - documents, size)
    if first + used <= size:
        return None
    return (at - left_padding[:, None]) // size


def with_documents(starts: Tensor, visible: Tensor | None) -> Tensor:
    """An attention mask that shows the documents of a packed batch to `make_mask`, int32 (B, N).

    0 is a hidden token. Any other number is the index of the first token of the document, which is
    negative for a document whose first part is missing, plus a constant that makes it positive.
    Transformers itself passes bool masks on.
    """
    numbers = (starts + (ORIGIN + 1)).to(torch.int32)
    return numbers if visible is None else numbers.masked_fill(~visible, 0)


def _read_documents(mask: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The documents of visible tokens (B, keys), and the mask without them."""
    if mask is None or mask.dtype != torch.int32:
        return None, mask
    mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[-1]))
    return mask - (ORIGIN + 1), mask != 0


def chunks_of(documents: Tensor, positions: Tensor, size: int) -> Tensor:
    """Segment ids (B, N): the chunks of ``size`` positions of each document, ids (B, N)."""
    chunks = (positions // size).expand_as(documents)
    ids = torch.stack([documents, chunks.to(documents.dtype)])
    new = (ids[..., 1:] != ids[..., :-1]).any(0)
    return torch.nn.functional.pad(new.cumsum(-1), (1, 0))


def _dense(*args: Any, **kwargs: Any) -> Tensor | None:
    for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        kwargs[name] = False
    make: Any = sdpa_mask  # accepts a tensor q_offset, but its annotation does not say so
    return make(*args, **kwargs)


def _check_not_positional(config: Any) -> None:
    """Raises for variants that need positions, which unused keys of a static cache would change."""
    layers = (getattr(config, NAME, None) or {}).get("layers", {})
    for name, layer in layers.items():
        if get_variant(layer["variant"]).by_position:
            raise ValueError(
                f"{layer['variant']} ({name}) does not support a static cache that is compiled or "
                "has a mask of the model's own: use a dynamic cache"
            )
