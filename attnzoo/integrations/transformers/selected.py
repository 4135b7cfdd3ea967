"""The keys that a module selects for each query, as a mask.

The selection is the module's, the weights of the selected keys are the variant's. Modules of sparse
attention pass one of these to other attention functions than their own::

    indices         keys, (B, Nq, K) or (B, G, Nq, K) (DeepSeek sparse attention)
    block_indices   blocks of keys, (B, G, Nq, K) (MiniMax M3)

The heads of each of the G groups share a selection. Negative indices are padding. The selection may
include keys that the mask of the call hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.integrations.transformers.masks import Mask

NAMES = ("indices", "block_indices")


def with_selection(
    module: nn.Module, mask: Mask, heads: int, keys: int, kwargs: dict[str, Any]
) -> Mask:
    """The mask of a call with so many query heads and keys, without keys that are not selected.

    The selection becomes a dense mask, one bool per query and key.
    """
    indices, blocks = (kwargs.get(name) for name in NAMES)
    if indices is None and blocks is None:
        return mask
    layer = type(module).__name__
    if indices is not None and blocks is not None:
        raise ValueError(f"{layer} must pass indices or block_indices, got both")
    if indices is not None:
        if isinstance(indices, Tensor) and indices.dim() == 3:
            indices = indices[:, None]
        selected = _scattered(f"indices of {layer}", indices, mask.shape[2], heads, keys)
    else:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise ValueError(f"{layer} must have indexer.block_size, the keys of a block, got none")
        what, count = f"block_indices of {layer}", -(-keys // size)
        selected = _scattered(what, blocks, mask.shape[2], heads, count)
        selected = selected.repeat_interleave(size, -1)[..., :keys]
    if 1 < selected.shape[1] < heads:
        selected = selected.repeat_interleave(heads // selected.shape[1], 1)
    selected = selected[..., mask.start : mask.stop]
    other = mask.attn_mask
    if other is None:
        return mask._replace(attn_mask=selected)
    if other.dtype == torch.bool:
        return mask._replace(attn_mask=other & selected)
    return mask._replace(attn_mask=other.masked_fill(~selected, float("-inf")))


def _scattered(what: str, indices: Any, queries: int, heads: int, count: int) -> Tensor:
    """Bool (B, groups of heads, Nq, count): True at the indices."""
    fits = isinstance(indices, Tensor) and indices.dim() == 4 and indices.shape[2] == queries
    if not fits or indices.is_floating_point() or heads % indices.shape[1]:
        actual = type(indices).__name__
        if isinstance(indices, Tensor):
            actual = f"{tuple(indices.shape)} in {indices.dtype}"
        raise ValueError(
            f"{what} must be integers (B, G, {queries}, K) with {heads} heads divisible by G, got "
            f"{actual}"
        )
    shape = (*indices.shape[:3], count + 1)  # padding goes to one more column, which is left out
    at = indices.long()
    at = at.masked_fill(at < 0, count)
    selected = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    return selected.scatter_(-1, at, True)[..., :count]
