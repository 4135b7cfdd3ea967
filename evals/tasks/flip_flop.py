"""Flip-flop: remember the last written bit while many other bits must be ignored.

A string alternates instructions and bits. ``w`` writes its bit, the bit after ``i`` is to be
ignored, and after ``r`` the model must predict the bit that was written last. The first instruction
is ``w``, the last is ``r``. Every instruction in between is ``i`` with probability p, otherwise
``w`` or ``r`` with equal probability (Liu et al. 2023, FFLM, arXiv:2306.00946).

Training uses p = 0.8. The evaluation uses the same p and two more splits: sparse (p = 0.98), where
the last write is far back, and dense (p = 0.1). The input has the true bit after each ``r``, so an
error does not affect later predictions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from commandline.errors import UsageError
from evals.task import Metric
from evals.tasks.draws import GENERATOR, integers, uniforms, words
from evals.tasks.families.answers import ACCURACY, LOSS, SequenceBatch
from evals.tasks.families.sequence import SequenceTask, presets

ZERO, ONE, WRITE, READ, IGNORE = range(5)
IGNORED = {"train": 0.8, "validation": 0.8, "test": 0.8, "sparse": 0.98, "dense": 0.1}


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Any) -> SequenceBatch:
    """Draw sequences, with one random number per instruction and one per bit."""
    if length % 2 or length < 4:
        raise UsageError(f"a length of flip-flop must be an even int >= 4, got {length}")
    steps = length // 2
    raw = words(seed, split, length, start, stop, 2 * steps)
    chance = uniforms(raw[:, :steps]).astype(np.float64)
    ignored = IGNORED[split]
    not_ignored = np.where(chance < ignored + (1 - ignored) / 2, WRITE, READ)
    kinds = np.where(chance < ignored, IGNORE, not_ignored)
    kinds[:, 0], kinds[:, -1] = WRITE, READ
    bits = integers(raw[:, steps:], 2)
    # A running maximum over these gives the step of the last write.
    wrote = np.where(kinds == WRITE, np.arange(steps), 0)
    last = np.take_along_axis(bits, np.maximum.accumulate(wrote, axis=1), axis=1)
    bits = np.where(kinds == READ, last, bits)
    tokens = np.stack([kinds, bits], axis=2).reshape(-1, length)
    answers = np.full_like(tokens, -1)
    answers[:, 0::2] = np.where(kinds == READ, bits, -1)
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


TASK = SequenceTask(
    name="flip-flop",
    about="Flip-flop language modelling (arXiv:2306.00946): predict the bit that was written last, "
    "after many bits to ignore. The share of bits to ignore is 80 % in training, and 80 %, 98 % "
    "(sparse) and 10 % (dense) in the evaluation.",
    version=f"{GENERATOR}, flip-flop 1",
    draw=draw,
    vocabulary=5,
    chance_score=0.5,
    presets=presets(
        smoke=dict(lengths=(64, 128), train_shortest=16, train_longest=64, train_stride=16),
        quick=dict(
            lengths=(64, 128, 256, 512, 1024), batch=16, train_shortest=8, train_longest=64,
            train_stride=4, test_sequences=500, test_least=64, test_items=2**17, validation=6.0,
        ),
        paper=dict(
            lengths=(512, 1024, 2048, 4096, 8192), steps=10000, batch=64, train_shortest=512,
            train_longest=512, test_sequences=1000,
        ),
    ),
    splits={"": "test", "sparse_": "sparse", "dense_": "dense"},
    metrics=(
        ACCURACY,
        Metric("sparse_accuracy", "Accuracy on sparse strings (98 % to ignore), %", 100, 1),
        Metric("dense_accuracy", "Accuracy on dense strings (10 % to ignore), %", 100, 1),
        LOSS,
    ),
)  # fmt: skip
