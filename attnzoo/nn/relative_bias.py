"""T5's learned bias by relative position, as the table of `attnzoo.attention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from attnzoo.core.checks import (
    check_bool,
    check_device_and_dtype,
    check_sizes,
    is_int,
    shown,
)


class RelativeBias(nn.Module):
    """A learned bias of the scores by relative position, shared by positions far away (T5).

    The relative position p_j − p_i of key j and query i selects one of ``num_buckets`` learned
    numbers per head. Keys before and after the query have half of the buckets each. On each side,
    half of the buckets hold one position each, the nearest. The others hold ranges of positions,
    whose lengths grow in proportion to the distance, up to ``max_distance``.

    Args:
        num_heads: H.
        num_buckets: number of learned values per head; even if ``bidirectional``.
        max_distance: the distance from which on all positions share a bucket.
        bidirectional: whether keys after the query have buckets. If False, they have the bucket of
            position 0, and all others belong to keys before it; for causal calls.
        device, dtype: of the weight.

    Attributes:
        weight: (num_buckets, H), initially 0, so that a model starts without the bias. It has the
            layout of ``relative_attention_bias.weight`` of T5 in transformers.

    Returns:
        The table (H, 2·max_distance + 1), for ``relative_bias`` of `attnzoo.attention`. The weight
        gets its gradient through the table. `tiled`, `flash` and `decode` build no (Nq, Nk) matrix;
        `flash` needs a buffer of (B, H, Nq, 2·max_distance + 1) fp32 numbers for the gradient.
        Layers may share one module, as in T5 and in `Transformer` with ``positions="t5"``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Example:
        >>> import torch, attnzoo
        >>> bias = attnzoo.nn.RelativeBias(num_heads=8)
        >>> q, k, v = torch.randn(3, 1, 8, 500, 64)
        >>> out = attnzoo.attention(q, k, v, "ssmax", relative_bias=bias())
        >>> bias().shape, bias.weight.shape
        (torch.Size([8, 257]), torch.Size([32, 8]))

    References:
        Raffel et al. 2020, arXiv:1910.10683, section 2.1. The boundaries of the buckets are those
        of the authors' code, computed in fp32.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_device_and_dtype(device, dtype)
        check_sizes(num_heads=num_heads)
        self.bidirectional = check_bool("bidirectional", bidirectional)
        least = 4 if self.bidirectional else 2
        if not is_int(num_buckets) or num_buckets < least:
            raise ValueError(
                f"num_buckets must be an int of at least {least}, got {shown(num_buckets)}"
            )
        if self.bidirectional and num_buckets % 2:
            raise ValueError(f"num_buckets must be even with bidirectional, got {num_buckets}")
        exact = num_buckets // least
        if not is_int(max_distance) or max_distance <= exact:
            raise ValueError(
                f"max_distance must be an int above {exact}, the number of buckets for single "
                f"positions, got {shown(max_distance)}"
            )
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets the weight to 0, also after ``to_empty``."""
        nn.init.zeros_(self.weight)

    def buckets(self) -> Tensor:
        """The bucket of each relative position −max_distance … max_distance, int64."""
        position = torch.arange(
            -self.max_distance, self.max_distance + 1, device=self.weight.device
        )
        side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        after = (position > 0).long() * side if self.bidirectional else torch.zeros_like(position)
        away = position.abs() if self.bidirectional else -position.clamp(max=0)
        exact = side // 2
        growth = torch.log(away.clamp(min=1).float() / exact)
        growth = growth / math.log(self.max_distance / exact) * (side - exact)
        shared = (exact + growth.long()).clamp(max=side - 1)
        return after + torch.where(away < exact, away, shared)

    def forward(self) -> Tensor:
        return self.weight[self.buckets()].mT

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )
