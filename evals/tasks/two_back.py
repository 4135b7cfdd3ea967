"""2-back: at each token, predict the token two positions before it.

A sequence of length N is the token 0 and N symbols, uniform over 1 .. 15. Every token has an
answer; that of the first two is 0. Attention to a fixed distance gives all answers, so the task
measures whether the weight at this distance stays large in long contexts.

The task is 2Back of Vasylenko et al. 2025 (arXiv:2506.16640). The preset paper has these facts from
the authors' code, github.com/deep-spin/asentmax: the vocabulary, training lengths 32 to 64, eval
lengths 64 to 4096, 78125 steps of 128 sequences.

Differences: there are no further tokens for begin and end. All sequences of a training step have
the same length. Not verified, because the code lacks them: the model's size, for which the code's
model for flip-flop stands in (4 layers of width 256 with 8 heads); the learning rate; the metric,
which is the share of right answers here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.answers import ACCURACY, EXACT, LOSS, SequenceBatch, whole_answers
from evals.tasks.families.sequence import SequenceTask, presets

SYMBOLS = 15
BACK = 2


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Any) -> SequenceBatch:
    """Draw sequences, with one random number per symbol."""
    symbols = 1 + integers(words(seed, split, length, start, stop, length), SYMBOLS)
    tokens = np.pad(symbols, ((0, 0), (1, 0)))
    answers = np.zeros_like(tokens)
    answers[:, BACK:] = tokens[:, :-BACK]
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


# Also that of local-count.
PAPER = dict(
    steps=78125, heads=8, weight_decay=0.0, fill=False, curriculum=0.0, train_shortest=32,
    test_sequences=1000,
)  # fmt: skip
TASK = SequenceTask(
    name="2-back",
    about="Predict the token two positions back, at every token (ASEntmax suite, "
    "arXiv:2506.16640).",
    version=f"{GENERATOR}, 2-back 1",
    draw=draw,
    vocabulary=SYMBOLS + 1,
    presets=presets(
        smoke={},
        quick=dict(
            lengths=(64, 128, 256, 512, 1024), steps=500, train_shortest=8, train_longest=64
        ),
        paper=PAPER,
    ),
    size=lambda length: length + 1,
    read=whole_answers,
    metrics=(ACCURACY, EXACT, LOSS),
)  # fmt: skip
