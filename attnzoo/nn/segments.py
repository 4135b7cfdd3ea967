"""Positions in packed and in padded sequences: from the start of a segment or after padding."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from attnzoo.core.arguments import check_ids
from attnzoo.core.checks import check_dense, is_readable


def restarted(segment_ids: Tensor) -> Tensor:
    """The position of each token in its segment, (B, N), for adjacent equal ids (B, N)."""
    at = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand(segment_ids.shape)
    starts = segment_ids.new_ones(segment_ids.shape, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return at - at.masked_fill(~starts, 0).cummax(dim=1).values


def check_key_mask(mask: Any, tokens: Tensor, start: int) -> None:
    """Raises unless the mask is a bool key mask of the ``start + N`` keys of tokens (B, N)."""
    check_dense("attn_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool (True = attend), got {mask.dtype}")
    shapes = [(batch, 1, 1, start + tokens.shape[1]) for batch in sorted({len(tokens), 1})]
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, reversed(shapes)))
        raise ValueError(
            f"attn_mask must be a key mask of shape {allowed} for tokens {tuple(tokens.shape)}, "
            f"got {tuple(mask.shape)}"
        )


def is_key_mask(mask: Any, tokens: Tensor) -> TypeGuard[Tensor]:
    """Whether a mask is a bool key mask (B, 1, 1, Nk) or (1, 1, 1, Nk) for tokens (B, N).

    If it is not, the attention says what is wrong with the mask.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return False
    fits = mask.shape[0] in (1, len(tokens)) and mask.device == tokens.device
    return fits and mask.shape[1] == mask.shape[2] == 1 and mask.shape[3] > 0


def first_visible(key_mask: Tensor) -> Tensor:
    """The index of the first visible key, (B, 1), for a key mask (B, 1, 1, Nk); 0 if none is."""
    return key_mask[:, 0, 0].int().argmax(-1, keepdim=True)


def check_segments(segment_ids: Any, tokens: Tensor, start: int) -> None:
    """Raises unless the ids are (B, start + N) for tokens (B, N), and equal ids are adjacent.

    Ids that are not readable are not checked for adjacency.
    """
    check_shape(segment_ids, tokens, start)
    if not is_readable(segment_ids):
        return
    ordered = segment_ids.sort(dim=1).values
    runs, distinct = (x.diff(dim=1).count_nonzero(dim=1) for x in (segment_ids, ordered))
    if bool((runs != distinct).any()):
        row = int((runs != distinct).nonzero()[0])
        raise ValueError(
            f"segment_ids must be equal only in adjacent tokens, got {segment_ids[row].tolist()} "
            f"in row {row}"
        )


def check_shape(segment_ids: Any, tokens: Tensor, start: int) -> None:
    """Raises unless the ids are int (B, start + N) on the device of tokens (B, N)."""
    check_ids("segment_ids", segment_ids)
    expected = (tokens.shape[0], start + tokens.shape[1])
    if segment_ids.shape != expected:
        cached = ", all tokens so far," if start else ""
        raise ValueError(
            f"segment_ids must have shape {expected}{cached} for tokens {tuple(tokens.shape)}, got "
            f"{tuple(segment_ids.shape)}"
        )
    if segment_ids.device != tokens.device:
        raise ValueError(
            f"segment_ids must be on the device of tokens {tokens.device}, got {segment_ids.device}"
        )
