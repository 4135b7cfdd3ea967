"""The random numbers of the evals' data, computed from numpy's Philox generator."""

from __future__ import annotations

import numpy as np

SPLITS = {"train": 1, "test": 2, "sparse": 4, "dense": 5, "planted": 6, "validation": 7}


def random_numbers(seed: int, split: str, length: int, index: int, count: int) -> list[int]:
    """``count`` random uint64 values of a sequence, 4 per counter value of the generator."""
    key = np.array([seed, (SPLITS[split] << 32) | length], dtype=np.uint64)
    blocks = -(-count // 4)
    return np.random.Philox(counter=index * blocks, key=key).random_raw(4 * blocks).tolist()[:count]


def choice(number: int, choices: int) -> int:
    """An int below ``choices`` from the lower 32 bits."""
    return ((number & (2**32 - 1)) * choices) >> 32


def uniform(number: int) -> float:
    """A number in [0, 1) from the upper 24 bits."""
    return (number >> 40) / 2**24


def ranked(numbers: list[int]) -> list[int]:
    """The indices that sort ``numbers`` in ascending order."""
    return sorted(range(len(numbers)), key=numbers.__getitem__)
