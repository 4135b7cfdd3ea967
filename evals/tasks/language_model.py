"""Language model: the bytes of a text, with inserted needles.

The setting ``text`` is "python", the sources of Python's standard library, or the path of a text;
see `evals.tasks.texts`. The text's digest is part of every run's key, and results of two texts are
never mixed.

A sequence is N consecutive bytes from a random start. The split ``validation`` has other starts in
the training text, so that no sweep reads the test text. Half of the training sequences, and all
sequences of the split ``planted``, have a needle: a line ``#key=dddd`` at a random depth, and
``#key=`` with the same four digits at the end. The model must predict these digits. ``bits`` is the
loss in bits per byte over sequences without a needle, and the curve ``bits_by_position`` is that
loss in each sixteenth of a sequence. ``top1`` and ``top5`` are the shares of bytes that are the
most probable one or among the five most probable ones. ``log_rank`` is the rank of log P, where P
holds the probabilities of the next byte after each of 1024 tokens of these sequences. Needles are
scored over all depths and in each fifth of the depths: ``planted_depth_1`` is the part farthest
from the question.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.nn import Transformer
from commandline.errors import UsageError
from evals.measures.ranks import rank
from evals.task import BatchResult, Metric
from evals.tasks import texts
from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.answers import SequenceBatch, whole_answers
from evals.tasks.families.sequence import (
    DEEP_VARIANT_SETTINGS,
    SequenceSettings,
    SequenceTask,
    presets,
)

LINE = b"\n#key="
DIGITS = 4
PLANTED = len(LINE) + DIGITS + 1  # the length of the needle's line with the newlines around it
SHORTEST = 4 * PLANTED
RANKED = 1024  # number of tokens over which the rank of log P is computed
PIECES = 16  # number of parts of a sequence in ``bits_by_position``

DEPTHS = 5  # number of parts of the depths of needles


def _variants(train_length: int) -> tuple[str, ...]:
    """Of the presets quick and gpu: those with the strongest published claims come first."""
    return (
        "softmax",
        "ssmax",
        "sigmoid",
        f"softmax->log_n(train_length={train_length})",
        "forgetting(log_gates='projected')",
        "stick_breaking",
        "entmax",
        "asentmax(beta='projected', gamma='projected')",
        "cosformer(features='elu')",
        "taylor",
        "sink",
        "sigmoid(bias=0.0)",
    )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(SequenceSettings):
    """Settings of the language model: text is "python" or the path of a text, as in `texts`."""

    text: str = texts.PYTHON

    def identity(self) -> dict[str, object]:
        """The text has its name here; its digest is in `SequenceTask.data_version`."""
        settings = super().identity()
        text = settings.pop("text")
        return settings if text == texts.PYTHON else settings | {"text": texts.text_name(self.text)}


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Any) -> SequenceBatch:
    """Draw sequences. The random numbers of a sequence give its start in the text, the depth of the
    needle and its digits, in this order."""
    if length < SHORTEST:
        raise UsageError(f"a length of language-model must be >= {SHORTEST}, got {length}")
    part = "train" if split in ("train", "validation") else "test"
    text = texts.corpus(settings.text)[0][part]
    if len(text) <= length:
        raise UsageError(
            f"setting text {settings.text!r} is too little text for length {length}: its {part} "
            f"part has {len(text)} bytes"
        )
    raw = words(seed, split, length, start, stop, 2 + DIGITS)
    starts = integers(raw[:, 0], len(text) - length)
    drawn = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    if split in ("train", "planted"):
        chosen = (np.arange(start, stop) % 2 == 1) | (split == "planted")
        depths, digits = integers(raw[:, 1], length - 2 * PLANTED), integers(raw[:, 2:], 10)
        drawn[chosen] = _with_needle(drawn[chosen], depths[chosen], ord("0") + digits[chosen])
    answers = drawn[:, 1:].copy()
    if split == "planted":
        answers[:, :-DIGITS] = -1
    return SequenceBatch(torch.from_numpy(drawn[:, :-1].copy()), torch.from_numpy(answers))


def _with_needle(text: np.ndarray, depths: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """Write a needle at ``depths`` (B,) and the question with its answer at the end of ``text``
    (B, N + 1), in place."""
    line = np.broadcast_to(np.frombuffer(LINE, dtype=np.uint8), (len(text), len(LINE)))
    question = np.hstack([line, digits])
    text[:, -question.shape[1] :] = question
    needle = np.pad(question, ((0, 0), (0, 1)), constant_values=ord("\n"))
    np.put_along_axis(text, depths[:, None] + np.arange(PLANTED), needle, axis=1)
    return text


def read(logits: torch.Tensor, batch: SequenceBatch) -> BatchResult:
    """The metrics: accuracy of the digits in the split ``planted``, otherwise bits per byte and
    the accuracy of the next byte."""
    count, answers = len(batch.tokens), batch.answers[batch.asked]
    if len(answers) == count * DIGITS:
        scores = whole_answers(logits, batch).metrics
        parts = depth_parts(batch)
        by_depth = {
            f"depth_{part + 1}": scores["exact"][parts == part] for part in parts.unique().tolist()
        }
        return BatchResult({"needle": scores["exact"], "digits": scores["accuracy"], **by_depth})
    bits = F.cross_entropy(logits.double(), answers, reduction="none") / math.log(2)
    rows = bits.reshape(batch.answers.shape)  # an error unless every token has an answer
    pieces = torch.stack([piece.mean(dim=-1) for piece in rows.tensor_split(PIECES, dim=-1)], -1)
    last = pieces[:, -PIECES // 4 :].mean(dim=-1)
    hits = logits.topk(5, dim=-1).indices == answers[:, None]
    accuracy = {"top1": hits[:, 0], "top5": hits.any(dim=-1)}
    return BatchResult({"bits": bits, "bits_last": last, **accuracy}, {"bits_by_position": pieces})


def depth_parts(batch: SequenceBatch) -> Tensor:
    """The part of the depths in which each sequence has its needle, 0 … `DEPTHS` − 1, (B,)."""
    line = torch.tensor([*LINE]).to(batch.tokens).expand(len(batch.tokens), -1)
    end = torch.full_like(line[:, :1], ord("\n"))
    needle = torch.cat([line, batch.answers[:, -DIGITS:], end], dim=1)
    windows = batch.tokens.unfold(1, PLANTED, 1)  # (B, N − PLANTED + 1, PLANTED)
    depths = (windows == needle[:, None]).all(dim=-1).int().argmax(dim=-1)
    return depths * DEPTHS // (batch.tokens.shape[1] - 2 * PLANTED)


def frequencies(settings: Any) -> Tensor:
    """How often each byte occurs in the training text, (256,)."""
    return torch.from_numpy(np.bincount(texts.corpus(settings.text)[0]["train"], minlength=256))


def log_rank(model: Transformer, states: Tensor, batch: SequenceBatch) -> dict[str, Tensor]:
    """The rank of log P over the first tokens of a batch without needles, by name.

    log P is computed in fp64 from the given states. The result is empty if a probability is 0, or
    if there are fewer than `RANKED` tokens.
    """
    if not batch.asked.all() or len(states) < RANKED:
        return {}
    # The copies share the matrix if the originals do.
    _, layer = copy.deepcopy(nn.ModuleList([model.embed, model.output])).double()
    logs = layer.log_prob(states[:RANKED].double())  # type: ignore[operator]
    return {"log_rank": torch.tensor([float(rank(logs))])} if logs.isfinite().all() else {}


TASK = SequenceTask(
    name="language-model",
    about="Byte-level language modelling of a text, by default the sources of the Python standard "
    "library: bits per byte, and the four digits of a needle planted in the text.",
    version=f"{GENERATOR}, language model 2",
    draw=draw,
    vocabulary=256,
    chance_score=8.0,
    presets=presets(
        LanguageSettings,
        smoke=dict(
            lengths=(64, 256), heads=4, learning_rate=2e-3, train_shortest=64,
            train_longest=64, test_sequences=16, test_least=4, test_items=2**13,
        ),
        # After 250 steps, softmax with RoPE had 3.72, 3.60, 3.06 and 3.25 bits per byte with the
        # learning rates 6e-3, 3e-3, 1.5e-3 and 7.5e-4.
        quick=dict(
            lengths=(256, 512, 1024, 2048, 4096), positions=("rope", "none"),
            variants=_variants(256), seeds=1, sweep={}, steps=2200, batch=16, width=128, heads=4,
            depth=4, learning_rate=1.5e-3, curriculum=0.0, train_shortest=256, train_longest=256,
            test_items=2**17, test_least=32,
        ),
        gpu=dict(
            lengths=(1024, 2048, 4096, 8192, 16384), positions=("rope", "none"),
            variants=_variants(1024), variant_settings=DEEP_VARIANT_SETTINGS, steps=4000, batch=64,
            width=512, heads=8, depth=10, learning_rate=1e-3, curriculum=0.0,
            train_shortest=1024, train_longest=1024, test_items=2**20,
            autocast="bfloat16", compile=True,
        ),
    ),
    read=read,
    read_states=log_rank,
    frequencies=frequencies,
    text=lambda settings: texts.corpus(settings.text)[1],
    splits={"": "test", "planted_": "planted"},
    trained_score=None,
    metrics=(
        Metric("bits", "Bits per byte", digits=2, lower_is_better=True),
        Metric("bits_last", "Bits per byte, last quarter", digits=2, lower_is_better=True),
        Metric("top1", "Next byte right, %", 100, 1, optional=True),
        Metric("top5", "Next byte among the five most probable, %", 100, 1, optional=True),
        Metric("planted_needle", "Needles found (all four digits right), %", 100, 1),
        *(
            Metric(
                f"planted_depth_{i + 1}",
                f"Needles found at {20 * i}–{20 * (i + 1)} % of the depth, %",
                100, 1, optional=True,
            )
            for i in range(DEPTHS)
        ),
        Metric("planted_digits", "Digits of needles right, %", 100, 1),
        Metric("log_rank", "Rank of log P over 1024 tokens", digits=0, optional=True),
    ),
)  # fmt: skip
