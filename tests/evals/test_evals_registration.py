"""What `register_task` accepts: a wrong field is one error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from evals import Preset, SequenceSettings, SequenceTask, register_task
from evals.tasks import TASKS
from evals.tasks.checks import check_task
from evals.tasks.families.sequence import ACCURACY, LOSS

SETTINGS = SequenceSettings(steps=2, batch=2, train_shortest=2, train_longest=8)
PRESET: dict[str, Any] = {"lengths": (8, 16), "settings": SETTINGS, "variants": ("softmax",)}


def task(**fields: Any) -> SequenceTask:
    """A valid task named "mine", with some fields replaced."""
    presets = {"smoke": Preset(**PRESET)}
    good = {"name": "mine", "about": "A task.", "draw": None, "vocabulary": 4, "presets": presets}
    return SequenceTask(**{**good, **fields})


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    TASKS.pop("mine", None)


def test_a_valid_task_is_registered() -> None:
    assert register_task(task()) is TASKS["mine"]


@pytest.mark.parametrize("name", TASKS)
def test_built_in_tasks_are_valid(name: str) -> None:
    check_task(TASKS[name])


def test_only_scores_of_which_higher_ones_are_better_have_a_trained_score() -> None:
    assert task().trained_score == 0.95
    assert task(metrics=(LOSS, ACCURACY)).trained_score is None
    assert task(metrics=(ACCURACY,), trained_score=0.5).trained_score == 0.5
    message = "trained_score of task 'mine' must be None, because lower .* loss are better, got 0.5"
    with pytest.raises(ValueError, match=message):
        register_task(task(metrics=(LOSS,), trained_score=0.5))
