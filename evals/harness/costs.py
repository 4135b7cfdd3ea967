"""Estimates the time of runs from short runs, or from single steps, timed on this machine.

Trials of experiments are run with a twentieth and with a tenth of their steps, after a run of one
step that loads the data; the time of all steps is extrapolated. For the runs of tasks, a training
step is timed at the middle train length, and an evaluation at two lengths n. At other lengths it is
assumed to take a·n + b·n² seconds per sequence. Runs that differ only in their seed share these
timings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from commandline.variants import VariantCall
from evals.harness.any_run import AnyRun
from evals.harness.progress import clock, counted
from evals.harness.runs import Run
from evals.harness.trials import Trials
from evals.measures.arithmetic import is_out_of_memory, lean_arithmetic
from evals.task import TUNABLE, HeadSample, Settings, Task
from evals.tasks import TASKS

TOKENS = 1024  # tokens per timed evaluation; longer sequences are timed one at a time
MOST_TOKENS = 2048  # the longest timed sequence; longer ones are extrapolated


class Timed(NamedTuple):
    """Timings of a model.

    step: seconds per training step. tests: for each variant substituted at inference (None: the
    trained variant), the coefficients (a, b); a test sequence takes a·n + b·n² seconds.
    """

    step: float
    tests: dict[VariantCall | None, tuple[float, float]]

    def of(self, run: AnyRun) -> float:
        """The estimated seconds of a whole run."""
        task, settings = TASKS[run.task], run.settings
        total = self.step * settings.steps
        for length, tests in run.tests.items():
            n, count = task.tokens(length), settings.sequences(length) * len(_splits(run))
            for substitute in tests.values():
                a, b = self.tests[substitute]
                total += count * (a * n + b * n * n)
        return total


class TimedTrials(NamedTuple):
    """The estimated seconds of the trials of one output layer with one seed."""

    seconds: float

    def of(self, run: AnyRun) -> float:
        return self.seconds


def _splits(run: AnyRun) -> Mapping[str, str]:
    assert isinstance(run, Run)
    return run.splits


def timing_key(run: AnyRun) -> tuple[object, ...]:
    """A key of all properties that affect a run's time. Runs with equal keys share timings."""
    if not isinstance(run, Run):
        return run.task, run.settings, run.variant, *run.tests
    task = TASKS[run.task]
    sizes = tuple(task.tokens(n) for n in (run.settings.train_longest, *run.tests))
    substitutes = tuple(
        sorted({str(substitute) for tests in run.tests.values() for substitute in tests.values()})
    )
    settings = tuple((n, x) for n, x in vars(run.settings).items() if n not in TUNABLE)
    return type(task), settings, run.positions, run.variant, sizes, substitutes


def timed(run: Run, device: str) -> Timed:
    """Time a training step of a run's model, and its evaluation with each substitute."""
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
        first, last = (
            _seconds_per_sequence(task, model, settings, n, substitute, device)
            for n in (short, long)
        )
        tests[substitute] = _line_and_square(task.tokens(short), first, task.tokens(long), last)
    return Timed(step, tests)


def _step(task: Task, model: nn.Module, settings: Settings, device: str) -> None:
    length = settings.train_shortest + (settings.train_longest - settings.train_shortest) // 2
    length -= (length - settings.train_shortest) % settings.train_stride
    batch = task.batch(0, "train", length, 0, settings.batch_size(length), settings)
    task.loss(model, batch.to(device)).backward()


@torch.inference_mode()
def _seconds_per_sequence(
    task: Task,
    model: nn.Module,
    settings: Settings,
    length: int,
    substitute: VariantCall | None,
    device: str,
) -> float:
    """Seconds to evaluate one sequence of this length, without measuring heads."""
    split = next(iter(task.splits.values()))
    count = max(1, TOKENS // task.tokens(length))

    def once() -> None:
        batch = task.batch(0, split, length, 0, count, settings).to(device)
        task.measure(model, batch, HeadSample(0, 0))(substitute)

    return _seconds(once, device) / count


def _line_and_square(n: int, first: float, m: int, last: float) -> tuple[float, float]:
    """Fit a·n + b·n² seconds to two timings. A negative coefficient is replaced by 0."""
    if m <= n:
        return first / n, 0.0
    b = max(0.0, (last / m - first / n) / (m - n))
    a = first / n - b * n
    return (a, b) if a >= 0 else (0.0, last / m**2)


def _seconds(work: Callable[[], None], device: str) -> float:
    """Call ``work`` twice and time the second call, because the first one also allocates memory.

    Returns seconds: CPU time on a CPU, wall time on a GPU.
    """
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


def _timed_if_it_fits(run: AnyRun, device: str) -> Timed | TimedTrials | None:
    try:
        if isinstance(run, Trials):
            return TimedTrials(run.estimated_seconds(device))
        assert isinstance(run, Run)
        return timed(run, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def show(runs: Sequence[AnyRun], device: str, workers: int, verbose: bool) -> None:
    """Print the estimated time of each task and in total; with ``verbose``, also of each run."""
    known: dict[tuple[object, ...], Timed | TimedTrials | None] = {}
    device = "cuda:0" if device == "cuda" else device
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if (key := timing_key(run)) not in known:
            with lean_arithmetic():
                known[key] = _timed_if_it_fits(run, device)
            if device != "cpu":
                torch.cuda.empty_cache()
        timing = known[key]
        if timing is not None:
            seconds.setdefault(run.task, []).append(timing.of(run))
        if timing is None:
            print(f"  {run}: does not fit into memory here")
        elif verbose:
            rows = sum(map(len, run.tests.values()))
            print(f"  {run}: {rows} results, about {timing.of(run):.0f} s", flush=True)
    workers = max(1, min(workers, len(runs)))
    for task, estimates in seconds.items():
        total = clock(sum(estimates))
        print(f"{task}: {counted(len(estimates), 'run')}, about {total} of computing time")
    total = sum(map(sum, seconds.values())) / workers
    timings = ["one training step and a few test sequences of each model"] * any(
        isinstance(run, Run) for run in runs
    ) + ["runs with a twentieth and a tenth of the training steps"] * any(
        isinstance(run, Trials) for run in runs
    )
    print(
        f"Total: about {clock(total)} (h:mm:ss or m:ss) on {counted(workers, 'worker')}. "
        f"This is an estimate: {' and '.join(timings)} were timed."
    )
