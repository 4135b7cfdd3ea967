"""Counts the bytes that a rank sends in context_parallel_attention, and its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from attnzoo.distributed import context_parallel_attention
from benchmarks.harness.traffic import SentBytes
from helpers.memory import peak_of

WIDE = 256
BATCH, HEADS, KV_HEADS, LOCAL, DIM, VALUE_DIM = 1, 6, 2, 8, 4, 6


def sent(rank: int, variant: str, method: Any) -> tuple[int, int, int]:
    """The bytes that a rank sends in forward and in backward, and its messages in the forward."""
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(rank)
    q, k, v = (
        torch.randn(BATCH, heads, LOCAL, dim, requires_grad=True)
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    )
    with SentBytes(rank, ranks) as forward:
        out = context_parallel_attention(
            q, k, v, variant, mesh=mesh, method=method, enable_gqa=True
        )  # type: ignore[call-overload]
    with SentBytes(rank, ranks) as backward:
        out.sum().backward()
    return forward.bytes, backward.bytes, forward.messages


CALLS = (
    ("softmax", "all_gather"), ("softmax", "ulysses"), ("softmax", "ring"),
    ("adaptive_temperature", "ring"), ("entmax", "ring"), ("elu", "ring"),
)  # fmt: skip


def all_sent(rank: int) -> dict[tuple[str, str], tuple[int, int, int]]:
    """What `sent` returns, by variant and method."""
    return {(variant, method): sent(rank, variant, method) for variant, method in CALLS}


def peak(rank: int, method: Any, tokens: int) -> int:
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
