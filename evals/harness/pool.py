"""Executes runs on worker processes, or in this one.

Workers are spawned with one torch thread each and send their rows back as each length is done; the
parent alone writes. A worker that dies is known by its pipe: its run is tried once more, and if the
same length kills it again that length's rows say that memory ran out.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from commandline.files import NotWritten
from commandline.variants import load_plugin
from evals.harness.progress import Progress
from evals.harness.runs import NOT_TRAINED, Context, Message, Run, execute
from evals.measures.arithmetic import lean_arithmetic
from evals.measures.metrics import Outcome


def _serve(pipe: Connection, context: Context) -> None:
    """A worker's life: runs come through the pipe until None; a parent that died ends it too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    try:
        with lean_arithmetic():
            if context.plugin is not None:
                load_plugin(context.plugin)
            while (run := pipe.recv()) is not None:
                try:
                    execute(run, context, pipe.send)
                except (BrokenPipeError, EOFError):
                    raise
                except NotWritten as error:  # so would be whatever comes after it
                    pipe.send(("stopped", str(error)))
                except Exception:  # sent to the parent, which reports it and goes on with others
                    pipe.send(("failed", traceback.format_exc()))
                else:
                    pipe.send(("done",))
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)


# glibc gives blocks of many megabytes back to the system when they are freed, and touching them
# anew costs a third of a test's time. Read by malloc when a process starts; other libcs ignore it.
_KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class Listener(Protocol):
    """Who is told of what the runs do."""

    def row(
        self, run: Run, key: str, length: int, outcome: Outcome, training: dict[str, Any]
    ) -> None: ...

    def loss(self, run: Run, step: int, value: float) -> None: ...


def _tell(listener: Listener, progress: Progress, run: Run, message: Message) -> None:
    """Pass on what a run says of its work."""
    match message:
        case ("stage", length, fraction):
            progress.update(str(run), fraction, f"n = {length}" if length else "training")
        case ("loss", step, value):
            listener.loss(run, step, value)
        case ("rows", length, outcomes, training):
            for key, outcome in outcomes.items():
                listener.row(run, key, length, outcome, training)


class _Worker:
    """A process with the run that it has, and where it stands in it."""

    def __init__(self, context: Context) -> None:
        spawn = get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, context), daemon=True)
        self.process.start()
        theirs.close()
        self.run: Run | None = None
        self.stage: int | None = None

    def give(self, run: Run) -> None:
        self.run, self.stage = run, None
        self.pipe.send(run)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


class Pool:
    """Executes runs on worker processes; failures are kept as texts, and the other runs go on."""

    def __init__(self, contexts: list[Context], listener: Listener, progress: Progress) -> None:
        self.contexts = contexts  # one per worker
        self.listener = listener
        self.progress = progress
        self.failures: list[str] = []
        self._deaths: dict[tuple[str, int | None], int] = {}

    def run(self, runs: Iterable[Run]) -> list[str]:
        """Execute all runs and return what failed, in words."""
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
                        self._give(workers, slot, waiting)
                pipes = {w.pipe: slot for slot, w in workers.items() if w.run is not None}
                for pipe in wait(list(pipes)):
                    slot = pipes[pipe]  # type: ignore[index]
                    try:
                        self._hear(workers[slot], workers[slot].pipe.recv())
                    except (EOFError, ConnectionResetError):
                        dead = workers.pop(slot)
                        waiting[:0] = self._bury(dead)
        finally:
            for worker in workers.values():
                worker.stop()
        return self.failures

    def _give(self, workers: dict[int, _Worker], slot: int, waiting: list[Run]) -> None:
        try:
            workers[slot].give(waiting[0])
        except (BrokenPipeError, ConnectionResetError):
            dead = workers.pop(slot)
            dead.run = waiting.pop(0)
            waiting[:0] = self._bury(dead)
        else:
            waiting.pop(0)

    def _hear(self, worker: _Worker, message: Message) -> None:
        run = worker.run
        assert run is not None
        _tell(self.listener, self.progress, run, message)
        match message:
            case ("stage", length, _):
                worker.stage = length
            case ("rows", length, *_):
                tests = {n: t for n, t in run.tests.items() if n != length}
                worker.run = replace(run, tests=tests)
            case ("stopped", text):
                raise OSError(text)
            case ("failed", text):
                self.failures.append(f"{run}: {text}")
                self.progress.finish(str(run), "failed")
                worker.run = None
            case ("done",):
                self.progress.finish(str(run))
                worker.run = None

    def _bury(self, worker: _Worker) -> list[Run]:
        """What is left to do of a dead worker's run."""
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
        where = f"n = {stage}" if stage else "training"
        if code != -signal.SIGKILL:
            self.failures.append(f"{run}: its process died twice at {where}, exit code {code}")
            self.progress.finish(str(run), "failed")
            return []
        failure = Outcome("oom", f"process killed twice at {where}, as for want of memory")
        for length in [stage] if stage in run.tests else list(run.tests):
            for key in run.tests[length]:
                self.listener.row(run, key, length, failure, NOT_TRAINED)
        left = {n: t for n, t in run.tests.items() if stage in run.tests and n != stage}
        if not left:
            self.progress.finish(str(run), "out of memory")
            return []
        return [replace(run, tests=left)]


def run_here(
    runs: Iterable[Run], context: Context, listener: Listener, progress: Progress
) -> list[str]:
    """Execute all runs in this process (``--workers 0``) and return what failed, in words."""
    failures = []
    for run in runs:
        try:
            with lean_arithmetic():
                execute(run, context, partial(_tell, listener, progress, run))
        except NotWritten:
            raise
        except Exception:  # a defect of one run, as in `_serve`: the others go on
            failures.append(f"{run}: {traceback.format_exc()}")
            progress.finish(str(run), "failed")
        else:
            progress.finish(str(run))
    return failures


def default_workers(device: str) -> int:
    """The cores this process may use, or the GPUs."""
    if device.startswith("cuda"):
        return 1 if ":" in device else max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_devices(device: str, workers: int) -> list[str]:
    """One device per worker: a bare "cuda" goes round the GPUs."""
    if device != "cuda":
        return [device] * workers
    return [f"cuda:{i % max(1, torch.cuda.device_count())}" for i in range(workers)]
