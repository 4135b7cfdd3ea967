"""shard_sequence(): modules whose inputs are shards of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attnzoo.core.checks import check_bool
from attnzoo.core.collectives import Ranks
from attnzoo.core.rank_agreement import ranks_of
from attnzoo.distributed.batches import unshard
from attnzoo.distributed.context import Method, check_method, context_parallel_attention
from attnzoo.distributed.gradients import Reducer
from attnzoo.distributed.layout import Layout, shards_of
from attnzoo.nn import Attention, Transformer

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class SequenceSharding:
    """The `attnzoo.nn.sharding.Sharding` that `shard_sequence` sets."""

    mesh: DeviceMesh
    method: Method
    layout: Layout

    def attention(self, q: Tensor, k: Tensor, v: Tensor, variant: str, **arguments: Any) -> Any:
        return context_parallel_attention(
            q, k, v, variant, mesh=self.mesh, method=self.method, layout=self.layout, **arguments
        )

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        ranks = self._ranks
        shards = shards_of(self.layout, ranks.count, tokens)
        return shards.shard(torch.arange(shards.total, device=device), ranks.rank, 0)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return unshard(x, self.mesh, dim, layout=self.layout)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        ranks = self._ranks
        return shards_of(self.layout, ranks.count, x.shape[dim] // ranks.count).shard(
            x, ranks.rank, dim
        )

    @property
    def _ranks(self) -> Ranks:
        return ranks_of(self.mesh)


def shard_sequence(
    module: ModuleT,
    mesh: DeviceMesh,
    method: Method = "auto",
    *,
    layout: Layout = "zigzag",
    reduce_gradients: bool = True,
) -> ModuleT:
    """Make a module work on shards of a sequence, in place.

    Every `attnzoo.nn.Attention` in it then calls `context_parallel_attention`, and a `Transformer`
    gives its tokens their positions in the whole sequence. Layers that work on each token
    alone need no change.

    Args:
        module: An `Attention`, a wrapper of one, a `MultiheadAttention` or `Transformer`, a model
            converted by `attnzoo.integrations.transformers`, or a module that contains these. Its
            parameters are equal on all ranks, or sharded by FSDP2.
        mesh: A one-dimensional DeviceMesh: the ranks that share a sequence.
        method: As for `context_parallel_attention`.
        layout: As for `context_parallel_attention`.
        reduce_gradients: Whether the backward sums the gradient of each parameter over the mesh. A
            rank's own gradient is a partial sum. Parameters that FSDP2 shards are left to it: give
            ``fully_shard`` a mesh that contains these ranks.

    Returns:
        The module itself.

    Raises:
        ValueError: The module has no attention of attnzoo, or another one besides, which would see
            only its own shard.
        TypeError: mesh is not a DeviceMesh.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from attnzoo.distributed import shard_batch, shard_sequence
        >>> from attnzoo.nn import Transformer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = shard_sequence(Transformer(100, 32, 4, 2, "ssmax"), mesh)
        >>> batch = shard_batch(torch.randint(100, (2, 9)), mesh)
        >>> model(batch.tokens, attn_mask=batch.key_mask).shape
        torch.Size([2, 10, 100])
        >>> dist.destroy_process_group()

    Notes:
        Caches and ``need_weights`` raise. The loss of each rank must be its part of the mean over
        all ranks: the sum of its losses divided by `Batch.count`. Every rank must call backward.
        ``reduce_gradients`` is for backward; `torch.autograd.grad` returns a rank's partial sums.
        Call `Attention.shard_heads` before this function, not after it. Layers that mix tokens
        without attention, such as convolutions, are not recognized and see only their own shard.
    """
    ranks = ranks_of(mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    check_method(method)
    shards_of(layout, ranks.count, 0)
    check_bool("reduce_gradients", reduce_gradients)
    _check_attention(module)
    sharding = SequenceSharding(mesh, method, layout)
    for part in module.modules():
        if isinstance(part, (Attention, Transformer)):
            part.sharding = sharding
    if reduce_gradients and ranks.count > 1:
        Reducer(module, ranks)
    return module


def _check_attention(module: nn.Module) -> None:
    """Raise unless every attention in the module is one of attnzoo."""
    if not any(isinstance(part, Attention) for part in module.modules()):
        raise ValueError(
            f"module must contain an attnzoo.nn.Attention, got {type(module).__name__}; replace or "
            "convert its attention first"
        )
    for name, part in module.named_modules():
        if "attention" not in type(part).__name__.lower():
            continue
        if not any(isinstance(inner, Attention) for inner in part.modules()):
            raise ValueError(
                f"module's {name} is a {type(part).__name__} without an attnzoo.nn.Attention, "
                "which would see only its own shard: replace or convert it first"
            )
