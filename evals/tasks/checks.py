"""Checks of a task when it is registered. Each error names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.task import MAX_LENGTH, NOTES, RECORDED, TUNABLE, Preset, Settings, Task


def check_task(task: Task) -> None:
    """Raise ValueError if a task has an invalid field."""
    of = f"of task {task.name!r}"
    if not task.presets:
        raise ValueError(f"task {task.name!r} needs a preset, such as 'quick'")
    if unknown := sorted(set(task.presets) - set(NOTES)):
        raise ValueError(f"presets {of} must be among {', '.join(NOTES)}, got {', '.join(unknown)}")
    for name, preset in task.presets.items():
        if not isinstance(preset, Preset):
            raise ValueError(f"presets {of} must be Preset, got {preset!r} for {name!r}")
    if not isinstance(task.about, str) or not task.about:
        raise ValueError(f"about {of} must be a description, got {task.about!r}")
    if not task.metrics:
        raise ValueError(f"metrics {of} must have the score, got none")
    if task.score.lower_is_better and task.trained_score is not None:
        raise ValueError(
            f"trained_score {of} must be None, because lower values of {task.score.name} are "
            f"better, got {task.trained_score}"
        )
    for name, preset in task.presets.items():
        _check_preset(task, f"of preset {name!r} {of}", preset)


def _check_preset(task: Task, of: str, preset: Preset) -> None:
    if not isinstance(preset.settings, Settings):
        raise ValueError(
            f"settings {of} must be settings such as SequenceSettings, got {preset.settings!r}"
        )
    for name, allowed in (("lengths", None), ("variants", None), ("positions", task.positions)):
        values = getattr(preset, name)
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name} {of} must be a non-empty tuple, got {values!r}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} {of} must not repeat an entry, got {values!r}")
        if allowed is not None and (wrong := [x for x in values if x not in allowed]):
            raise ValueError(f"{name} {of} must be among {', '.join(allowed)}, got {wrong[0]!r}")
    for length in preset.lengths:
        if type(length) is not int or not 2 <= length <= MAX_LENGTH:
            raise ValueError(f"lengths {of} must be ints from 2 to {MAX_LENGTH}, got {length!r}")
    if type(preset.seeds) is not int or preset.seeds < 1:
        raise ValueError(f"seeds {of} must be an int >= 1, got {preset.seeds!r}")
    if preset.sweep != RECORDED:
        if not isinstance(preset.sweep, Mapping):
            raise ValueError(f"sweep {of} must be a dict or {RECORDED!r}, got {preset.sweep!r}")
        for name, values in preset.sweep.items():
            try:
                checked_candidates(name, values)
            except ValueError as error:
                raise ValueError(f"sweep {of} {error}") from error
    for variant, settings in preset.variant_settings.items():
        if unknown := [name for name in settings if name not in vars(preset.settings)]:
            raise ValueError(
                f"variant_settings {of} must name settings, got {unknown[0]!r} for {variant!r}"
            )
        try:
            replace(preset.settings, **settings)
        except (ValueError, TypeError) as error:
            raise ValueError(f"variant_settings {of} for {variant!r}: {error}") from error


def checked_candidates(name: str, values: Any) -> list[float]:
    """The candidate values of a setting in a sweep; raises ValueError if they are invalid."""
    if name not in TUNABLE:
        raise ValueError(f"must tune {', '.join(TUNABLE)}, got {name!r}")
    listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
    numbers = all(type(x) in (int, float) and math.isfinite(x) for x in listed)
    if not numbers or not 2 <= len(listed) == len({*map(float, listed)}):
        raise ValueError(f"must give {name} two or more different numbers, got {values!r}")
    return [float(value) for value in listed]
