"""Mistakes give one clear error on every rank, and no rank waits forever."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import context_errors as made
from helpers.ranks import on_ranks

EQUAL = "ValueError: context_parallel_attention must be called with equal arguments on all ranks"
PARTS = {
    made.different_lengths: (EQUAL, "(1, 2, 8, 4)", "(1, 2, 10, 4)"),
    made.lengths_that_differ_later: (EQUAL, "(1, 2, 8, 4)", "(1, 2, 10, 4)"),
    made.different_variants: (EQUAL, "'softmax'", "'ssmax'"),
    made.odd_length: ("ValueError", "must be even with layout 'zigzag', got 7"),
    made.a_mistake_on_one_rank: ("alibi must have one slope per query head",),
    made.unsupported_variant: ("method 'ring' does not support", "topk selects keys"),
    made.unsupported_form: ("method 'ring' does not", "stick_breaking has no pairwise or linear"),
    made.two_dimensional_mesh: ("mesh must have one dimension, got shape (1, 2)", "mesh['"),
    made.no_mesh: ("TypeError: mesh must be a DeviceMesh, got str",),
    made.scalar_mask_on_one_rank: ("attn_mask must be a key mask",),
    made.whole_key_mask: ("attn_mask must be a key mask (…, 1, 8) of the shard",),
    made.gradients_on_one_rank: (EQUAL, "(1, 2, 8, 4) with gradient"),
    made.backend_for_some_chunks: ("ValueError", "backend 'sdpa' cannot run 'softmax' here"),
    made.length_above_a_limit: ("ValueError", "max_length=8 is below the length 16"),
    made.maxima_of_shards: ("ValueError: return_max_logits must be False for a sharded sequence",),
    made.different_shards: ("ValueError: unshard must be called with equal arguments", "(1, 6)"),
    made.too_few_heads: ("at least as many query heads as ranks, got 1 heads and 2 ranks",),
}


@pytest.fixture(scope="module")
def errors() -> list[Any]:
    """The errors of each rank, by mistake."""
    return on_ranks(2, made.all_mistakes, seconds=120)


@pytest.mark.parametrize("mistake", made.MISTAKES, ids=lambda mistake: mistake.__name__)
def test_every_rank_raises(mistake: Any, errors: list[Any]) -> None:
    for of_rank in errors:
        assert isinstance(of_rank, dict), of_rank
        for part in PARTS[mistake]:
            assert part in of_rank[mistake.__name__]


@pytest.mark.slow
def test_a_rank_that_ends_stops_the_others() -> None:
    first, second = on_ranks(2, made.a_rank_that_ends, seconds=60)
    assert first.startswith("RuntimeError"), first
    assert second == "", second
