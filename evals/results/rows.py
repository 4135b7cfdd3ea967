"""What a row of results must hold, and what is wrong with one that does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from evals.tasks import TASKS

Row = dict[str, Any]
STATUSES = ("ok", "nan", "oom")


def _is_text(x: object) -> bool:
    return isinstance(x, str)


def _is_whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_list(x: object) -> bool:
    return isinstance(x, list) and all(map(_is_number, x))


def _maps_to(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda x: isinstance(x, dict) and all(map(kind, x.values()))


_TEXT = ("a text", _is_text)
_WHOLE = ("an integer from 0 on", _is_whole)
_NUMBER = ("a finite number", _is_number)
_NUMBERS = ("finite numbers by name", _maps_to(_is_number))
_LISTS = ("lists of finite numbers by name", _maps_to(_is_list))
_FIELDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("key", "task", "variant", "positions"), _TEXT),
    **dict.fromkeys(("seed", "length", "sequences"), _WHOLE),
    "status": (f"one of {', '.join(STATUSES)}", lambda x: x in STATUSES),
    "message": _TEXT,
    "metrics": _NUMBERS,
    "curves": _LISTS,
    "learned": _LISTS,
    **dict.fromkeys(("chance", "cpu_seconds", "train_cpu_seconds"), _NUMBER),
    "settings": ("an object", lambda x: isinstance(x, dict)),
    **dict.fromkeys(("version", "schedule", "data", "device"), _TEXT),
    **dict.fromkeys(("torch", "attnzoo", "commit", "training"), _TEXT),
}
_SETTINGS = ("steps", "train_shortest", "train_longest")  # that tables and pictures name


def problem(row: object) -> str | None:
    """What is wrong with a row that was read, in words; None if nothing is."""
    if not isinstance(row, dict):
        return f"a row must be an object, got {_short(row)}"
    if lacking := [name for name in _FIELDS if name not in row]:
        return f"the row has no {', '.join(lacking)}"
    for name, (words, fits) in _FIELDS.items():
        if not fits(row[name]):
            return f"{name} must be {words}, got {_short(row[name])}"
    for name in _SETTINGS:
        if not _is_whole(row["settings"].get(name)):
            return f"settings must have {name}, an integer, got {_short(row['settings'])}"
    if row["status"] == "ok" and row["task"] in TASKS:
        score = TASKS[row["task"]].score.name
        if score not in row["metrics"]:
            return f"metrics has no {score}, although status is ok"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
