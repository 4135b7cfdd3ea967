"""Collectives that carry gradients, and the exchange of tensors around a ring.

The gradients of the shards that an `all_gather` joins are summed over the ranks, because every rank
may have used them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# They return their results. The public collectives write into tensors of the caller.
# torch 2.13 renamed these, and warns of the old names.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks of a one-dimensional mesh. ``rank``: the number of this rank among them."""

    mesh: DeviceMesh
    rank: int
    count: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return joined(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (dout,) = grad_outputs
        return _wait(_reduce_scatter(dout.contiguous(), "sum", 0, ctx.group)), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _wait(funcol.all_to_all_single(x, received, sent, group))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (dout,) = grad_outputs
        received, sent = ctx.sizes
        back = funcol.all_to_all_single(dout.contiguous(), sent, received, ctx.group)
        return _wait(back), None, None, None


def _wait(x: Tensor) -> Tensor:
    return funcol.wait_tensor(x)


def all_gather(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Join the shards of all ranks along a dimension, in the order of the ranks.

    Bytes sent per rank: (R − 1) · size of x; as many for the gradient.
    """
    if ranks.count == 1:
        return x
    # Gloo has no bool, and the shards are joined along the first dimension.
    dtype = x.dtype
    moved = (x.to(torch.uint8) if dtype == torch.bool else x).movedim(dim, 0)
    return _AllGather.apply(moved, ranks.group).movedim(0, dim).to(dtype)


def all_to_all(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Ranks
) -> list[Tensor]:
    """Send ``pieces[r]`` to rank r, and return what each rank sent to this one.

    ``shapes[r]`` is the shape of the tensor from rank r. Bytes sent per rank: those of the pieces
    for other ranks.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    if ranks.count > 1:
        sent = [piece.numel() for piece in pieces]
        flat = _AllToAll.apply(flat, sizes, sent, ranks.group)
    return [x.view(*shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def all_reduce(x: Tensor, how: Literal["sum", "max"], ranks: Ranks) -> Tensor:
    """The sum, or the largest entry, over all ranks; without gradients."""
    return x if ranks.count == 1 else reduced(x, how, ranks.group)


def reduced(x: Tensor, how: str, group: dist.ProcessGroup | str) -> Tensor:
    """x combined over a group, or over the group of that name; without gradients."""
    return _wait(funcol.all_reduce(x, how, cast(Any, group)))


def joined(x: Tensor, group: dist.ProcessGroup | str) -> Tensor:
    """The tensors of all ranks, joined along the first dimension; without gradients."""
    return _wait(_gather(x.contiguous(), 0, cast(Any, group)))


class Exchange:
    """Sends tensors to the next rank; ``wait()`` returns those of the previous one.

    ``into``: where the arriving tensors are written; None allocates memory.
    """

    def __init__(
        self, tensors: Sequence[Tensor], ranks: Ranks, into: list[Tensor] | None = None
    ) -> None:
        group, here, count = ranks.group, ranks.rank, ranks.count
        after, before = ((here + step) % count for step in (1, -1))
        after, before = (dist.get_global_rank(group, r) for r in (after, before))
        self.sent = [x.contiguous() for x in tensors]  # kept until they have arrived
        self.received = into or [torch.empty_like(x) for x in self.sent]
        sends = [dist.P2POp(dist.isend, x, after, group) for x in self.sent]
        receives = [dist.P2POp(dist.irecv, x, before, group) for x in self.received]
        self.work = dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> list[Tensor]:
        for work in self.work:
            work.wait()
        return self.received


def circulate(tensors: Sequence[Tensor], ranks: Ranks) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Pass tensors of equal shapes around the ring; yield (rank they came from, tensors).

    The tensors of this rank come first. The next ones travel while the caller works on
    these. Bytes sent per rank: (R − 1) · size of the tensors.
    """
    held: Sequence[Tensor] = tensors
    spare: list[Tensor] | None = None  # tensors that have been sent on, to be overwritten
    for step in range(ranks.count):
        coming = Exchange(held, ranks, spare) if step < ranks.count - 1 else None
        yield (ranks.rank - step) % ranks.count, held
        if coming is not None:
            spare = None if step == 0 else list(held)
            held = coming.wait()
