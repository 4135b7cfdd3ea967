"""The tasks mqmtar, local-count and 2-back: data by hand, and properties of their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from evals.tasks import TASKS, local_count, mqmtar, two_back
from evals.tasks.draws import different


def random_numbers(seed: int, length: int, index: int, count: int) -> list[int]:
    """``count`` random uint64 values of a test sequence, from numpy's Philox."""
    key = np.array([seed, (2 << 32) | length], dtype=np.uint64)
    blocks = -(-count // 4)
    return np.random.Philox(counter=index * blocks, key=key).random_raw(4 * blocks).tolist()[:count]


def choice(number: int, choices: int) -> int:
    return ((number & (2**32 - 1)) * choices) >> 32


MQMTAR = replace(TASKS["mqmtar"].presets["smoke"].settings, letters=16)
COUNT = replace(TASKS["local-count"].presets["smoke"].settings, repeats=4)


# ---- mqmtar


def test_mqmtar_by_hand() -> None:
    length, index, pairs = 17, 3, 2  # 2 = 0.8 · 17 / 6 pairs with 8 tokens of room each
    raw = iter(random_numbers(5, length, index, 12 + 12 + 2 + 4))

    def draw_words() -> list[list[int]]:
        drawn = [choice(next(raw), 256) for _ in range(12)]
        words = list(dict.fromkeys(drawn))[:pairs]  # the first different ones
        return [[4 + word // 16, 4 + word % 16] for word in words]

    keys, values = draw_words(), draw_words()
    tokens = [0] * length
    for pair in range(pairs):
        at = 8 * pair + choice(next(raw), 3)
        tokens[at : at + 5] = [*keys[pair], 1, *values[pair]]
    asked = [choice(next(raw), pairs) for _ in range(4)]
    for pair in asked:
        tokens += [2, *keys[pair]]
    answers = [-1] * len(tokens)
    tokens += [3]
    for pair in asked:
        tokens += [2, *values[pair]]
        answers += [-1, *values[pair]]
    answers += [-1]

    batch = mqmtar.draw(5, "test", length, index, index + 1, MQMTAR)
    assert batch.tokens[0].tolist() == tokens
    assert batch.answers[0].tolist() == answers
    assert TASKS["mqmtar"].tokens(length) == len(tokens) == 17 + 25


@pytest.mark.parametrize(("length", "pairs"), [(8, 1), (32, 4), (64, 8), (4096, 546)])
def test_keys_and_values_of_mqmtar_differ_and_fill_80_percent(length: int, pairs: int) -> None:
    """The numbers of pairs are those of the authors' code."""
    batch = mqmtar.draw(0, "train", length, 0, 3, replace(MQMTAR, letters=256))
    for tokens in batch.tokens[:, :length].tolist():
        marks = [index for index, token in enumerate(tokens) if token == 1]
        assert len(marks) == pairs
        for side in (-2, 1):  # the key before the mark, the value after it
            assert len({tuple(tokens[mark + side : mark + side + 2]) for mark in marks}) == pairs
        assert sum(token >= 4 for token in tokens) == 4 * pairs
        assert all(tokens[mark + 3] == 0 for mark in marks)  # a blank separates the pairs


def test_queries_and_letters_of_mqmtar_are_uniform() -> None:
    count = 2000
    batch = mqmtar.draw(0, "test", 32, 0, count, MQMTAR)
    letters = batch.answers[batch.asked].bincount(minlength=20)[4:]
    expected = 8 * count / 16
    # Queries that ask for the same key make the counts vary more than independent letters would.
    assert ((letters - expected).abs() < 8 * math.sqrt(expected)).all()
    assert TASKS["mqmtar"].chance(MQMTAR) == 16.0**-8


def test_different_leaves_out_repeated_draws() -> None:
    raw = np.random.Philox(key=0).random_raw(40 * 12).reshape(40, 12)
    different_numbers = different(raw, 10, 4)
    for row, numbers in zip(different_numbers.tolist(), raw.tolist(), strict=True):
        assert row == list(dict.fromkeys(choice(number, 10) for number in numbers))[:4]
    with pytest.raises(ValueError, match="12 draws gave fewer than 11 different ints"):
        different(raw, 10, 11)


# ---- local-count


def test_local_count_by_hand() -> None:
    length, index = 9, 2  # at most 5 blocks, with one number each for repetitions and symbol
    raw = random_numbers(1, length, index, 10)
    repeats = [2 + choice(number, 3) for number in raw[:5]]
    symbols = [choice(raw[5], 16)]
    for number in raw[6:]:
        symbols.append((symbols[-1] + 1 + choice(number, 15)) % 16)
    tokens, answers = [0], [-1]
    for symbol, times in zip(symbols, repeats, strict=True):
        tokens += [1 + symbol] * times
        answers += range(17, 17 + times)
    batch = local_count.draw(1, "test", length, index, index + 1, COUNT)
    assert batch.tokens[0].tolist() == tokens[: length + 1]
    assert batch.answers[0].tolist() == answers[: length + 1]


def test_blocks_of_local_count_are_uniform() -> None:
    batch = local_count.draw(0, "test", 400, 0, 100, COUNT)
    counts = batch.answers[:, 1:] - 17
    lengths = counts[:, :-1][counts[:, 1:] == 0] + 1  # of all blocks but the last, which is cut
    shares = lengths.bincount(minlength=5)[2:] / len(lengths)
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    symbols = batch.tokens[:, 1:][counts == 0].bincount(minlength=17)[1:]
    expected = symbols.sum() / 16
    assert ((symbols - expected).abs() < 5 * expected.sqrt()).all()


def test_local_count_needs_two_repetitions() -> None:
    with pytest.raises(ValueError, match="repeats must be >= 2, got 1"):
        replace(COUNT, repeats=1)


# ---- 2-back


def test_2_back_by_hand() -> None:
    symbols = [1 + choice(number, 15) for number in random_numbers(4, 6, 1, 6)]
    batch = two_back.draw(4, "test", 6, 1, 2, None)
    assert batch.tokens[0].tolist() == [0, *symbols]
    assert batch.answers[0].tolist() == [0, 0, 0, *symbols[:4]]


def test_symbols_of_2_back_are_uniform() -> None:
    tokens = two_back.draw(0, "test", 50, 0, 300, None).tokens
    symbols = tokens[:, 1:].flatten().bincount(minlength=16)
    expected = torch.tensor(50 * 300 / 15)
    assert symbols[0] == 0
    assert ((symbols[1:] - expected).abs() < 5 * expected.sqrt()).all()
