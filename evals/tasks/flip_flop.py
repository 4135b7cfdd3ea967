"""Flip-flop: remember the bit that was last written, through what is to be ignored.

A string alternates instructions and bits: ``w`` writes a bit, ``i`` goes with a bit to ignore, and
after ``r`` the bit last written is asked for. It begins with ``w`` and ends with ``r``; each
instruction between is ``i`` with probability p, else ``w`` or ``r`` (Liu et al. 2023, FFLM,
arXiv:2306.00946). Training has p = 0.8. Tested, beside longer strings of the same p, are its two
tails: sparse (p = 0.98), where the last write is far back among what is to be ignored, and dense
(p = 0.1). The bit of ``r`` is the true one in the input, so that one error brings no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from commandline.errors import UsageError
from evals.task import EVERY, QUICK, Metric, Preset
from evals.tasks.draws import GENERATOR, integers, uniforms, words
from evals.tasks.families.sequence import ACCURACY, LOSS, Batch, Sequence, Settings

ZERO, ONE, WRITE, READ, IGNORE = range(5)
IGNORED = {"train": 0.8, "test": 0.8, "sparse": 0.98, "dense": 0.1}


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Any) -> Batch:
    """Words: one per instruction, one per bit."""
    if length % 2 or length < 4:
        raise UsageError(f"flip-flop's lengths must be even numbers from 4 on, got {length}")
    steps = length // 2
    raw = words(seed, split, length, start, stop, 2 * steps)
    chance = uniforms(raw[:, :steps]).astype(np.float64)
    ignored = IGNORED[split]
    rest = np.where(chance < ignored + (1 - ignored) / 2, WRITE, READ)
    kinds = np.where(chance < ignored, IGNORE, rest)
    kinds[:, 0], kinds[:, -1] = WRITE, READ
    bits = integers(raw[:, steps:], 2)
    # The step of the last write before each step, whose bit a read must say.
    wrote = np.where(kinds == WRITE, np.arange(steps), 0)
    last = np.take_along_axis(bits, np.maximum.accumulate(wrote, axis=1), axis=1)
    bits = np.where(kinds == READ, last, bits)
    tokens = np.stack([kinds, bits], axis=2).reshape(-1, length)
    answers = np.full_like(tokens, -1)
    answers[:, 0::2] = np.where(kinds == READ, bits, -1)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(answers))


PRESETS = {
    "smoke": Preset(
        variants=EVERY,
        seeds=1,
        lengths=(64, 128, 256),
        positions=("rope",),
        settings=Settings(
            steps=100, batch=16, train_shortest=16, train_longest=64, train_stride=16,
            test_sequences=32,
        ),
    ),
    "quick": Preset(
        variants=QUICK,
        seeds=3,
        lengths=(64, 128, 256, 512, 1024),
        positions=("rope", "alibi"),
        settings=Settings(
            steps=1500, batch=32, train_shortest=8, train_longest=64, train_stride=4,
            test_sequences=500, test_least=64, test_items=2**17,
        ),
    ),
    "paper": Preset(
        variants=QUICK,
        seeds=3,
        lengths=(512, 1024, 2048, 4096, 8192),
        positions=("none", "rope", "p-rope", "alibi"),
        settings=Settings(
            steps=10000, batch=64, width=256, heads=4, depth=4, learning_rate=3e-4,
            train_shortest=512, train_longest=512, test_sequences=1000, test_items=2**20,
        ),
    ),
}  # fmt: skip

TASK = Sequence(
    name="flip-flop",
    about="Flip-flop language modelling (arXiv:2306.00946): say the bit last written, through what "
    "is to be ignored; trained with 80 % to ignore, tested also with 98 % (sparse) and 10 % "
    "(dense).",
    generator=f"{GENERATOR}, flip-flop 1",
    draw=draw,
    vocabulary=lambda settings: 5,
    guess=lambda settings: 0.5,
    presets=PRESETS,
    splits={"": "test", "sparse_": "sparse", "dense_": "dense"},
    metrics=(
        ACCURACY,
        Metric("sparse_accuracy", "Accuracy in the sparse tail, %: 98 % to ignore", 100, 1),
        Metric("dense_accuracy", "Accuracy in the dense tail, %: 10 % to ignore", 100, 1),
        LOSS,
    ),
)
