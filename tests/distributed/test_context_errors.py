"""Mistakes give one clear error on every rank, and no rank waits forever."""

from __future__ import annotations

import pytest

from helpers import context_errors as made
from helpers.ranks import on_ranks

EQUAL = "ValueError: context_parallel_attention must be called with equal arguments on all ranks"


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        (made.different_lengths, (EQUAL, "(1, 2, 8, 4)", "(1, 2, 10, 4)")),
        (made.lengths_that_differ_later, (EQUAL, "(1, 2, 8, 4)", "(1, 2, 10, 4)")),
        (made.different_variants, (EQUAL, "'softmax'", "'ssmax'")),
        (made.odd_length, ("ValueError", "must be even with layout 'zigzag', got 7")),
        (made.a_mistake_on_one_rank, ("alibi must have one slope per query head",)),
        (made.unsupported_variant, ("method 'ring' does not support", "topk selects keys")),
        (made.two_dimensional_mesh, ("mesh must have one dimension, got shape (1, 2)", "mesh['")),
        (made.no_mesh, ("TypeError: mesh must be a DeviceMesh, got str",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_rank_raises(mistake, parts: tuple[str, ...]) -> None:
    for text in on_ranks(2, mistake, seconds=60):
        for part in parts:
            assert part in text, text


def test_ulysses_needs_a_head_per_rank() -> None:
    for text in on_ranks(3, made.too_few_heads, seconds=60):
        assert "at least as many query heads as ranks, got 2 heads and 3 ranks" in text


def test_a_rank_that_ends_stops_the_others() -> None:
    first, second = on_ranks(2, made.a_rank_that_ends, seconds=60)
    assert first.startswith("RuntimeError"), first
    assert "result" not in second
