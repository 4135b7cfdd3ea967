"""Masks of torch.nn.MultiheadAttention (True = blocked) as masks of attnzoo (True = attend)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attnzoo.core.checks import has_values


def attended(
    padding: Tensor | None, mask: Tensor | None, is_causal: bool, need_weights: bool, q: Tensor,
    k: Tensor, num_heads: int, appended: int,
) -> tuple[Tensor | None, bool]:  # fmt: skip
    """attn_mask and is_causal for `attnzoo.attention`.

    Args:
        padding: key_padding_mask (B, Nk) of torch's layer.
        mask: its attn_mask, (Nq, Nk) or (B·H, Nq, Nk).
        need_weights: whether torch would return weights; it then ignores is_causal.
        q: (B, Q·H, Nq, D), Q queries per head.
        k: (B, Hkv, Nk, D), without the keys that the layer appends.
        num_heads: H.
        appended: the number of these keys. All queries see them.
    """
    (batch, _, length, _), keys = q.shape, k.shape[2]
    if is_causal and not appended and (mask is None or length == keys):
        # Torch ignores the hint if it returns weights, but variants may need to know it.
        mask = mask if need_weights else None
    elif is_causal:
        # is_causal would hide the appended keys, so it becomes a mask.
        is_causal = False
        if mask is None:
            mask = torch.ones(length, keys, dtype=torch.bool, device=q.device)
            mask = mask.triu(1 + keys - length)
    shapes = [(length, keys), (batch * num_heads, length, keys)]
    padding = attended_keys("key_padding_mask", padding, [(batch, keys)], appended)
    mask = attended_keys("attn_mask", mask, shapes, appended)
    if padding is not None:
        padding = padding[:, None, None]
    if mask is not None:
        mask = mask.unflatten(0, (batch, num_heads)) if mask.dim() == 3 else mask[None, None]
    return both_masks(padding, mask), is_causal


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
