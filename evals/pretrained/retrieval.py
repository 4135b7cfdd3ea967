"""Asks the questions of a context, and scores the answers.

exact     1 if every token of the right answer is the most probable one, given those before it. This
          is what greedy decoding would write.
logprob   the mean log-probability of the answer's tokens
greedy    the share of the answer's words and numbers in the text that greedy decoding writes, in
          any order; only on request
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from evals.pretrained.contexts import Question
from evals.pretrained.reading import Reader, surprisal

MORE = 8  # greedy decoding writes this many tokens more than the answer has


def ask(reader: Reader, cache: Any, question: Question) -> dict[str, float]:
    """The scores ``exact`` and ``logprob`` of a question after the context in the cache."""
    ids = torch.cat([question.prompt, question.answer])[:-1]
    hidden, _ = reader.read(ids[None], cache)
    logits = reader.logits(hidden[:, len(question.prompt) - 1 :])[0].float()
    answer = question.answer.to(logits.device)
    exact = bool((logits.argmax(-1) == answer).all())
    return {"exact": float(exact), "logprob": -float(surprisal(logits, answer).mean())}


def greedy(reader: Reader, cache: Any, question: Question, tokenizer: Any) -> float:
    """The share of the answer's values that greedy decoding writes."""
    ids: Tensor = question.prompt
    written: list[int] = []
    for _ in range(len(question.answer) + MORE):
        hidden, cache = reader.read(ids[None], cache)
        written.append(int(reader.logits(hidden[:, -1:])[0, 0].argmax()))
        ids = torch.tensor(written[-1:])
    text = tokenizer.decode(written)
    return sum(_names(text, value) for value in question.values) / len(question.values)


def _names(text: str, value: str) -> bool:
    """Whether a word or number stands in the text, not as a part of another.

    >>> _names("It is 48213.", "4821")
    False
    """
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def scores(
    reader: Reader, cache: Any, questions: Any, tokenizer: Any | None = None
) -> dict[str, float]:
    """The scores of all questions, such as ``one_needle`` and ``one_needle_logprob``, and their
    means ``retrieval`` and ``retrieval_logprob``. With a tokenizer also those of greedy decoding.
    """
    by_suffix: dict[str, list[float]] = {"": [], "_logprob": [], "_greedy": []}
    metrics: dict[str, float] = {}
    for question in questions:
        answer_scores = ask(reader, cache, question)
        values = {"": answer_scores["exact"], "_logprob": answer_scores["logprob"]}
        if tokenizer is not None:
            values["_greedy"] = greedy(reader, cache, question, tokenizer)
        for suffix, value in values.items():
            metrics[question.task + suffix] = value
            by_suffix[suffix].append(value)
    means = {f"retrieval{suffix}": sum(x) / len(x) for suffix, x in by_suffix.items() if x}
    return metrics | means
