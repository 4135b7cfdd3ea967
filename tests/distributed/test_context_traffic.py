"""The bytes that each method sends, and the memory of the ring."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.context_traffic import (
    BATCH,
    DIM,
    HEADS,
    KV_HEADS,
    LOCAL,
    VALUE_DIM,
    WIDE,
    all_sent,
    peak,
)
from helpers.ranks import on_ranks

FP32 = 4
TOKEN = BATCH * LOCAL * FP32
K, V = TOKEN * KV_HEADS * DIM, TOKEN * KV_HEADS * VALUE_DIM
Q, OUT = TOKEN * HEADS * DIM, TOKEN * HEADS * VALUE_DIM
# The key/value heads that each rank sends to others in "ulysses": rank r has a part of the 6 query
# heads, and head h needs the key/value head h // 3.
KV_HEADS_SENT = {2: (1, 1), 3: (3, 2, 3)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def counted(request: pytest.FixtureRequest) -> list[Any]:
    """What each rank has sent, by variant and method."""
    sent = on_ranks(request.param, all_sent, seconds=120)
    assert all(isinstance(of_rank, dict) for of_rank in sent), sent
    return sent


def test_bytes_of_all_gather(counted: list[Any]) -> None:
    others = len(counted) - 1
    for of_rank in counted:
        assert of_rank["softmax", "all_gather"] == (others * (K + V), others * (K + V), 0)


def test_bytes_of_ulysses(counted: list[Any]) -> None:
    ranks, sent = len(counted), [of_rank["softmax", "ulysses"] for of_rank in counted]
    for heads, (forward, _, _) in zip(KV_HEADS_SENT[ranks], sent, strict=True):
        assert forward == (ranks - 1) * (Q + OUT) // ranks + heads * (K + V) // KV_HEADS
    # The backward sends the gradients the other way.
    assert sum(x[0] for x in sent) == sum(x[1] for x in sent)


def test_bytes_of_the_ring(counted: list[Any]) -> None:
    others = len(counted) - 1
    keys, round_of_both = others * K, others * (K + V)
    backward = round_of_both + len(counted) * (K + V)
    for of_rank in counted:
        assert of_rank["softmax", "ring"] == (round_of_both, backward, 2 * others)
        statistics = of_rank["adaptive_temperature", "ring"]
        assert statistics == (keys + round_of_both, backward, 3 * others)
        forward, back, messages = of_rank["entmax", "ring"]
        rounds = messages // others - 2  # of the keys alone: the maximum and the solver steps
        assert forward == rounds * keys + round_of_both
        assert 3 <= rounds <= 20
        assert back == backward


def test_bytes_of_states_do_not_depend_on_the_number_of_tokens(counted: list[Any]) -> None:
    state = BATCH * KV_HEADS * DIM * (VALUE_DIM + 1) * FP32  # as many features as dimensions
    sent = (len(counted) - 1) * 2 * state  # two chunks per rank
    for of_rank in counted:
        assert of_rank["elu", "ring"] == (sent, sent, 0)


@pytest.mark.slow
def test_the_ring_never_holds_all_keys() -> None:
    tokens = 4096
    keys = tokens * WIDE * FP32
    assert min(on_ranks(4, peak, "all_gather", tokens)) >= keys
    assert max(on_ranks(4, peak, "ring", tokens)) < 0.8 * keys
