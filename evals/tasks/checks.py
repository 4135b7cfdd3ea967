"""Checks of a task when it is registered."""

from __future__ import annotations

from evals.task import Task


def check_task(task: Task) -> None:
    """Raise ValueError, which names the field, if a task has an invalid field."""
    if task.score.lower_is_better and task.trained_score is not None:
        raise ValueError(
            f"trained_score of task {task.name!r} must be None, because lower values of "
            f"{task.score.name} are better, got {task.trained_score}"
        )
