"""What a run would cost: a training step and a few test sequences of each kind, timed here and now.

A step is timed at the middle length of training. Tests are timed at two lengths n, and taken to
cost a·n + b·n² per sequence at all others. Runs of models of one size share what was timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from commandline.variants import VariantCall
from evals.harness.runs import Run
from evals.measures.arithmetic import is_out_of_memory, lean_arithmetic
from evals.task import HeadSample, Settings, Task
from evals.tasks import TASKS

TOKENS = 1024  # of the sequences that a test is timed on, unless one has more
MOST_TOKENS = 2048  # of the longest of them: longer ones are extrapolated to


class Timed(NamedTuple):
    """Seconds of a training step, and of a test sequence of n keys: a·n + b·n², by variant."""

    step: float
    tests: dict[VariantCall | None, tuple[float, float]]

    def of(self, run: Run) -> float:
        """An estimate of a whole run that has not begun."""
        task, settings = TASKS[run.task], run.settings
        total = self.step * settings.steps
        for length, tests in run.tests.items():
            n, count = task.tokens(length), settings.sequences(length) * len(task.splits)
            for substitute in tests.values():
                a, b = self.tests[substitute]
                total += count * (a * n + b * n * n)
        return total


def kind(run: Run) -> tuple[object, ...]:
    """What the cost of a run depends on: equal for tasks that differ in their data alone."""
    task = TASKS[run.task]
    sizes = tuple(task.tokens(n) for n in (run.settings.train_longest, *run.tests))
    substitutes = tuple(
        sorted({str(substitute) for tests in run.tests.values() for substitute in tests.values()})
    )
    return type(task), run.settings, run.positions, run.variant, sizes, substitutes


def timed(run: Run, device: str) -> Timed:
    """Time one kind of run."""
    task, settings = TASKS[run.task], run.settings
    model = task.build(run.variant, run.positions, settings).to(device)
    step = _seconds(lambda: _step(task, model, settings, device), device)
    model.eval()
    substitutes = dict.fromkeys(
        substitute for tests in run.tests.values() for substitute in tests.values()
    )
    short = settings.train_longest
    long = max([n for n in run.tests if task.tokens(n) <= MOST_TOKENS], default=short)
    tests = {}
    for substitute in substitutes:
        first, last = (_test(task, model, settings, n, substitute, device) for n in (short, long))
        tests[substitute] = _line_and_square(task.tokens(short), first, task.tokens(long), last)
    return Timed(step, tests)


def _step(task: Task, model: nn.Module, settings: Settings, device: str) -> None:
    length = settings.train_shortest + (settings.train_longest - settings.train_shortest) // 2
    length -= (length - settings.train_shortest) % settings.train_stride
    batch = task.batch(0, "train", length, 0, settings.share(length), settings)
    task.loss(model, batch.to(device)).backward()


@torch.inference_mode()
def _test(
    task: Task,
    model: nn.Module,
    settings: Settings,
    length: int,
    substitute: VariantCall | None,
    device: str,
) -> float:
    """Seconds of a sequence, without a look at the heads."""
    split = next(iter(task.splits.values()))
    count = max(1, TOKENS // task.tokens(length))

    def once() -> None:
        batch = task.batch(0, split, length, 0, count, settings).to(device)
        task.measure(model, batch, HeadSample(0, 0))(substitute)

    return _seconds(once, device) / count


def _line_and_square(n: int, first: float, m: int, last: float) -> tuple[float, float]:
    """a and b, neither below 0, with a·n + b·n² = first and a·m + b·m² = last where they exist."""
    if m <= n:
        return first / n, 0.0
    b = max(0.0, (last / m - first / n) / (m - n))
    a = first / n - b * n
    return (a, b) if a >= 0 else (0.0, last / m**2)


def _seconds(work: Callable[[], None], device: str) -> float:
    """The second call's time, of the CPU or of the device: the first one also allocates."""
    on_cpu = device == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    work()
    if not on_cpu:
        torch.cuda.synchronize(device)
    began = clock()
    work()
    if not on_cpu:
        torch.cuda.synchronize(device)
    return clock() - began


def _timed_if_it_fits(run: Run, device: str) -> Timed | None:
    try:
        return timed(run, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def show(runs: Sequence[Run], device: str, workers: int) -> None:
    """Print every run, and what all of them would take on so many workers."""
    known: dict[tuple[object, ...], Timed | None] = {}
    device = "cuda:0" if device == "cuda" else device
    total = 0.0
    for run in runs:
        if (of := kind(run)) not in known:
            with lean_arithmetic():
                known[of] = _timed_if_it_fits(run, device)
            if device != "cpu":
                torch.cuda.empty_cache()
        found, rows = known[of], sum(map(len, run.tests.values()))
        if found is None:
            print(f"  {run}: {rows} rows; memory runs out here, and they would say so")
            continue
        print(f"  {run}: {rows} rows, about {found.of(run):.0f} s", flush=True)
        total += found.of(run)
    workers = max(1, min(workers, len(runs)))
    print(
        f"about {total / workers / 60:.1f} minutes on {workers} worker(s): an estimate, from a "
        "training step and a few test sequences of each kind timed here; models that are there "
        "already cost less"
    )
