"""Contexts: slices of a text in which the facts of all retrieval tasks are planted.

One context serves every measurement. A context for n tokens has n − 64 tokens. The others are left
for a question and its answer, so that no token stands at a position above n. Each fact is a line of
its own at the end of a sentence or line of the text, at random depths. The tasks follow RULER
(Hsieh et al. 2024, arXiv:2404.06654), with facts short enough for 512 tokens:

    one needle        "The secret number is 4821."
    several keys      "The number of apple is 4821." for four words; the question asks for one
    several queries   the same facts; the question asks for two of the numbers
    several values    "One price of tiger is 4821." for two prices; the question asks for both
    variable tracking "Let raven = 4821.", "Let olive = raven.", "Let maple = olive."
    common word       four lists of six words; one word is in all lists, the others in one

The words, and the numbers, are not in the text, and a text with a sentence of these forms is an
error: it would compete with the fact. Everything is a pure function of the text, the
tokenizer, the seed, the length and the number of the sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from commandline.errors import UsageError
from evals.pretrained.loading import Loaded
from evals.tasks import draws

VERSION = 2  # change it when the contexts change
RESERVED = 64  # tokens for a question and its answer
LEAST_TEXT = 32  # tokens of the text in a context
NEEDLE = "one_needle"  # of the tasks in `evals.results.pretrained.RETRIEVAL`
LEAST_BREAKS = 4  # sentences or lines of the text in a context; facts can share a place
_KEYS, _VALUES, _CHAIN, _LISTS, _LISTED = 4, 2, 3, 4, 6
_DRAWS = 1024  # random numbers for one context
_STOPS = (".", "!", "?")
_PLANTED, _TEXT, _NEEDLE = range(3)  # kinds of tokens


POOL = (
    "anchor apple arrow autumn bamboo banana barrel beacon blanket bottle bridge bucket butter "
    "cabin camel candle carpet castle cherry chimney circle cloud coffee copper cotton cradle "
    "dragon eagle ember falcon feather fiddle forest fountain garden ginger glacier hammer harbor "
    "helmet honey island jacket jungle kettle ladder lantern lemon lizard magnet maple marble "
    "meadow mirror monkey mountain needle olive orange oyster panther parrot pebble pepper piano "
    "pillow pirate planet pocket pumpkin rabbit raven ribbon river rocket saddle salmon shadow "
    "silver spider summer tiger timber tomato tunnel turtle valley velvet violin walnut whistle "
    "willow window winter wizard zebra"
).split()
# The forms of the planted sentences, up to the number or word that answers a question.
_FORMS = re.compile(
    r"The secret number is|The number of \w+ is|One price of \w+ is|^Let \w+ =|^Words:",
    re.MULTILINE,
)
_LOWEST, _NUMBERS = 1000, 9000  # numbers of four digits


@dataclass(frozen=True)
class Question:
    """A question after the context. values: the words or numbers that the answer names."""

    task: str
    prompt: Tensor  # tokens (P,)
    answer: Tensor  # tokens (A,)
    values: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Context:
    """tokens: (N,). is_text: (N,) bool, false at planted and special tokens. needle: the indices of
    the tokens of the number of the one needle; empty if nothing is planted."""

    tokens: Tensor
    is_text: Tensor
    needle: Tensor
    questions: Sequence[Question] = ()


@dataclass(frozen=True)
class _Facts:
    """Lines to plant, the needle in the first, and (task, question, answer, values). The lines of
    each range in ``ordered`` keep their order, all others are shuffled."""

    lines: list[str]
    ordered: tuple[range, ...]
    questions: list[tuple[str, str, str, tuple[str, ...]]]


def _facts(raw: np.ndarray, words: Sequence[str], numbers: Sequence[str]) -> _Facts:
    """The facts of one context."""
    word_count = _KEYS + 1 + _CHAIN + 1 + _LISTS * (_LISTED - 1)
    if len(words) < word_count:
        raise UsageError(
            f"--text must lack at least {word_count} of the {len(POOL)} words that are planted in "
            f"it, but it lacks {len(words)}"
        )
    order = draws.subsets(raw[None, : len(words)], word_count)[0]
    drawn_words = iter([words[int(i)] for i in order])
    # Without repetitions: raw has hundreds of times more random numbers than needed.
    drawn_numbers = iter(
        dict.fromkeys(numbers[int(i)] for i in draws.integers(raw[128:], len(numbers)))
    )
    keys = list(islice(drawn_words, _KEYS))
    priced, *chain = islice(drawn_words, 1 + _CHAIN)
    common = next(drawn_words)
    needle, *values = islice(drawn_numbers, 1 + _KEYS)
    first, second, start = islice(drawn_numbers, 3)
    lists = [list(islice(drawn_words, _LISTED - 1)) for _ in range(_LISTS)]
    for listed, position in zip(lists, raw[256:], strict=False):
        listed.insert(int(position % _LISTED), common)
    lines = [
        f"The secret number is {needle}.",
        *(f"The number of {key} is {value}." for key, value in zip(keys, values, strict=True)),
        *(f"Words: {', '.join(listed)}." for listed in lists),
        *(f"Let {b} = {a}." for a, b in pairwise([start, *chain])),
        f"One price of {priced} is {first}.",
        f"One price of {priced} is {second}.",
    ]
    (a, b), (x, y) = keys[1:3], values[1:3]
    questions = [
        (NEEDLE, "The secret number is", f" {needle}", (needle,)),
        ("several_keys", f"The number of {keys[0]} is", f" {values[0]}", (values[0],)),
        ("several_queries", f"The numbers of {a} and {b} are", f" {x} and {y}", (x, y)),
        ("several_values", f"The two prices of {priced}, in order, are", f" {first} and {second}",
         (first, second)),
        ("variable_tracking", f"The value of {chain[-1]} is", f" {start}", (start,)),
        ("common_word", "The most frequent word in the lists of words is", f" {common}", (common,)),
    ]  # fmt: skip
    prices = range(len(lines) - _VALUES, len(lines))
    return _Facts(lines, (range(prices[0] - _CHAIN, prices[0]), prices), questions)


class Contexts:
    """Draws contexts from a text.

    Args:
        loaded: the model, for its tokenizer.
        text: the text.
        planted: whether facts are planted. Without them a context has n tokens and no questions.
        seed: the seed of all draws.

    Raises:
        UsageError: facts are planted, and the text already has a sentence of such a form.
    """

    def __init__(self, loaded: Loaded, text: str, planted: bool, seed: int) -> None:
        self.loaded, self.planted, self.seed = loaded, planted, seed
        self.tokens, self.start = loaded.tokens(text), loaded.start()
        if planted:
            check_no_facts(text)
        self._words, self._numbers = absent_words(text), absent_numbers(text)

    @cached_property
    def breaks(self) -> np.ndarray:
        """The indices of tokens that begin a sentence or a line, in ascending order."""
        unique, where = np.unique(self.tokens.numpy(), return_inverse=True)
        texts = [self.loaded.text_inside(int(token)) for token in unique]
        line = np.array(["\n" in text for text in texts], dtype=bool)[where]
        stop = np.array([text.endswith(_STOPS) for text in texts], dtype=bool)[where]
        space = np.array([text[:1].isspace() for text in texts], dtype=bool)[where]
        after = line[:-1] | (stop[:-1] & space[1:])  # "." in "0.5" ends nothing
        return np.concatenate(([0], 1 + np.flatnonzero(after)))

    def draw(self, length: int, sample: int) -> Context:
        """The context of a sample.

        Raises:
            UsageError: the length is too small, or the text too short or without sentences.
        """
        raw = draws.words(self.seed, "test", length, sample, sample + 1, _DRAWS)[0]
        if not self.planted:
            begin, end = self._slice(raw, length - len(self.start), length)
            return self._context([_kind(self.tokens[begin:end], _TEXT)], [])
        facts = _facts(raw, self._words, self._numbers)
        lines = [_kind(self.loaded.tokens(f"\n{line}\n"), _PLANTED) for line in facts.lines]
        room = length - RESERVED - len(self.start) - sum(line.shape[1] for line in lines)
        begin, end = self._slice(raw, room, length)
        questions = [self._question(*question) for question in facts.questions]
        if max(len(q.prompt) + len(q.answer) for q in questions) > RESERVED:
            raise UsageError(
                f"--model must have a tokenizer that needs at most {RESERVED} tokens for a "
                "question of about 60 letters"
            )
        needle = questions[0]
        lines[0][1, len(needle.prompt) : len(needle.prompt) + len(needle.answer)] = _NEEDLE
        return self._context(self._planted(raw[512:], begin, end, lines, facts), questions)

    def _slice(self, raw: np.ndarray, size: int, length: int) -> tuple[int, int]:
        """The begin and end of ``size`` tokens of the text that start at a sentence or line."""
        if size < LEAST_TEXT:
            least = length + LEAST_TEXT - size
            raise UsageError(f"--lengths must be at least {least}, got {length}")
        starts = self.breaks[self.breaks + size <= len(self.tokens)]
        if len(starts) == 0:
            raise UsageError(
                f"--text must have at least {size} tokens for the length {length}, got "
                f"{len(self.tokens)}"
            )
        begin = int(starts[draws.integers(raw[400:401], len(starts))[0]])
        return begin, begin + size

    def _planted(
        self, raw: np.ndarray, begin: int, end: int, lines: list[Tensor], facts: _Facts
    ) -> list[Tensor]:
        """The text with the lines in it, as pieces."""
        inside = self.breaks[(self.breaks > begin) & (self.breaks < end)]
        if len(inside) < LEAST_BREAKS:
            raise UsageError(
                f"--text must have at least {LEAST_BREAKS} sentences or lines in any {end - begin} "
                f"tokens, got {len(inside)}"
            )
        random_positions = begin + draws.uniforms(raw[: len(lines)]) * (end - begin)
        insertions = sorted(int(inside[np.abs(inside - x).argmin()]) for x in random_positions)
        order = draws.subsets(raw[None, 64 : 64 + len(lines)], len(lines))[0].tolist()
        for group in facts.ordered:
            slots = sorted(order.index(line) for line in group)
            for slot, line in zip(slots, group, strict=True):
                order[slot] = line
        pieces = []
        for line, start, stop in zip(order, [begin, *insertions], insertions, strict=False):
            pieces += [_kind(self.tokens[start:stop], _TEXT), lines[line]]
        return [*pieces, _kind(self.tokens[insertions[-1] : end], _TEXT)]

    def _context(self, pieces: Sequence[Tensor], questions: Sequence[Question]) -> Context:
        tokens, kinds = torch.cat([_kind(self.start, _PLANTED), *pieces], 1)
        return Context(tokens, kinds == _TEXT, (kinds == _NEEDLE).nonzero()[:, 0], questions)

    def _question(self, task: str, question: str, answer: str, values: tuple[str, ...]) -> Question:
        """The answer begins at the first token that it adds to the question or changes in it."""
        before = self.loaded.tokens(f"\n{question}")
        joined = self.loaded.tokens(f"\n{question}{answer}")
        size = min(len(before), len(joined))
        begin = int((before[:size] == joined[:size]).cumprod(0).sum())
        return Question(task, joined[:begin], joined[begin:], values)


def _kind(tokens: Tensor, kind: int) -> Tensor:
    """Tokens (N,) with their kind, (2, N)."""
    return torch.stack([tokens, torch.full_like(tokens, kind)])


# ---- words and numbers -----------------------------------------------------------------------


def absent_words(text: str) -> list[str]:
    """The words of the pool that are not in the text."""
    present = set(re.findall(r"\w+", text.lower()))
    return [word for word in POOL if word not in present]


def check_no_facts(text: str) -> None:
    """Raise if the text has a sentence of the form of a planted one, which could be mistaken for
    it."""
    if (match := _FORMS.search(text)) is not None:
        line = 1 + text.count("\n", 0, match.start())
        raise UsageError(
            "--text must not have sentences of the forms that are planted in it, got "
            f"{match[0]!r} in line {line}; take another text, or measure only the loss and the "
            "sharpness with --measures loss,sharpness"
        )


def absent_numbers(text: str) -> list[str]:
    """The numbers of four digits that are not in the text."""
    present = set(re.findall(r"\d+", text))
    every = map(str, range(_LOWEST, _LOWEST + _NUMBERS))
    return [number for number in every if number not in present]
