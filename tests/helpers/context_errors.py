"""Mistakes in calls of context_parallel_attention, made on the ranks of a test."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from attnzoo.distributed import context_parallel_attention, unshard


def _call(rank: int, tokens: int = 8, heads: int = 2, **options: object) -> str:
    """The error of a call as text."""
    mesh = options.pop("mesh", None) or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = torch.randn(3, 1, heads, tokens, 4).unbind()
    try:
        context_parallel_attention(q, k, v, mesh=mesh, **options)  # type: ignore[arg-type]
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def different_lengths(rank: int) -> str:
    return _call(rank, tokens=8 + 2 * rank)


def lengths_that_differ_later(rank: int) -> str:
    assert _call(rank) == "no error"
    return different_lengths(rank)


def odd_length(rank: int) -> str:
    return _call(rank, tokens=7)


def a_mistake_on_one_rank(rank: int) -> str:
    return _call(rank, **({"alibi": torch.zeros(3)} if rank == 1 else {}))


def different_variants(rank: int) -> str:
    return _call(rank, variant=["softmax", "ssmax"][rank])


def unsupported_variant(rank: int) -> str:
    return _call(rank, variant="topk", top_k=3, method="ring")


def unsupported_form(rank: int) -> str:
    return _call(rank, variant="stick_breaking", is_causal=True, method="ring")


def two_dimensional_mesh(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    return _call(rank, mesh=mesh)


def no_mesh(rank: int) -> str:
    return _call(rank, mesh="cpu")


def too_few_heads(rank: int) -> str:
    return _call(rank, heads=1, method="ulysses")


def scalar_mask_on_one_rank(rank: int) -> str:
    return _call(rank, **({"attn_mask": torch.tensor(True)} if rank == 0 else {}))


def whole_key_mask(rank: int) -> str:
    return _call(rank, attn_mask=torch.ones(1, 1, 1, 16, dtype=torch.bool))


def gradients_on_one_rank(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (2,))
    q = torch.randn(1, 2, 8, 4, requires_grad=rank == 0)
    try:
        context_parallel_attention(q, q, q, mesh=mesh)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def backend_for_some_chunks(rank: int) -> str:
    # sdpa runs the chunk of rank 0, which is aligned, and not that of rank 1.
    return _call(
        rank, method="all_gather", layout="contiguous", backend="sdpa", window=3, is_causal=True
    )


def length_above_a_limit(rank: int) -> str:
    # Each rank has 8 tokens, and rank 0 would not need more.
    return _call(rank, variant="cosformer", max_length=8, method="all_gather", is_causal=True)


def maxima_of_shards(rank: int) -> str:
    return _call(rank, return_max_logits=True)


def different_shards(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (2,))
    try:
        unshard(torch.zeros(1, 4 + 2 * rank), mesh)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


MISTAKES = (
    different_lengths, lengths_that_differ_later, different_variants, odd_length,
    a_mistake_on_one_rank, unsupported_variant, unsupported_form, two_dimensional_mesh, no_mesh,
    too_few_heads, scalar_mask_on_one_rank, whole_key_mask, gradients_on_one_rank,
    backend_for_some_chunks, length_above_a_limit, maxima_of_shards, different_shards,
)  # fmt: skip


def all_mistakes(rank: int) -> dict[str, str]:
    """The error of each mistake by its name. After an error the ranks can go on."""
    return {mistake.__name__: mistake(rank) for mistake in MISTAKES}


def a_rank_that_ends(rank: int) -> str:
    assert _call(rank, method="ring") == "no error"
    if rank == 1:
        os._exit(3)
    time.sleep(0.5)
    return _call(rank, method="ring")
