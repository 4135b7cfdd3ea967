"""The tuned values of a variant in words, and their validation scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNED = "tuned"  # in place of the value of a tuned setting, which differs between variants


def values_text(values: Mapping[str, float]) -> str:
    """Tuned values in words, such as "learning_rate 0.001"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def at_edge(tuned: Mapping[str, Any]) -> bool:
    """Whether the sweep chose the smallest or the largest of several candidates of a setting.

    Values beyond it may be better.
    """
    for name, chosen in tuned["values"].items():
        candidates = {candidate["values"][name] for candidate in tuned["tried"]}
        if len(candidates) > 1 and chosen in (min(candidates), max(candidates)):
            return True
    return False


def validation(tried: Mapping[str, Any]) -> float | None:
    """The mean validation score of a candidate; None if a seed failed."""
    scores = tried["scores"]
    return None if not scores or None in scores else sum(scores) / len(scores)


def chosen_score(tuned: Mapping[str, Any]) -> float | None:
    """The mean validation score of the chosen values; None without a sweep."""
    chosen = [tried for tried in tuned["tried"] if tried["values"] == tuned["values"]]
    return validation(chosen[0]) if chosen else None
