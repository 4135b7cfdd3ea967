"""What a module needs of tensors and of sequences that are on several devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnzoo.core.checks import is_dtensor


def local(value: Any) -> Any:
    """The value; for a sharded tensor this rank's part."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def assign(x: Any, value: Tensor) -> None:
    """Sets x to the values of a tensor of its shape. A sharded x takes this rank's part of them.

    Nothing is communicated, because all ranks have the same ``value``.
    """
    if x.is_meta:
        return
    value = value.detach().to(x.device, x.dtype)
    with torch.no_grad():
        if is_dtensor(x):
            from torch.distributed.tensor import distribute_tensor

            # DTensor.copy_ does not support a dimension shorter than the number of ranks.
            value = distribute_tensor(value, x.device_mesh, x.placements, src_data_rank=None)
        local(x).copy_(local(value))


class Sharding(Protocol):
    """How sequences are sharded; see `attnzoo.distributed.shard_sequence`, which sets it."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Any:
        """`attnzoo.attention` over the whole sequence, on shards."""
        ...

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """The positions of the ``tokens`` tokens of a shard in the whole sequence."""
        ...

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensor of the whole sequence, from a shard."""
        ...

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a tensor of the whole sequence."""
        ...
