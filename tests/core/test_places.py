"""`Visibility.places`: the position of each query within its sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.core.arguments import check_call

T, F = True, False
DENSE = torch.tensor([[F, T, T], [T, T, F], [F, F, T]])


def places_of(queries: int, keys: int, **options: Any) -> Tensor:
    q, k = torch.zeros(2, 1, queries, 4), torch.zeros(2, 1, keys, 4)
    call = check_call(q, k, k, **options)
    at = call.places
    assert at.dtype == call.dtype
    return at.expand(2, 1, queries)[:, 0].long()


@pytest.mark.parametrize(
    ("queries", "keys", "options", "expected"),
    [
        (3, 3, {}, [0, 1, 2]),
        (2, 5, {"is_causal": True, "window": 1}, [3, 4]),
        (3, 1, {}, [0, 0, 0]),  # the first two queries stand before the key
        (2, 0, {}, [0, 0]),
        (3, 3, {"attn_mask": torch.tensor([F, T, F])}, [0, 0, 1]),
        (3, 3, {"attn_mask": torch.tensor([F, F, F])}, [0, 1, 2]),
        (3, 3, {"attn_mask": DENSE}, [0, 1, 0]),
        (3, 3, {"attn_mask": torch.zeros(3, 3).masked_fill(~DENSE, float("-inf"))}, [0, 1, 0]),
        (4, 4, {"segment_ids": torch.tensor([[5, 5, 2, 2]] * 2)}, [0, 1, 0, 1]),
        (4, 4, {"segment_ids": torch.tensor([[5, 2, 5, 2]] * 2)}, [0, 0, 2, 2]),
        (
            4,
            4,
            {
                "segment_ids": torch.tensor([[5, 5, 2, 2]] * 2),
                "attn_mask": torch.tensor([F, T, T, T]),
            },
            [0, 0, 0, 1],
        ),
    ],
)
def test_places_by_hand(queries: int, keys: int, options: Any, expected: list[int]) -> None:
    assert places_of(queries, keys, **options).tolist() == [expected] * 2


def test_places_of_a_long_call_do_not_depend_on_blocks() -> None:
    padding = torch.arange(700) >= 10
    dense = padding.expand(700, 700)
    expected = (torch.arange(700) - 10).clamp(min=0).expand(2, 700)
    assert torch.equal(places_of(700, 700, attn_mask=padding), expected)
    assert torch.equal(places_of(700, 700, attn_mask=dense), expected)


def test_a_query_whose_segment_has_no_key_has_its_place_in_the_row() -> None:
    ids = torch.tensor([[0, 7]] * 2), torch.tensor([[0, 0]] * 2)
    assert places_of(2, 2, segment_ids=ids).tolist() == [[0, 1]] * 2
