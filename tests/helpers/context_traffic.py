"""Counts the bytes that a rank sends in context_parallel_attention, and its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.distributed import context_parallel_attention
from helpers.memory import peak_of

WIDE = 256
BATCH, HEADS, KV_HEADS, LOCAL, DIM, VALUE_DIM = 1, 6, 2, 8, 4, 6


class Sent(TorchDispatchMode):
    """Bytes sent by this rank, counted from the operators of torch.distributed.

    A gather sends the shard to every other rank; a reduce-scatter sends to every other rank its
    part; an all-to-all the parts for others. Small exchanges (under ``least`` bytes, such as
    checks) are counted apart.
    """

    def __init__(self, rank: int, ranks: int, least: int = 64) -> None:
        super().__init__()
        self.rank, self.ranks, self.least = rank, ranks, least
        self.bytes = self.small = 0
        self.rounds = 0  # of point-to-point messages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("_c10d_functional::") and isinstance(args[0], Tensor):
            size = args[0].numel() * args[0].element_size()
            if "all_gather" in name:
                self._add(size * (self.ranks - 1))
            elif "reduce_scatter" in name:
                self._add(size * (self.ranks - 1) // self.ranks)
            elif "all_to_all" in name:
                sizes = args[2]
                self._add((sum(sizes) - sizes[self.rank]) * args[0].element_size())
            elif "all_reduce" in name:
                self.small += size
        elif name == "c10d::send":
            self.rounds += 1
            self._add(sum(x.numel() * x.element_size() for x in args[0]))
        return func(*args, **(kwargs or {}))

    def _add(self, size: int) -> None:
        if size < self.least * self.ranks:
            self.small += size
        else:
            self.bytes += size


def sent(rank: int, variant: str, method: str, params: dict[str, Any]) -> tuple[int, int, int]:
    """The bytes that a rank sends in forward and in backward, and its messages in the forward."""
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(rank)
    q, k, v = (
        torch.randn(BATCH, heads, LOCAL, dim, requires_grad=True)
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    )
    with Sent(rank, ranks) as forward:
        out = context_parallel_attention(
            q, k, v, variant, mesh=mesh, method=method, enable_gqa=True, **params
        )  # type: ignore[call-overload]
    with Sent(rank, ranks) as backward:
        out.sum().backward()
    return forward.bytes, backward.bytes, forward.rounds


def peak(rank: int, method: str, tokens: int) -> int:
    """The largest number of bytes in new tensors during a forward without gradients.

    The keys are wide and the values narrow, so that the memory is mostly that of the keys.
    """
    local = tokens // dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    q, k = torch.randn(2, 1, 1, local, WIDE).unbind()
    return peak_of(
        lambda: context_parallel_attention(
            q, k, torch.randn(1, 1, local, 16), mesh=mesh, method=method, layout="contiguous"
        )  # type: ignore[call-overload]
    )
