"""Copy, reverse, sort: read L symbols, then write them in the same, reversed or ascending order.

A sequence is L symbols, a separator, and the L symbols of the answer: 2 L + 1 tokens. Symbols are
drawn uniformly and may repeat. Each symbol of the answer is predicted at the token before it.
``exact`` counts a sequence as right if all symbols of its answer are right. The input holds the
true answer. For ``exact`` this gives the same result as feeding back the model's own tokens,
because both inputs are equal up to the first error. The tasks are those of Vasylenko et al. 2025
(arXiv:2506.16640), who train up to L = 64 and evaluate at 2 to 64 times that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from evals.task import EVERY_VARIANT
from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.answers import ACCURACY, EXACT, LOSS, SequenceBatch, whole_answers
from evals.tasks.families.sequence import SequenceSettings, SequenceTask, presets


@dataclass(frozen=True, kw_only=True)
class TransductionSettings(SequenceSettings):
    """Settings of copy, reverse and sort. Tokens below ``symbols`` are symbols, the next one is the
    separator."""

    symbols: int = 32


def draw(
    transform: Callable[[np.ndarray], np.ndarray],
    seed: int, split: str, length: int, start: int, stop: int, settings: TransductionSettings,
) -> SequenceBatch:  # fmt: skip
    """Draw sequences, with one random number per symbol."""
    symbols = integers(words(seed, split, length, start, stop, length), settings.symbols)
    answer = transform(symbols)
    mark = np.full((len(symbols), 1), settings.symbols)
    tokens = np.concatenate([symbols, mark, answer], axis=1)
    answers = np.full_like(tokens, -1)
    answers[:, length:-1] = answer
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


def _task(
    name: str, order: str, transform: Callable[[np.ndarray], np.ndarray], **quick: Any
) -> SequenceTask:
    """A task with these differences in the preset quick."""
    return SequenceTask(
        name=name,
        about=f"Read symbols and write them {order}. The score is the share of sequences with "
        "every symbol right.",
        version=f"{GENERATOR}, {name} 1",
        draw=partial(draw, transform),
        vocabulary=lambda settings: settings.symbols + 1,
        chance_score=lambda settings: float(settings.symbols) ** -settings.train_longest,
        presets=presets(
            TransductionSettings,
            smoke={"variants": EVERY_VARIANT} if name == "copy" else {},
            # With 32 symbols, sort reaches 72 % in 8000 steps; with rope and 10 symbols, 93 % in
            # 4000.
            # Longer inputs than these have a score of 0.
            quick=quick | dict(
                validation=1.75 if name == "sort" else 1.125,
                lengths=(8, 10, 12, 16, 32), steps=4000, batch=16, heads=4, curriculum=0.0,
                train_shortest=2, train_longest=8, symbols=10,
            ),
            paper=dict(steps=30000, train_shortest=1),
        ),
        size=lambda length: 2 * length + 1,
        read=whole_answers,
        metrics=(EXACT, ACCURACY, LOSS),
    )  # fmt: skip


COPY = _task("copy", "again in the same order", lambda symbols: symbols)
REVERSE = _task("reverse", "again in reverse order", lambda symbols: symbols[:, ::-1])
# The answer of sort does not depend on the order of the symbols.
SORT = _task("sort", "again in ascending order", np.sort, positions=("none",))
