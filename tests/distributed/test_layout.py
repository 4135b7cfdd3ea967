"""The shards of a sequence."""

from __future__ import annotations

import pytest
import torch

from attnzoo.distributed.layout import LAYOUTS, Shards


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_tokens_of_each_rank(layout: str, expected: list[list[int]]) -> None:
    shards = Shards(layout, 2, 4)
    assert [shards.shard(torch.arange(8), rank, 0).tolist() for rank in (0, 1)] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_shards_in_rank_order_give_the_sequence_back(layout: str, ranks: int) -> None:
    shards = Shards(layout, ranks, 4)
    sequence = torch.arange(3 * shards.total * 2).view(3, shards.total, 2)
    joined = torch.cat([shards.shard(sequence, rank, 1) for rank in range(ranks)], dim=1)
    assert torch.equal(shards.to_sequence(joined, 1), sequence)
    assert torch.equal(shards.to_ranks(sequence, 1), joined)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_balances_causal_work(ranks: int) -> None:
    """The sum of positions is the number of visible keys, up to a constant."""
    shards = Shards("zigzag", ranks, 6)
    sums = {int(shards.shard(torch.arange(shards.total), r, 0).sum()) for r in range(ranks)}
    assert len(sums) == 1
