"""Which tokens of a sequence each rank has.

A sequence of N tokens is cut into equal chunks. With the layout "contiguous" there is one chunk per
rank, and rank r has chunk r. With "zigzag" there are two chunks per rank, and rank r of R has the
chunks r and 2R − 1 − r. Under causality all ranks then compute equally many scores.

Example with 2 ranks and 8 tokens:

    contiguous   rank 0: 0 1 2 3   rank 1: 4 5 6 7
    zigzag       rank 0: 0 1 6 7   rank 1: 2 3 4 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnzoo.core.checks import shown

Layout = Literal["zigzag", "contiguous"]
LAYOUTS = get_args(Layout)


@dataclass(frozen=True)
class Shards:
    """The shards of a sequence.

    Attributes:
        layout: "zigzag" or "contiguous".
        ranks: number of ranks, R.
        local: number of tokens of each rank.
    """

    layout: str
    ranks: int
    local: int

    @property
    def per_rank(self) -> int:
        """Number of chunks per rank."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def chunk(self) -> int:
        """Number of tokens per chunk."""
        return self.local // self.per_rank

    @property
    def total(self) -> int:
        """Number of tokens of the whole sequence, N."""
        return self.local * self.ranks

    def owned(self, rank: int) -> list[int]:
        """The chunks of a rank, in the order of its shard."""
        return [rank] if self.layout == "contiguous" else [rank, 2 * self.ranks - 1 - rank]

    def in_sequence(self, rank: int) -> list[slice]:
        """The positions in the sequence of each chunk of a rank."""
        return [slice(c * self.chunk, (c + 1) * self.chunk) for c in self.owned(rank)]

    def in_shard(self) -> list[slice]:
        """The positions in a shard of each of its chunks."""
        return [slice(i * self.chunk, (i + 1) * self.chunk) for i in range(self.per_rank)]

    def to_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Reorder a dimension from rank order (the shards of rank 0, 1, …) to sequence order."""
        if self.layout == "contiguous":
            return x
        order = [chunk for rank in range(self.ranks) for chunk in self.owned(rank)]
        return self._reorder(x, dim, sorted(range(len(order)), key=order.__getitem__))

    def to_ranks(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `to_sequence`."""
        if self.layout == "contiguous":
            return x
        order = [chunk for rank in range(self.ranks) for chunk in self.owned(rank)]
        return self._reorder(x, dim, order)

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The shard of a rank, from a tensor of the whole sequence."""
        return torch.cat(
            [x.narrow(dim, at.start, self.chunk) for at in self.in_sequence(rank)], dim
        )

    def _reorder(self, x: Tensor, dim: int, chunks: list[int]) -> Tensor:
        index = torch.tensor(chunks, device=x.device)
        dim %= x.dim()
        return x.unflatten(dim, (len(chunks), -1)).index_select(dim, index).flatten(dim, dim + 1)


def shards_of(layout: Any, ranks: int, local: int) -> Shards:
    """The shards of ``local`` tokens each, with a check of the layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {shown(layout)}")
    shards = Shards(layout, ranks, local)
    if local % shards.per_rank:
        raise ValueError(
            f"the number of tokens per rank must be even with layout 'zigzag', got {local}; "
            "attnzoo.distributed.shard pads a sequence"
        )
    return shards
