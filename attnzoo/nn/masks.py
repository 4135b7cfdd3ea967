"""Masks of torch.nn.MultiheadAttention (True = blocked) as masks of attnzoo (True = attend)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attnzoo.core.checks import has_values


def attended_keys(
    name: str, mask: Tensor | None, shapes: list[tuple[int, ...]], extra: int
) -> Tensor | None:
    """A mask in attnzoo's convention (True = attend), with ``extra`` visible keys appended."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True = blocked) or float, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return F.pad(~mask, (0, extra), value=True)
    # Torch's encoder layers turn bool masks into float masks of 0 and −∞. These become bool again,
    # except where the values cannot be read, as in a compiled graph.
    visible = as_bool(mask, mask == float("-inf"))
    return F.pad(mask, (0, extra)) if visible is None else F.pad(visible, (0, extra), value=True)


def as_bool(mask: Tensor, hidden: Tensor) -> Tensor | None:
    """The keys that a float mask does not hide, if it adds nothing to their scores; else None.

    Also None if the values of the mask cannot be read, or if it needs a gradient.
    """
    if torch.is_grad_enabled() and mask.requires_grad:
        return None
    if has_values(mask) and bool((hidden | (mask == 0)).all()):
        return ~hidden
    return None


def both_masks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Combines two masks; either may be None."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == b.dtype == torch.bool:
        return a & b
    if torch.bool not in (a.dtype, b.dtype):
        return a + b
    visible, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(visible, bias, float("-inf"))
