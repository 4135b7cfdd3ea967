"""MQAR: multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927).

A sequence of N tokens begins with N / ``density`` pairs of a key and its value; all keys differ.
Then each key occurs once more at a random position among blanks, and there the model must predict
its value. The number of pairs grows with N. Token 0 is the blank, the lower half of the other
tokens are keys, the upper half values. The quick preset has N / 4 pairs, which a small model learns
in minutes.

The preset paper has the vocabulary, the pairs (4, 8 and 16 at N = 64, 128 and 256), the layers, the
single head and the number of steps (64 epochs of 100000 sequences) of the authors' code,
github.com/HazyResearch/zoology. Its width, 128, is one of the paper's 64, 128, 256 and 512; ``--set
width=64`` gives another. Differences: the code trains a model for each N, this preset one model for
N = 64, 128, 192 and 256. The code draws the gap before a key from a power law; here all positions
are equally probable. The code's layers have learned absolute positions, dropout of 0.1 and no MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from commandline.errors import UsageError
from evals.tasks.draws import GENERATOR, integers, subsets, words
from evals.tasks.families.answers import SequenceBatch
from evals.tasks.families.sequence import VARIANT_SETTINGS, SequenceSettings, SequenceTask, presets


@dataclass(frozen=True, kw_only=True)
class MqarSettings(SequenceSettings):
    """Settings of MQAR. A sequence of N tokens has N / ``density`` key-value pairs."""

    vocabulary: int = 256
    density: int = 4

    @property
    def keys(self) -> int:
        """The number of keys. Tokens 1 .. keys are keys, larger ones are values."""
        return self.vocabulary // 2

    def pairs(self, length: int) -> int:
        """The number of pairs in a sequence."""
        pairs = length // self.density
        if length % self.density or not 1 <= pairs <= min(self.keys, length // 3):
            raise UsageError(
                f"a length of mqar must be a multiple of density = {self.density}, with density >= "
                f"3 and length / density <= vocabulary // 2 = {self.keys}, got {length}"
            )
        return pairs


def draw(
    seed: int, split: str, length: int, start: int, stop: int, settings: MqarSettings
) -> SequenceBatch:
    """Draw sequences.

    Each sequence takes one random number per possible key, one per pair for its value, and one per
    position after the pairs. The keys with the smallest random numbers are used.
    """
    pairs = settings.pairs(length)
    after = length - 2 * pairs
    raw = words(seed, split, length, start, stop, settings.keys + pairs + after)
    for_keys, for_values, for_queries = np.split(raw, np.cumsum([settings.keys, pairs]), axis=1)
    keys, first = 1 + subsets(for_keys, pairs), 1 + settings.keys
    values = first + integers(for_values, settings.vocabulary - first)
    queries = 2 * pairs + subsets(for_queries, pairs)
    tokens = np.zeros((stop - start, length), dtype=np.int64)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(tokens, queries, keys, axis=1)
    answers = np.full_like(tokens, -1)
    np.put_along_axis(answers, queries, values, axis=1)
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


TASK = SequenceTask(
    name="mqar",
    about="Multi-query associative recall: read pairs of a key and a value, then predict the value "
    "of each key (Zoology, arXiv:2312.04927). The number of pairs grows with the length.",
    version=f"{GENERATOR}, mqar 1",
    draw=draw,
    vocabulary=lambda settings: settings.vocabulary,
    chance_score=lambda settings: 1 / (settings.vocabulary - 1 - settings.keys),
    presets=presets(
        MqarSettings,
        smoke=dict(
            lengths=(64, 128), train_shortest=16, train_longest=64, train_stride=16,
        ),
        quick=dict(
            lengths=(64, 128, 256, 512), steps=2000, batch=16, learning_rate=2e-3, train_shortest=8,
            train_longest=64, train_stride=8,
        ),
        paper=dict(
            steps=25000, batch=256, width=128, heads=1, depth=2, vocabulary=8192, density=16,
            learning_rate=1e-3, train_shortest=64, train_longest=256, train_stride=64,
            variant_settings=VARIANT_SETTINGS,
        ),
    ),
)  # fmt: skip
