"""Local count: at each token, predict how many of the same token stand directly before it.

A sequence of length N is a token that marks the begin and N symbols. The symbols form blocks. A
block repeats one of 16 symbols, another one than the block before; the number of repetitions is
uniform over 2 .. ``repeats``. The answer is the index of a symbol in its block, from 0. It depends
on this block only, however long the sequence is. Without the mark of the begin, a small model with
RoPE did not learn the task.

The task is LocalCount of Vasylenko et al. 2025 (arXiv:2506.16640). The preset paper has these facts
from the authors' code, github.com/deep-spin/asentmax: 16 symbols, ``repeats`` = 48, training
lengths 64 to 128, 78125 steps of 128 sequences.

Differences: a sequence of nominal length N has N // 25 whole blocks there, about N symbols; here it
has N symbols, and the last block is cut. Counts are tokens of their own, because the output layer
here is the embedding. There is no token for the end. Other differences, and what is not verified,
are those of `evals.tasks.two_back`, and the eval lengths, which are 1 to 64 times 128 here. The
quick preset has ``repeats`` = 8, which a small model learns in half a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.answers import ACCURACY, EXACT, LOSS, SequenceBatch, whole_answers
from evals.tasks.families.sequence import SequenceSettings, SequenceTask, presets
from evals.tasks.two_back import PAPER

# Token 0 marks the begin, 1 .. 16 are symbols, 17 + c is the count c.
BEGIN, FIRST, SYMBOLS = 0, 1, 16
SHORTEST = 2  # the smallest number of repetitions


@dataclass(frozen=True, kw_only=True)
class LocalCountSettings(SequenceSettings):
    """Settings of local count. ``repeats`` is the largest number of repetitions in a block."""

    repeats: int = 48

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < SHORTEST:
            raise ValueError(f"repeats must be >= {SHORTEST}, got {self.repeats}")


def draw(
    seed: int, split: str, length: int, start: int, stop: int, settings: LocalCountSettings
) -> SequenceBatch:
    """Draw sequences. Each takes one random number per block for the number of repetitions, then
    one per block for the symbol, for the largest possible number of blocks."""
    blocks = -(-length // SHORTEST)
    raw = words(seed, split, length, start, stop, 2 * blocks)
    repeats = SHORTEST + integers(raw[:, :blocks], settings.repeats - SHORTEST + 1)
    # A step of 1 .. 15 from symbol to symbol, modulo 16, never repeats the symbol.
    steps = 1 + integers(raw[:, blocks:], SYMBOLS - 1)
    steps[:, 0] = integers(raw[:, blocks], SYMBOLS)
    symbols = np.cumsum(steps, axis=1) % SYMBOLS
    ends = np.cumsum(repeats, axis=1)
    block = np.stack([np.searchsorted(row, np.arange(length), side="right") for row in ends])
    counts = np.arange(length) - np.take_along_axis(ends - repeats, block, axis=1)
    symbols = np.take_along_axis(symbols, block, axis=1)
    tokens = np.pad(FIRST + symbols, ((0, 0), (1, 0)), constant_values=BEGIN)
    answers = np.pad(FIRST + SYMBOLS + counts, ((0, 0), (1, 0)), constant_values=-1)
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


TASK = SequenceTask(
    name="local-count",
    about="Count how many of the same token stand directly before each token (ASEntmax suite, "
    "arXiv:2506.16640).",
    version=f"{GENERATOR}, local-count 1",
    draw=draw,
    vocabulary=lambda settings: FIRST + SYMBOLS + settings.repeats,
    chance_score=lambda settings: 1 / settings.repeats,
    presets=presets(
        LocalCountSettings,
        smoke=dict(repeats=8),
        quick=dict(lengths=(32, 64, 128, 256, 512), steps=1200, heads=4, repeats=8),
        paper=PAPER | dict(
            lengths=(128, 256, 512, 1024, 2048, 4096, 8192), train_shortest=64, train_longest=128
        ),
    ),
    size=lambda length: length + 1,
    read=whole_answers,
    metrics=(ACCURACY, EXACT, LOSS),
)  # fmt: skip
