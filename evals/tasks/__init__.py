"""The tasks and experiments by name. A new built-in one is a file here and an entry in a list."""

from collections import ChainMap
from typing import Any, cast

from evals.task import Task
from evals.tasks import (
    flip_flop,
    language_model,
    local_count,
    max_retrieval,
    mqar,
    needle,
    transduction,
    two_back,
)
from evals.tasks.checks import check_task
from evals.tasks.digits.active import ACTIVE_LEARNING
from evals.tasks.digits.classification import CLASSIFICATION
from evals.tasks.digits.continual import CONTINUAL
from evals.tasks.digits.experiment import Experiment

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        max_retrieval.TASK,
        needle.TASK,
        mqar.TASK,
        flip_flop.TASK,
        transduction.COPY,
        transduction.REVERSE,
        transduction.SORT,
        local_count.TASK,
        two_back.TASK,
        language_model.TASK,
    )
}

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (CLASSIFICATION, ACTIVE_LEARNING, CONTINUAL)
}


# Tasks and experiments by name; a view of both dicts.
EVALS = ChainMap[str, Any](cast("Any", EXPERIMENTS), cast("Any", TASKS))


def register_task(task: Task) -> Task:
    """Add a task, so that ``python -m evals NAME --plugin FILE.py`` runs it.

    Args:
        task: a `SequenceTask`, a `RetrievalTask` or your own subclass of `Task`. "Your own task" in
            docs/evals.md has an example.

    Returns:
        The task.

    Raises:
        ValueError: the name is taken or malformed, or a field is invalid.
    """
    if not isinstance(task, Task):
        raise ValueError(f"register_task needs a task, got {task!r}")
    if task.name in EVALS:
        raise ValueError(f"task name {task.name!r} is taken")
    if not task.name.isascii() or not task.name.replace("-", "").isalnum() or task.name[0] == "-":
        raise ValueError(
            "task name must be letters, digits and hyphens and not start with a hyphen, "
            f"got {task.name!r}"
        )
    check_task(task)
    TASKS[task.name] = task
    return task
