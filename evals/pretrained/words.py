"""Words, numbers and forms that a text does not contain, for the sentences planted in it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from commandline.errors import UsageError
from evals.tasks import draws

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


def pick_words(raw: np.ndarray, words: Sequence[str], count: int) -> list[str]:
    """``count`` different words in random order; raw: at least len(words) random uint64."""
    if len(words) < count:
        raise UsageError(
            f"--text must lack at least {count} of the {len(POOL)} words that are planted in it, "
            f"but it lacks {len(words)}"
        )
    order = draws.subsets(raw[None, : len(words)], count)[0]
    return [words[int(i)] for i in order]


def absent_numbers(text: str) -> list[str]:
    """The numbers of four digits that are not in the text."""
    present = set(re.findall(r"\d+", text))
    every = map(str, range(_LOWEST, _LOWEST + _NUMBERS))
    return [number for number in every if number not in present]


def pick_numbers(raw: np.ndarray, numbers: Sequence[str], count: int) -> list[str]:
    """``count`` different numbers; raw: at least 8 · count random uint64."""
    drawn = (numbers[int(i)] for i in draws.integers(raw, len(numbers)))
    different = list(dict.fromkeys(drawn))[:count]
    assert len(different) == count
    return different
