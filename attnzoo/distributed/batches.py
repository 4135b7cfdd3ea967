"""Shares out tensors of whole sequences over ranks, and puts shards together again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnzoo.core.checks import check_dense, is_int, is_number, plain, shown
from attnzoo.core.collectives import all_gather
from attnzoo.core.rank_agreement import agreed, described, ranks_of
from attnzoo.distributed.layout import Layout, Shards, shards_of


def shard(
    x: Tensor, mesh: DeviceMesh, dim: int = 1, *, layout: Layout = "zigzag",
    fill: float | None = None,
) -> Tensor:  # fmt: skip
    """The shard of this rank of a tensor that every rank has.

    Args:
        x: A tensor with N tokens along ``dim``, equal on all ranks.
        mesh: A one-dimensional DeviceMesh with R ranks.
        dim: The dimension of the tokens.
        layout: As for `context_parallel_attention`.
        fill: The value of padding at the end, if R ("zigzag": 2R) does not divide N: a number that
            the dtype of x can hold. None: raise.

    Returns:
        The tokens of this rank, ⌈N/R⌉ of them (an even number with "zigzag").

    Raises:
        ValueError, TypeError: N does not divide and ``fill`` is None, or an argument is wrong.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from attnzoo.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> shard(torch.arange(3)[None], mesh, fill=-1)
        tensor([[ 0,  1,  2, -1]])
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(mesh)
    _check_dim(x, dim)
    if fill is not None:
        _check_fill(fill, x.dtype)
    step = shards_of(layout, ranks.count, 0).per_rank * ranks.count
    missing = -x.shape[dim] % step
    if missing:
        if fill is None:
            raise ValueError(
                f"x must have a multiple of {step} tokens along dim {dim}, got {x.shape[dim]}; "
                "pass fill to pad it"
            )
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat([x, x.new_full(shape, fill)], dim=dim)
    return shards_of(layout, ranks.count, x.shape[dim] // ranks.count).shard(x, ranks.rank, dim)


def unshard(
    x: Tensor, mesh: DeviceMesh, dim: int = 1, *, layout: Layout = "zigzag",
    length: int | None = None,
) -> Tensor:  # fmt: skip
    """The tensor of the whole sequence, from the shard of each rank. Gradients are summed.

    Args:
        x: The shard of this rank.
        mesh, dim, layout: As for `shard`.
        length: The number of tokens without the padding of `shard`; None keeps it.

    Returns:
        x of the whole sequence: R times as many tokens along ``dim``, or ``length`` of them.

    Raises:
        ValueError, TypeError: An argument is wrong, or differs between ranks.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from attnzoo.distributed import shard, unshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> local = shard(torch.arange(3)[None], mesh, fill=-1)
        >>> unshard(local, mesh, length=3)
        tensor([[0, 1, 2]])
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(mesh)

    def check() -> tuple[Shards, str]:
        _check_dim(x, dim)
        shards = shards_of(layout, ranks.count, x.shape[dim])
        return shards, described({"x": x, "dim": dim, "layout": layout, "length": length})

    shards = agreed("unshard", ranks, check)
    sequence = shards.to_sequence(all_gather(x, dim, ranks), dim)
    if length is None:
        return sequence
    if not is_int(length) or not 0 <= length <= shards.total:
        raise ValueError(f"length must be from 0 to {shards.total}, got {shown(length)}")
    return sequence.narrow(dim, 0, length)


def _check_fill(fill: Any, dtype: torch.dtype) -> None:
    value = plain(fill)
    if not isinstance(value, bool) and not is_number(value):
        raise TypeError(f"fill must be a number or None, got {shown(fill)}")
    if dtype.is_floating_point or dtype.is_complex:
        fits = not torch.finfo(dtype).max < abs(value) < math.inf
    else:
        info = None if dtype == torch.bool else torch.iinfo(dtype)
        low, high = (0, 1) if info is None else (info.min, info.max)
        fits = low <= value <= high and int(value) == value
    if not fits:
        raise ValueError(f"fill must be a value of x's dtype {dtype}, got {shown(fill)}")


def _check_dim(x: Any, dim: Any) -> None:
    check_dense("x", x)
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of x {tuple(x.shape)}, got {shown(dim)}")


@dataclass(frozen=True)
class Batch:
    """The tokens of a batch on one rank.

    Attributes:
        tokens: int (B, n).
        positions: int (n,), their positions in the sequence.
        labels: int64 (B, n), the token that follows each token; -100 where there is none.
        mask: bool (B, n), False at padding.
        count: the number of labels other than -100 on all ranks.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    mask: Tensor
    count: int

    @property
    def key_mask(self) -> Tensor:
        """``mask`` as an ``attn_mask``, (B, 1, 1, n)."""
        return self.mask[:, None, None]

    @property
    def transformers(self) -> dict[str, Any]:
        """The keyword arguments of a causal language model of transformers.

        Its loss is then the rank's part of the mean over the labels of all ranks. Add up the losses
        to get the mean.
        """
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions.expand_as(self.tokens),
            # Without a mask, transformers takes a gap in the positions for another document.
            "attention_mask": self.mask.long(),
            "labels": self.labels,
            "shift_labels": self.labels,
            "num_items_in_batch": self.count,
            "use_cache": False,
        }


IGNORED = -100  # a label without a loss


def shard_batch(
    tokens: Tensor, mesh: DeviceMesh, *, layout: Layout = "zigzag", labels: Tensor | None = None
) -> Batch:
    """Shard a batch of token sequences for language modelling.

    Args:
        tokens: int (B, N), equal on all ranks.
        mesh, layout: As for `shard`. Sequences are padded if N does not divide.
        labels: int64 (B, N), the token that follows each token, or -100; None: the next token.

    Returns:
        A `Batch`: this rank's tokens, their positions, labels and mask, each (B, N/R), and the
        number of labels on all ranks.

    Raises:
        ValueError, TypeError: An argument is wrong.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from attnzoo.distributed import shard_batch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> batch = shard_batch(torch.tensor([[5, 6, 7]]), mesh)
        >>> batch.tokens, batch.labels, batch.count
        (tensor([[5, 6, 7, 0]]), tensor([[   6,    7, -100, -100]]), 2)
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(mesh)
    check_dense("tokens", tokens)
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be (B, N), got {tuple(tokens.shape)}")
    if not tokens.shape[1]:
        raise ValueError(f"tokens must hold at least one token per row, got {tuple(tokens.shape)}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be int, got {tokens.dtype}")
    if labels is None:
        labels = torch.nn.functional.pad(tokens[:, 1:].long(), (0, 1), value=IGNORED)
    check_dense("labels", labels)
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}")
    if labels.shape != tokens.shape:
        raise ValueError(
            f"labels must have the shape of tokens {tuple(tokens.shape)}, got {tuple(labels.shape)}"
        )
    local = shard(tokens, mesh, layout=layout, fill=0)
    shards = shards_of(layout, ranks.count, local.shape[1])
    all_positions = torch.arange(shards.total, device=tokens.device)
    positions = shards.shard(all_positions, ranks.rank, 0)
    return Batch(
        local,
        positions,
        shard(labels, mesh, layout=layout, fill=IGNORED),
        (positions < tokens.shape[1]).expand_as(local),
        int((labels != IGNORED).sum()),
    )
