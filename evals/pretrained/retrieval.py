"""Asks the questions of a context, and scores the answers.

exact     1 if every token of the right answer is the most probable one, given those before it. This
          is what greedy decoding would write.
logprob   the mean log-probability of the answer's tokens
greedy    the share of the answer's words and numbers in the text that greedy decoding writes, in
          any order; only on request
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    """The share of the answer's values that greedy decoding writes, not as a part of another word
    or number."""
    ids: Tensor = question.prompt
    written: list[int] = []
    for _ in range(len(question.answer) + MORE):
        hidden, cache = reader.read(ids[None], cache)
        written.append(int(reader.logits(hidden[:, -1:])[0, 0].argmax()))
        ids = torch.tensor(written[-1:])
    words = re.findall(r"\w+", tokenizer.decode(written))
    return sum(value in words for value in question.values) / len(question.values)


def scores(
    reader: Reader, cache: Any, questions: Sequence[Question], tokenizer: Any | None = None
) -> dict[str, float]:
    """The scores of all questions, such as ``one_needle`` and ``one_needle_logprob``, and their
    means ``retrieval`` and ``retrieval_logprob``. With a tokenizer also those of greedy decoding.
    """
    metrics: dict[str, float] = {}
    for question in questions:
        answer_scores = ask(reader, cache, question)
        metrics[question.task] = answer_scores["exact"]
        metrics[f"{question.task}_logprob"] = answer_scores["logprob"]
        if tokenizer is not None:
            metrics[f"{question.task}_greedy"] = greedy(reader, cache, question, tokenizer)
    for suffix in ("", "_logprob", "_greedy")[: 2 if tokenizer is None else 3]:
        values = [metrics[question.task + suffix] for question in questions]
        metrics[f"retrieval{suffix}"] = sum(values) / len(values)
    return metrics
