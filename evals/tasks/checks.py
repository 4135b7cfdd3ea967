"""Checks of a task when it is registered. Each error names the field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.task import MAX_LENGTH, NOTES, RECORDED, TUNABLE, Preset, Settings, Task


def check_task(task: Task) -> None:
    """Raise ValueError if a task has an invalid field."""
    if not task.presets:
        raise ValueError(f"task {task.name!r} needs a preset, such as 'quick'")
    for field, problem in _problems(task):
        raise ValueError(f"{field} of task {task.name!r} {problem}")
    for name, preset in task.presets.items():
        for field, problem in _preset_problems(task, preset):
            raise ValueError(f"{field} of preset {name!r} of task {task.name!r} {problem}")


def _problems(task: Task) -> Iterator[tuple[str, str]]:
    """The invalid fields, and what is wrong with each."""
    if unknown := sorted(set(task.presets) - set(NOTES)):
        yield "presets", f"must be among {', '.join(NOTES)}, got {', '.join(unknown)}"
    for name, preset in task.presets.items():
        if not isinstance(preset, Preset):
            yield "presets", f"must be Preset, got {preset!r} for {name!r}"
    if not isinstance(task.about, str) or not task.about:
        yield "about", f"must be a description, got {task.about!r}"
    if not task.metrics:
        yield "metrics", "must have the score, got none"
    if "" not in task.splits:
        yield "splits", f"must have the key '', of the split with the score, got {task.splits!r}"
    if task.score.lower_is_better and task.trained_score is not None:
        reason = f"because lower values of {task.score.name} are better"
        yield "trained_score", f"must be None, {reason}, got {task.trained_score}"


def _preset_problems(task: Task, preset: Preset) -> Iterator[tuple[str, str]]:
    if not isinstance(preset.settings, Settings):
        yield "settings", f"must be settings such as SequenceSettings, got {preset.settings!r}"
    for name in ("lengths", "variants", "positions"):
        values = getattr(preset, name)
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            yield name, f"must be a non-empty tuple, got {values!r}"
        if len(set(values)) < len(values):
            yield name, f"must not repeat an entry, got {values!r}"
    if wrong := [x for x in preset.positions if x not in task.encodings]:
        yield "positions", f"must be among {', '.join(task.encodings)}, got {wrong[0]!r}"
    for length in preset.lengths:
        if type(length) is not int or not 2 <= length <= MAX_LENGTH:
            yield "lengths", f"must be ints from 2 to {MAX_LENGTH}, got {length!r}"
    if type(preset.seeds) is not int or preset.seeds < 1:
        yield "seeds", f"must be an int >= 1, got {preset.seeds!r}"
    if isinstance(preset.sweep, Mapping):
        for name, values in preset.sweep.items():
            try:
                checked_candidates(name, values)
            except ValueError as error:
                yield "sweep", str(error)
    elif preset.sweep != RECORDED:
        yield "sweep", f"must be a dict or {RECORDED!r}, got {preset.sweep!r}"
    for variant, settings in preset.variant_settings.items():
        if unknown := [name for name in settings if name not in vars(preset.settings)]:
            yield "variant_settings", f"must name settings, got {unknown[0]!r} for {variant!r}"
        try:
            replace(preset.settings, **settings)
        except (ValueError, TypeError) as error:
            yield "variant_settings", f"for {variant!r}: {error}"


def checked_candidates(name: str, values: Any) -> list[float]:
    """The candidate values of a setting in a sweep; raises ValueError if they are invalid."""
    if name not in TUNABLE:
        raise ValueError(f"must tune {', '.join(TUNABLE)}, got {name!r}")
    listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
    numbers = all(type(x) in (int, float) and math.isfinite(x) for x in listed)
    if not numbers or not 2 <= len(listed) == len({*map(float, listed)}):
        raise ValueError(f"must give {name} two or more different numbers, got {values!r}")
    return [float(value) for value in listed]
