"""Models train on shards of a sequence as one process does on the whole sequence."""

from __future__ import annotations

import pytest

from helpers import context_models
from helpers.ranks import on_ranks

pytestmark = pytest.mark.slow  # each test starts processes that import everything again


def check(losses_by_rank: list, name: str) -> None:
    expected = context_models.alone(name)
    assert expected[0] > expected[-1]
    for losses in losses_by_rank:
        assert not isinstance(losses, str), losses
        # Both models are fp64, but transformers sums its loss over some 50 tokens in fp32.
        assert losses == pytest.approx(expected, rel=3e-6 if name == "llama" else 1e-8)


@pytest.mark.parametrize(
    ("name", "method", "layout"),
    [
        ("transformer", "ring", "zigzag"),
        ("llama", "ulysses", "zigzag"),
        ("transformer", "ulysses", "contiguous"),
        ("transformer", "all_gather", "zigzag"),
        ("llama", "ring", "contiguous"),
        ("llama", "all_gather", "zigzag"),
    ],
)
def test_two_ranks_train_as_one_process(name: str, method: str, layout: str) -> None:
    check(on_ranks(2, context_models.on_two_ranks, name, method, layout, seconds=120), name)


@pytest.mark.parametrize("name", ["transformer", "llama"])
def test_beside_fsdp(name: str) -> None:
    check(on_ranks(4, context_models.beside_fsdp, name, seconds=240), name)


def test_beside_tensor_parallelism() -> None:
    check(on_ranks(4, context_models.beside_tensor_parallelism, seconds=240), "llama")


def test_packed_documents_across_ranks() -> None:
    for result in on_ranks(2, context_models.packed, seconds=120):
        assert not isinstance(result, str), result
        actual, expected = result
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_left_padding_across_ranks() -> None:
    for result in on_ranks(2, context_models.left_padded, seconds=120):
        assert not isinstance(result, str), result
        actual, expected = result
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradients_are_summed_over_the_ranks() -> None:
    for wrong in on_ranks(2, context_models.reduced_gradients, seconds=120):
        assert wrong == []


@pytest.mark.parametrize(("window", "layout"), [(5, "zigzag"), (8, "contiguous"), (10, "zigzag")])
def test_windows_of_a_host_may_be_longer_than_a_shard(window: int, layout: str) -> None:
    for result in on_ranks(2, context_models.window_of_a_host, window, layout, seconds=120):
        assert not isinstance(result, str), result
        actual, expected = result
        assert actual == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_wrong_positions_in_a_host_raise() -> None:
    for errors in on_ranks(2, context_models.mistakes_with_hosts, seconds=120):
        assert len(errors) == 2, errors
        assert all("position_ids must be the positions of the rank's tokens" in x for x in errors)
