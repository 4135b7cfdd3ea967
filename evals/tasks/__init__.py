"""The tasks, by name. A new one is a file here and a word in this list."""

from evals.task import Task
from evals.tasks import flip_flop, language_model, max_retrieval, mqar, needle, transduction

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
        language_model.TASK,
    )
}
