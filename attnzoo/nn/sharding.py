"""What a module needs of a sequence whose tokens are on several devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Sharding(Protocol):
    """How sequences are sharded; see `attnzoo.distributed.shard_sequence`, which sets it."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Any:
        """`attnzoo.attention` over the whole sequence, on shards."""
        ...

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """The positions of the ``tokens`` tokens of a shard in the whole sequence."""
        ...

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """The tensor of the whole sequence, from a shard."""
        ...

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The own shard of a tensor of the whole sequence."""
        ...
