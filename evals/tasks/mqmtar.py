"""MQMTAR: multi-query multi-token associative recall.

A sequence of length N begins with N tokens that hold pairs of a key and a value among blanks. Keys
and values are words of two letters each; all keys differ, and all values. The pairs take about 80 %
of the N tokens. Then come four queries, each a mark and a key, an end mark, and four answers, each
a mark and the value of the query's key. The letters of the values are predicted. A sequence counts
as right, ``exact``, if all eight are.

    N tokens:  k k : v v _ _ k k : v v _ _ _ ...
    then:      ? k k ? k k ? k k ? k k = ? v v ? v v ? v v ? v v

The task is that of Vasylenko et al. 2025 (arXiv:2506.16640). The preset paper has these facts from
the authors' code, github.com/deep-spin/asentmax: words of two letters, 256 letters, 80 %, four
queries (a key may be asked twice), training lengths 32 to 64, eval lengths from 64 in powers of
two, 4 layers of width 512 with 16 heads, 390625 steps of 128 sequences, the first 20000 as warm-up,
a peak learning rate of 2e-4 (the one for asentmax), no weight decay.

Differences: eval lengths end at 4096; the code's end at 65536. Words are drawn from all 65536; the
code draws 10000 keys and 10000 values for each file of data, so that most of its test words are not
in its training data. The blanks of a pair are divided between its two sides uniformly; the code's
division is not uniform. Blanks fill the first part up to N tokens; the code's may be shorter. There
are no tokens for begin and end of the sequence, and only letters are scored, not the marks before
them. All sequences of a training step have the same length. The MLP is that of
`attnzoo.nn.Transformer`; the code's is Gemma 2's with 1024 units. Not verified: that the paper's
tables come from these sizes.

There is no preset quick, because no small model was found that learns the task within minutes.
Trials with softmax, 2 to 4 layers, up to 6000 steps and 4 to 64 letters stopped where the model
writes the value of some pair, whatever the query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from commandline.errors import UsageError
from evals.tasks.draws import GENERATOR, different, integers, words
from evals.tasks.families.answers import ACCURACY, EXACT, LOSS, SequenceBatch, whole_answers
from evals.tasks.families.sequence import SequenceSettings, SequenceTask, presets

BLANK, PAIR, QUERY, END = range(4)  # larger tokens are letters
FIRST = 4
QUERIES = 4
WORD = 2  # letters of a key or a value
ASKED = QUERIES * (1 + WORD)  # tokens of the queries and, again, of their answers
UNIT = 2 * WORD + 2  # tokens of a pair with its mark and the blank after it
SPARE = 8  # draws of words beyond two per word: fewer would not always give enough different words


@dataclass(frozen=True, kw_only=True)
class MqmtarSettings(SequenceSettings):
    """Settings of MQMTAR. Keys and values are words over ``letters`` letters."""

    letters: int = 256

    def pairs(self, length: int) -> int:
        """The number of pairs in a sequence: 80 % of its length, in whole pairs."""
        pairs, most = 4 * length // (5 * UNIT), self.letters**WORD // 4
        if not 1 <= pairs <= most:
            raise UsageError(
                "a length of mqmtar must be >= 8, with 0.8 * length / 6 <= letters**2 / 4 = "
                f"{most}, got {length}"
            )
        return pairs


def tokens_of(length: int) -> int:
    """The number of tokens: the pairs, the queries with the end mark, and the answers."""
    return length + ASKED + 1 + ASKED


def draw(
    seed: int, split: str, length: int, start: int, stop: int, settings: MqmtarSettings
) -> SequenceBatch:
    """Draw sequences. Each takes 2 n + 8 random numbers for its n keys, as many for its values, one
    per pair for its place among the blanks, and one per query."""
    pairs, count, room = settings.pairs(length), stop - start, length // settings.pairs(length)
    draws = 2 * pairs + SPARE
    raw = words(seed, split, length, start, stop, 2 * draws + pairs + QUERIES)
    *sides, gaps, queries = np.split(raw, np.cumsum([draws, draws, pairs]), axis=1)
    drawn = (different(side, settings.letters**WORD, pairs) for side in sides)
    keys, values = (FIRST + np.stack(np.divmod(side, settings.letters), axis=-1) for side in drawn)

    first = np.arange(pairs) * room + integers(gaps, room - UNIT + 1)  # where each pair starts
    at = first[:, :, None] + np.arange(UNIT - 1)
    listed = np.concatenate([keys, np.full((count, pairs, 1), PAIR), values], axis=2)
    context = np.full((count, length), BLANK)
    np.put_along_axis(context, at.reshape(count, -1), listed.reshape(count, -1), axis=1)

    asked = integers(queries, pairs)[:, :, None]
    mark = np.full((count, QUERIES, 1), QUERY)
    questions, replies = (
        np.concatenate([mark, np.take_along_axis(side, asked, axis=1)], axis=2)
        for side in (keys, values)
    )
    end = np.full((count, 1), END)
    tokens = np.hstack([context, questions.reshape(count, -1), end, replies.reshape(count, -1)])
    answers = np.full_like(tokens, -1)
    answers[:, -ASKED - 1 : -1] = np.where(tokens[:, -ASKED:] >= FIRST, tokens[:, -ASKED:], -1)
    return SequenceBatch(torch.from_numpy(tokens), torch.from_numpy(answers))


TASK = SequenceTask(
    name="mqmtar",
    about="Multi-query multi-token associative recall: read pairs of a two-letter key and a "
    "two-letter value, then write the values of four keys (ASEntmax suite, arXiv:2506.16640). The "
    "score is the share of sequences with every letter right.",
    version=f"{GENERATOR}, mqmtar 1",
    draw=draw,
    vocabulary=lambda settings: FIRST + settings.letters,
    chance_score=lambda settings: float(settings.letters) ** -(QUERIES * WORD),
    presets=presets(
        MqmtarSettings,
        smoke=dict(fill=False, train_shortest=8, train_stride=8, letters=16),
        paper=dict(
            steps=390625, width=512, heads=16, learning_rate=2e-4, weight_decay=0.0, warmup=0.0512,
            fill=False, curriculum=0.0, train_shortest=32, test_sequences=1000,
            sweep={},  # without quick, no learning rates are recorded
        ),
    ),
    size=tokens_of,
    read=whole_answers,
    metrics=(EXACT, ACCURACY, LOSS),
)  # fmt: skip
