"""context_parallel_attention equals attention of one process, in values and all gradients."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from helpers.cases import ALL_VARIANTS
from helpers.context_cases import (
    METHODS,
    Case,
    cases,
    everything,
    outcomes,
    some_cases,
)
from helpers.ranks import on_ranks

# One variant of each kind of merging: exp, other sums with a second normalizer, no normalizer, a
# threshold, a gain from statistics, states, selected keys, and a definition.
KINDS = (
    "sink", "softpick", "sigmoid", "asentmax", "adaptive_temperature", "taylor", "topk",
    "forgetting",
)  # fmt: skip
# The ring runs forms that merge. These have none.
NOT_CIRCULATED = {"perturb_max", "stick_breaking", "top_p", "topk"}


def check(outcomes_by_rank: list, checked: list[Case]) -> None:
    names = {case.id: case for case in checked}
    done = set()
    for rank, of_rank in enumerate(outcomes_by_rank):
        assert isinstance(of_rank, dict), f"rank {rank}: {of_rank}"
        assert set(of_rank) == set(names)
        for name, text in of_rank.items():
            case = names[name]
            if text is None:
                done.add((case.variant, case.method))
                continue
            assert not text.startswith("differs"), f"rank {rank}, {name}: {text}"
            if text.startswith("rejected"):
                few_heads = case.method == "ulysses" and case.heads[0] < len(outcomes_by_rank)
                no_sums = case.variant in NOT_CIRCULATED or (
                    case.feature.endswith("lse") and case.variant == "taylor"
                )
                assert few_heads or (case.method == "ring" and no_sums), f"{name}: {text}"
    variants = {case.variant for case in checked}
    missing = set(product(variants, METHODS)) - done
    assert missing == {(v, "ring") for v in variants if v in NOT_CIRCULATED}


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    outcomes_by_rank = on_ranks(2, everything, some_cases(KINDS), seconds=240)
    assert all(isinstance(of_rank, dict) for of_rank in outcomes_by_rank), outcomes_by_rank
    return outcomes_by_rank


def test_two_ranks_agree_with_one_process(on_two: list[Any]) -> None:
    check([of_rank["outcomes"] for of_rank in on_two], some_cases(KINDS))


def test_some_cases_have_every_pair_of_values() -> None:
    for first, second in combinations(("variant", "method", "feature"), 2):
        every, some = (
            {(getattr(case, first), getattr(case, second)) for case in made(KINDS)}
            for made in (cases, some_cases)
        )
        assert some == every


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_variant_agrees_with_one_process(ranks: int) -> None:
    """More ranks send more messages, of the same kinds."""
    every = cases(ALL_VARIANTS if ranks == 2 else KINDS)
    check(on_ranks(ranks, outcomes, every, seconds=600), every)


@pytest.mark.slow
def test_chunks_of_one_token() -> None:
    """They make dense masks look like key masks."""
    every = cases(KINDS)
    check(on_ranks(2, outcomes, every, 1, seconds=240), every)


@pytest.mark.usefixtures("mesh")
def test_one_rank_is_attention() -> None:
    texts = outcomes(0, cases(("ssmax",)))
    assert all(text is None for text in texts.values()), texts


def test_bf16_and_named_backends(on_two: list[Any]) -> None:
    """One process and several add in another order, and may round to neighbours in bf16."""
    for of_rank in on_two:
        assert max(of_rank["bf16"].values()) <= 2.0, of_rank["bf16"]


def test_dropout_drops_equal_weights_forward_and_backward(on_two: list[Any]) -> None:
    for of_rank in on_two:
        for method, (out, dv, expected, spread) in of_rank["dropout"].items():
            assert out == pytest.approx(dv, rel=1e-12), method
            # 512 rows of 128 weights 1/128, each dropped or doubled: a row has a standard
            # deviation of 1/√128 = 0.088, and the mean of all rows one of 0.4 %.
            assert out == pytest.approx(expected, rel=0.02), method
            assert 0.07 < spread < 0.11, method
