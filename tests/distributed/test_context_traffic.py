"""The bytes that each method sends, and the memory of the ring."""

from __future__ import annotations

import pytest

from helpers.context_traffic import (
    BATCH,
    DIM,
    HEADS,
    KV_HEADS,
    LOCAL,
    VALUE_DIM,
    WIDE,
    peak,
    sent,
)
from helpers.ranks import on_ranks

FP32 = 4
TOKEN = BATCH * LOCAL * FP32
K, V = TOKEN * KV_HEADS * DIM, TOKEN * KV_HEADS * VALUE_DIM
Q, OUT = TOKEN * HEADS * DIM, TOKEN * HEADS * VALUE_DIM
# The key/value heads that each rank sends to others in "ulysses": rank r has a part of the 6 query
# heads, and head h needs the key/value head h // 3.
KV_HEADS_SENT = {2: (1, 1), 3: (3, 2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_all_gather(ranks: int) -> None:
    for found in on_ranks(ranks, sent, "softmax", "all_gather", {}):
        assert found == ((ranks - 1) * (K + V), (ranks - 1) * (K + V), 0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_ulysses(ranks: int) -> None:
    found = on_ranks(ranks, sent, "softmax", "ulysses", {})
    for heads, (forward, _, _) in zip(KV_HEADS_SENT[ranks], found, strict=True):
        assert forward == (ranks - 1) * (Q + OUT) // ranks + heads * (K + V) // KV_HEADS
    # The backward sends the gradients the other way.
    assert sum(x[0] for x in found) == sum(x[1] for x in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_the_ring(ranks: int) -> None:
    keys, round_of_both = (ranks - 1) * K, (ranks - 1) * (K + V)
    backward = round_of_both + ranks * (K + V)
    for found in on_ranks(ranks, sent, "softmax", "ring", {}):
        assert found == (round_of_both, backward, 2 * (ranks - 1))
    for found in on_ranks(ranks, sent, "adaptive_temperature", "ring", {}):  # statistics
        assert found == (keys + round_of_both, backward, 3 * (ranks - 1))
    for forward, back, messages in on_ranks(ranks, sent, "entmax", "ring", {}):  # solver steps
        rounds = messages // (ranks - 1) - 2  # of the keys alone
        assert forward == rounds * keys + round_of_both
        assert 3 <= rounds <= 20
        assert back == backward


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_states_do_not_depend_on_the_number_of_tokens(ranks: int) -> None:
    state = BATCH * KV_HEADS * DIM * (VALUE_DIM + 1) * FP32  # as many features as dimensions
    for found in on_ranks(ranks, sent, "elu", "ring", {}):
        assert found == ((ranks - 1) * 2 * state, (ranks - 1) * 2 * state, 0)


@pytest.mark.slow
def test_the_ring_never_holds_all_keys() -> None:
    tokens = 4096
    keys = tokens * WIDE * FP32
    assert min(on_ranks(4, peak, "all_gather", tokens)) >= keys
    assert max(on_ranks(4, peak, "ring", tokens)) < 0.8 * keys
