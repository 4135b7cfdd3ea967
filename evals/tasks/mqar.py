"""MQAR: multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927).

A sequence of N tokens begins with pairs of a key and its value, N / ``density`` of them, all keys
different; then each key comes once more at a random place among blanks, and there its value is
asked for. The more tokens, the more pairs to tell apart. Token 0 is the blank, the lower half of
the others are keys, the upper half values. The authors have N / 16 pairs and draw the gaps before a
key from a power law; here places are uniform, and the quick preset has N / 4 pairs, which a small
model learns in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from commandline.errors import UsageError
from evals.task import EVERY, QUICK, Preset
from evals.tasks.draws import GENERATOR, integers, subsets, words
from evals.tasks.families.sequence import Batch, Sequence
from evals.tasks.families.sequence import Settings as Base


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Of MQAR: ``vocabulary`` tokens, and one pair for each ``density`` tokens."""

    vocabulary: int = 256
    density: int = 4

    @property
    def keys(self) -> int:
        """How many tokens are keys, 1 .. keys; the values are those above."""
        return self.vocabulary // 2

    def pairs(self, length: int) -> int:
        """How many pairs a sequence has."""
        pairs = length // self.density
        if length % self.density or not 1 <= pairs <= min(self.keys, length // 3):
            raise UsageError(
                f"mqar's lengths must be multiples of {self.density} (density, at least 3) with no "
                f"more than {self.keys} pairs (half the vocabulary), got {length}"
            )
        return pairs


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Settings) -> Batch:
    """Words: one per possible key (the smallest are taken), one value per pair, one per place."""
    pairs = settings.pairs(length)
    rest = length - 2 * pairs
    raw = words(seed, split, length, start, stop, settings.keys + pairs + rest)
    keys = 1 + subsets(raw[:, : settings.keys], pairs)
    first = 1 + settings.keys
    drawn = raw[:, settings.keys : settings.keys + pairs]
    values = first + integers(drawn, settings.vocabulary - first)
    places = 2 * pairs + subsets(raw[:, settings.keys + pairs :], pairs)
    tokens = np.zeros((stop - start, length), dtype=np.int64)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(tokens, places, keys, axis=1)
    answers = np.full_like(tokens, -1)
    np.put_along_axis(answers, places, values, axis=1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(answers))


PRESETS = {
    "smoke": Preset(
        variants=EVERY,
        seeds=1,
        lengths=(64, 128, 256),
        positions=("rope",),
        settings=Settings(
            steps=100, batch=16, train_shortest=16, train_longest=64, train_stride=16,
            test_sequences=16,
        ),
    ),
    "quick": Preset(
        variants=QUICK,
        seeds=3,
        lengths=(64, 128, 256, 512),
        positions=("rope",),
        settings=Settings(
            steps=2000, batch=32, learning_rate=2e-3, train_shortest=8, train_longest=64,
            train_stride=8,
        ),
    ),
    "paper": Preset(
        variants=QUICK,
        seeds=3,
        lengths=(64, 128, 256, 512, 1024, 2048, 4096),
        positions=("none", "rope", "p-rope", "alibi"),
        settings=Settings(
            steps=30000, batch=256, width=128, vocabulary=8192, density=16, learning_rate=1e-3,
            train_shortest=64, train_longest=256, train_stride=64, test_items=2**20,
        ),
    ),
}  # fmt: skip

TASK = Sequence(
    name="mqar",
    about="Multi-query associative recall: pairs of keys and values, then keys again, whose values "
    "are asked for (Zoology, arXiv:2312.04927). The number of pairs grows with the length.",
    generator=f"{GENERATOR}, mqar 1",
    draw=draw,
    vocabulary=lambda settings: settings.vocabulary,
    guess=lambda settings: 1 / (settings.vocabulary - 1 - settings.keys),
    presets=PRESETS,
)
