"""Language model: bytes of the Python standard library's sources, with inserted needles.

The text needs no download: it is the .py files of the running Python's standard library in the
order of their names. Tests, files written by the build of Python, and files that repeat others
(code pages, lib2to3, distutils) are left out. A package belongs to the test text if the SHA-256 of
its name ends in a hex digit below 2, otherwise to the training text. Splitting by package keeps the
overlap small: under Python 3.11, 1.3 % of the 64-byte pieces of the test text occur in the training
text. With a split by file it would be 13.5 %. The text depends on the Python release, so its digest
is part of every run's key, and results of two releases are never mixed.

A sequence is N consecutive bytes from a random start. The split ``validation`` has other starts in
the training text, so that no sweep reads the test text. Half of the training sequences, and all
sequences of the split ``planted``, have a needle: a line ``#key=dddd`` at a random depth, and
``#key=`` with the same four digits at the end. The model must predict these digits. ``bits`` is the
loss in bits per byte over sequences without a needle, and the curve ``bits_by_position`` is that
loss in each sixteenth of a sequence. ``log_rank`` is the rank of log P, where P holds the
probabilities of the next byte after each of 1024 tokens of these sequences.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.nn import Transformer
from commandline.errors import UsageError
from evals.measures.ranks import rank
from evals.task import BatchResult, Metric
from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.answers import SequenceBatch, whole_answers
from evals.tasks.families.sequence import SequenceTask, presets

LINE = b"\n#key="
DIGITS = 4
PLANTED = len(LINE) + DIGITS + 1  # the length of the needle's line with the newlines around it
SHORTEST = 4 * PLANTED
RANKED = 1024  # number of tokens over which the rank of log P is computed
PIECES = 16  # number of parts of a sequence in ``bits_by_position``

_LEFT_OUT = re.compile(
    r"(^|/)(tests?|idle_test|site-packages|dist-packages|__pycache__)/"
    r"|^(_sysconfigdata|config-|encodings/|lib2to3/|distutils/)"
)


@cache
def corpus() -> tuple[dict[str, np.ndarray], str]:
    """The bytes of the "train" and "test" texts, and the digest of both."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name, path in sorted(files.items()):
        if not _LEFT_OUT.search(name):
            package = name.split("/")[0].removesuffix(".py")
            held_out = int(hashlib.sha256(package.encode()).hexdigest()[-1], 16) < 2
            parts["test" if held_out else "train"].append(path.read_bytes())
    texts = {split: b"\n".join(files) for split, files in parts.items()}
    if min(map(len, texts.values())) < 2**18:
        raise UsageError(
            f"language-model reads the .py files of Python's standard library; {root} has too few"
        )
    digest = hashlib.sha256(texts["train"] + b"\0" + texts["test"]).hexdigest()[:16]
    return {split: np.frombuffer(text, dtype=np.uint8) for split, text in texts.items()}, digest


def draw(seed: int, split: str, length: int, start: int, stop: int, settings: Any) -> SequenceBatch:
    """Draw sequences. The random numbers of a sequence give its start in the text, the depth of the
    needle and its digits, in this order."""
    if length < SHORTEST:
        raise UsageError(f"a length of language-model must be >= {SHORTEST}, got {length}")
    text = corpus()[0]["train" if split in ("train", "validation") else "test"]
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
    """The metrics: accuracy of the digits in the split ``planted``, otherwise bits per byte."""
    count, answers = len(batch.tokens), batch.answers[batch.asked]
    if len(answers) == count * DIGITS:
        scores = whole_answers(logits, batch).metrics
        return BatchResult({"needle": scores["exact"], "digits": scores["accuracy"]})
    bits = F.cross_entropy(logits.double(), answers, reduction="none") / math.log(2)
    rows = bits.reshape(count, -1)
    pieces = torch.stack([piece.mean(dim=-1) for piece in rows.tensor_split(PIECES, dim=-1)], -1)
    last = pieces[:, -PIECES // 4 :].mean(dim=-1)
    return BatchResult({"bits": bits, "bits_last": last}, {"bits_by_position": pieces})


def frequencies(settings: Any) -> Tensor:
    """How often each byte occurs in the training text, (256,)."""
    return torch.from_numpy(np.bincount(corpus()[0]["train"], minlength=256))


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
    about="Byte-level language modelling of the Python standard library's sources: bits per byte, "
    "and the four digits of a needle planted in the text.",
    version=f"{GENERATOR}, language model 2",
    draw=draw,
    vocabulary=256,
    chance_score=8.0,
    presets=presets(
        smoke=dict(
            lengths=(64, 256), heads=4, learning_rate=2e-3, train_shortest=64,
            train_longest=64, test_sequences=16, test_least=4, test_items=2**13,
        ),
        quick=dict(
            lengths=(128, 256, 512, 1024, 2048), steps=3000, batch=64, width=128, heads=4,
            learning_rate=2e-3, train_shortest=128, train_longest=128,
        ),
        paper=dict(
            lengths=(1024, 2048, 4096, 8192, 16384), steps=20000, batch=64, width=384, heads=6,
            depth=6, learning_rate=1e-3, train_shortest=1024, train_longest=1024, test_items=2**21,
        ),
    ),
    read=read,
    read_states=log_rank,
    frequencies=frequencies,
    text=lambda: corpus()[1],
    splits={"": "test", "planted_": "planted"},
    trained_score=None,
    metrics=(
        Metric("bits", "Bits per byte", digits=2, lower_is_better=True),
        Metric("bits_last", "Bits per byte, last quarter", digits=2, lower_is_better=True),
        Metric("planted_needle", "Needles found (all four digits right), %", 100, 1),
        Metric("planted_digits", "Digits of needles right, %", 100, 1),
        Metric("log_rank", "Rank of log P over 1024 tokens", digits=0, optional=True),
    ),
)  # fmt: skip
