"""Random numbers that are a pure function of (seed, split, length, index).

A Philox generator is keyed by (seed, split, length). Its counter starts at the sequence's index
times the number of counters per sequence. A sequence therefore does not depend on chunk sizes,
resumption or the order of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Part of the version of each built-in task: change it when a change in this file changes the data.
GENERATOR = "philox-1"

_SPLITS = {"train": 1, "test": 2, "train-lengths": 3, "sparse": 4, "dense": 5, "planted": 6,
           "validation": 7}  # fmt: skip
_PER_COUNTER = 4  # uint64 values per Philox counter


def words(seed: int, split: str, length: int, start: int, stop: int, count: int) -> np.ndarray:
    """Draw ``count`` random uint64 values for each sequence start .. stop − 1: (B, count).

    Raises:
        ValueError: the split is unknown.
    """
    if split not in _SPLITS:
        raise ValueError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}")
    blocks = -(-count // _PER_COUNTER)
    key = np.array([seed, (_SPLITS[split] << 32) | length], dtype=np.uint64)
    generator = np.random.Philox(counter=start * blocks, key=key)
    raw = generator.random_raw((stop - start) * blocks * _PER_COUNTER)
    return raw.reshape(stop - start, blocks * _PER_COUNTER)[:, :count]


def uniforms(raw: np.ndarray) -> np.ndarray:
    """Map uint64 to uniform numbers in [0, 1) by their upper 24 bits; exact in fp32."""
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def integers(raw: np.ndarray, choices: int) -> np.ndarray:
    """Map uint64 to uniform int64 in 0 .. choices − 1 by their lower 32 bits."""
    low = raw & np.uint64(0xFFFFFFFF)
    return ((low * np.uint64(choices)) >> np.uint64(32)).astype(np.int64)


def subsets(raw: np.ndarray, size: int) -> np.ndarray:
    """Draw ``size`` different ints below raw.shape[1] per sequence, in random order: (B, size)."""
    return np.argsort(raw, axis=1, kind="stable")[:, :size]


def lengths(seed: int, shortest: int, longest: Sequence[int], stride: int = 1) -> np.ndarray:
    """Draw the length of each training step, (steps,), uniform over shortest, shortest + stride, …
    up to the entry of ``longest`` for this step."""
    raw = words(seed, "train-lengths", 0, 0, len(longest), 1)[:, 0]
    choices = (np.array(longest, dtype=np.uint64) - np.uint64(shortest)) // np.uint64(stride)
    choices += np.uint64(1)
    picked = ((raw >> np.uint64(32)) * choices) >> np.uint64(32)
    return picked.astype(np.int64) * stride + shortest
