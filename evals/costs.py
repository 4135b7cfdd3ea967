"""What a run would cost: a few training steps and one chunk of each test, timed here and now."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from evals.cells import is_out_of_memory
from evals.jobs import Job, lean_arithmetic
from evals.tasks import TASKS
from evals.training import CHUNK_ITEMS, evaluate, train

if TYPE_CHECKING:
    from evals.run import Run

STEPS = 3


def seconds(job: Job, device: str) -> float:
    """Estimated CPU seconds of one job that has not begun: its training and its tests."""
    task, settings = TASKS[job.task], job.settings
    longest = settings.train_longest
    middle = settings.train_shortest + (longest - settings.train_shortest) // 2
    middle -= (middle - settings.train_shortest) % settings.train_stride
    few = replace(
        settings,
        steps=STEPS,
        train_shortest=middle,
        train_longest=middle,
        batch=settings.share(middle),
    )

    def trained() -> tuple[nn.Module, float]:
        began = time.process_time()
        model = train(
            task, job.variant, job.positions, job.seed, few, device, lambda step, loss, part: None
        )
        return model, time.process_time() - began

    first, (model, second) = trained()[1], trained()  # the first one also allocates
    total = min(first, second) / STEPS * settings.steps
    for length, tests in job.tests.items():
        count = settings.sequences(length)
        chunk = min(count, max(1, CHUNK_ITEMS // task.tokens(length)))
        one = replace(settings, test_sequences=chunk, test_least=1)
        began = time.process_time()
        evaluate(task, model, tests, job.seed, length, one, device, lambda part: None)
        total += (time.process_time() - began) * count / chunk
    return total


def _seconds_if_it_fits(job: Job, device: str) -> float:
    try:
        return seconds(job, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"  {job}: memory runs out here, and its rows would say so")
        return 0.0


def show(run: Run) -> None:
    """Print every job, and what all of them would take on the run's workers."""
    known: dict[tuple[str, str, str], float] = {}
    device = "cuda:0" if run.options.device == "cuda" else run.options.device
    total = 0.0
    for job in run.jobs:
        kind = (job.task, str(job.variant), job.positions)
        if kind not in known:
            with lean_arithmetic():
                known[kind] = _seconds_if_it_fits(job, device)
            if device != "cpu":
                torch.cuda.empty_cache()
        rows = sum(map(len, job.tests.values()))
        print(f"  {job}: {rows} rows, about {known[kind]:.0f} s")
        total += known[kind]
    workers = max(1, min(run.workers, len(run.jobs)))
    print(
        f"about {total / workers / 60:.1f} minutes on {workers} worker(s), by {STEPS} steps and a "
        "chunk of each test timed here; models that are there already cost less"
    )
