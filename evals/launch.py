"""Executes runs on worker processes, or in this process.

Each worker is spawned with one torch thread and sends its results after each point, which is an
eval length or a condition. Only the parent writes result files. If a worker dies, its pipe closes
and the parent repeats the run. If the repeated run is killed by SIGKILL at the same point, memory
probably ran out: the rows of this point get the status "oom" (all rows if the run died in
training). If the repeated run dies there with any other exit code, the run counts as failed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import torch

from commandline.errors import UsageError
from commandline.files import NotWritten
from commandline.variants import load_plugin
from evals.measures.arithmetic import lean_arithmetic
from evals.measures.metrics import Outcome
from evals.plugins import check_unchanged
from evals.progress import Progress
from evals.run import NOT_TRAINED, AnyRun, Message, RunContext


class Failure(NamedTuple):
    """A failed run: its name, the error in one line, and the traceback."""

    run: str
    reason: str
    traceback: str = ""

    @staticmethod
    def from_traceback(run: object, text: str) -> Failure:
        # After the header of a traceback, the first line without indent starts the error message.
        last = text.rsplit("Traceback (most recent call last):\n", 1)[-1]
        reason = next(line for line in last.splitlines() if line.strip() and line[0] != " ")
        return Failure(str(run), reason, text)


def _work_loop(pipe: Connection, context: RunContext) -> None:
    """The main function of a worker: execute runs from the pipe until None or the parent's exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        with lean_arithmetic():
            if context.plugin is not None:
                try:
                    check_unchanged(context.plugin, context.plugin_hash)
                except UsageError as error:
                    pipe.recv()
                    pipe.send(("stopped", str(error)))
                    return
                load_plugin(context.plugin, need_variant=False)
            while (run := pipe.recv()) is not None:
                try:
                    status = run.execute(context, pipe.send)
                except (BrokenPipeError, EOFError):
                    raise
                except NotWritten as error:  # the next run could not write either
                    pipe.send(("stopped", str(error)))
                except Exception:  # one failed run must not end the others
                    pipe.send(("failed", traceback.format_exc()))
                else:
                    pipe.send(("done", status))
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)


# By default glibc returns large freed blocks to the system. Getting them back takes a third of the
# time of an evaluation. malloc reads these variables at the start of a process; other libcs ignore
# them.
_KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class Listener(Protocol):
    """Receives the results and training losses of runs."""

    def row(
        self, run: Any, key: str, point: Any, outcome: Outcome, training: dict[str, Any]
    ) -> None: ...

    def loss(self, run: Any, step: int, value: float) -> None: ...


def _forward(listener: Listener, progress: Progress, run: AnyRun, message: Message) -> None:
    """Forward the message of a run to the listener or to the progress display."""
    match message:
        case ("stage", point, fraction):
            stage = run.point_text(point) if point else "training"
            progress.update(str(run), fraction, stage)
        case ("loss", step, value):
            listener.loss(run, step, value)
        case ("rows", point, outcomes, training):
            for key, outcome in outcomes.items():
                listener.row(run, key, point, outcome, training)


class _Worker:
    """A process, its current run, and the point it is working on (None: training)."""

    def __init__(self, context: RunContext) -> None:
        spawn = get_context("spawn")
        self.pipe, worker_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_work_loop, args=(worker_pipe, context), daemon=True)
        self.process.start()
        worker_pipe.close()
        self.run: AnyRun | None = None
        self.stage: Any = None

    def start(self, run: AnyRun) -> None:
        self.run, self.stage = run, None
        self.pipe.send(run)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


class Pool:
    """Executes runs on worker processes. A failed run does not end the others."""

    def __init__(self, contexts: list[RunContext], listener: Listener, progress: Progress) -> None:
        self.contexts = contexts  # one for each worker
        self.listener = listener
        self.progress = progress
        self.failures: list[Failure] = []
        self._deaths: dict[tuple[str, Any], int] = {}

    def execute(self, runs: Iterable[AnyRun]) -> list[Failure]:
        """Execute all runs and return the failures."""
        waiting = list(runs)
        for name, value in _KEEP_FREED.items():
            os.environ.setdefault(name, value)
        workers: dict[int, _Worker] = {}
        try:
            while waiting or any(w.run for w in workers.values()):
                for slot, context in enumerate(self.contexts):
                    if waiting and (slot not in workers or workers[slot].run is None):
                        if slot not in workers:
                            workers[slot] = _Worker(context)
                        self._start(workers, slot, waiting)
                pipes = {w.pipe: slot for slot, w in workers.items() if w.run is not None}
                if not pipes:  # the only workers were dead; waiting for none would last forever
                    continue
                for pipe in wait(list(pipes)):
                    slot = pipes[pipe]  # type: ignore[index]
                    try:
                        self._receive(workers[slot], workers[slot].pipe.recv())
                    except (EOFError, ConnectionResetError):
                        dead = workers.pop(slot)
                        waiting[:0] = self._after_death(dead)
        finally:
            for worker in workers.values():
                worker.stop()
        return self.failures

    def _start(self, workers: dict[int, _Worker], slot: int, waiting: list[AnyRun]) -> None:
        try:
            workers[slot].start(waiting[0])
        except (BrokenPipeError, ConnectionResetError):
            dead = workers.pop(slot)
            dead.run = waiting.pop(0)
            waiting[:0] = self._after_death(dead)
        else:
            waiting.pop(0)

    def _receive(self, worker: _Worker, message: Message) -> None:
        run = worker.run
        assert run is not None
        try:
            _forward(self.listener, self.progress, run, message)
        except UsageError as error:  # an invalid result must not end other runs
            failure = Failure(str(run), str(error))
            if failure not in self.failures:
                self.failures.append(failure)
        match message:
            case ("stage", point, _):
                worker.stage = point
            case ("rows", point, *_):
                tests = {n: t for n, t in run.tests.items() if n != point}
                worker.run = replace(run, tests=tests)
            case ("stopped", text):
                raise OSError(text)
            case ("failed", text):
                self._fail(Failure.from_traceback(run, text))
                worker.run = None
            case ("done", status):
                self.progress.finish(str(run), status)
                worker.run = None

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.progress.finish(failure.run, "failed")

    def _after_death(self, worker: _Worker) -> list[AnyRun]:
        """Handle a worker's death. Returns a list: empty, or one run with the lengths to repeat."""
        run, stage = worker.run, worker.stage
        assert run is not None
        worker.process.join()
        if not run.tests:
            self.progress.finish(str(run))
            return []
        code = worker.process.exitcode or 0
        deaths = self._deaths[str(run), stage] = self._deaths.get((str(run), stage), 0) + 1
        if deaths == 1:
            return [run]
        where = f"at {run.point_text(stage)}" if stage else "in training"
        if code != -signal.SIGKILL:
            self._fail(Failure(str(run), f"its process died twice {where}, exit code {code}"))
            return []
        failure = Outcome("oom", f"process killed twice {where}, probably out of memory")
        for point in [stage] if stage in run.tests else list(run.tests):
            for key in run.tests[point]:
                self.listener.row(run, key, point, failure, NOT_TRAINED)
        tests = {n: t for n, t in run.tests.items() if stage in run.tests and n != stage}
        if not tests:
            self.progress.finish(str(run), "out of memory")
            return []
        return [replace(run, tests=tests)]


def execute(
    runs: Sequence[AnyRun],
    context: RunContext,
    listener: Listener,
    progress: Progress,
    workers: int,
) -> list[Failure]:
    """Execute all runs, in this process if ``workers`` is 0, and return the failures."""
    if not runs:
        return []
    if workers == 0:
        return execute_here(runs, context, listener, progress)
    count = min(workers, len(runs))
    gpus = max(1, torch.cuda.device_count())
    # For "cuda" without an index, workers take the GPUs in rotation.
    all_gpus = context.device == "cuda"
    devices = [f"cuda:{i % gpus}" if all_gpus else context.device for i in range(count)]
    contexts = [replace(context, device=device) for device in devices]
    return Pool(contexts, listener, progress).execute(runs)


def execute_here(
    runs: Iterable[AnyRun], context: RunContext, listener: Listener, progress: Progress
) -> list[Failure]:
    """Execute all runs in this process (``--workers 0``) and return the failures."""
    failures = []
    for run in runs:
        try:
            with lean_arithmetic():
                status = run.execute(context, partial(_forward, listener, progress, run))
        except NotWritten:
            raise
        except Exception:  # one failed run must not end the others
            failures.append(Failure.from_traceback(run, traceback.format_exc()))
            progress.finish(str(run), "failed")
        else:
            progress.finish(str(run), status)
    return failures


def default_workers(device: str) -> int:
    """The default number of workers: one per core that this process may use, or one per GPU."""
    if device.startswith("cuda"):
        return 1 if ":" in device else max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
