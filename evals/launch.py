"""Executes runs on worker processes, or in this process.

Each worker is spawned with one torch thread and sends its results after each point, which is an
eval length or a condition. A thread of the parent waits for the messages of each worker; only the
parent writes result files. If a worker dies, the thread repeats the run with a new one. If the
repeated run is killed by SIGKILL at the same point, memory probably ran out: the rows of this point
get the status "oom" (all rows if the run died in training). If the repeated run dies there with any
other exit code, the run counts as failed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock

import torch

from commandline.errors import UsageError
from commandline.files import NotWritten
from commandline.variants import load_plugin
from evals.measures.arithmetic import lean_arithmetic
from evals.measures.metrics import Outcome
from evals.plugins import check_unchanged
from evals.run import NOT_TRAINED, Emit, Message, Run, RunContext, point_text

# Gets the messages of all runs, one at a time. It raises OSError for ("stopped", text).
Receive = Callable[[Run, Message], None]


def reason_of(text: str) -> str:
    """The error of a formatted traceback in one line."""
    # After the header of a traceback, the first line without indent starts the error message.
    last = text.rsplit("Traceback (most recent call last):\n", 1)[-1]
    return next(line for line in last.splitlines() if line.strip() and line[0] != " ")


def _execute(run: Run, context: RunContext, emit: Emit) -> None:
    """Execute a run. The last message is its end."""
    try:
        with lean_arithmetic():
            status = run.work(run, context, emit)
    except NotWritten as error:  # the next run could not write either
        emit(("stopped", str(error)))
    except Exception:  # one failed run must not end the others
        text = traceback.format_exc()
        emit(("failed", reason_of(text), text))
    else:
        emit(("done", status))


def _work_loop(pipe: Connection, context: RunContext) -> None:
    """The main function of a worker: execute runs from the pipe until the parent's exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        if context.plugin is not None:
            try:
                check_unchanged(context.plugin, context.plugin_hash)
            except UsageError as error:
                pipe.recv()
                pipe.send(("stopped", str(error)))
                return
            load_plugin(context.plugin, need_variant=False)
        while True:
            _execute(pipe.recv(), context, pipe.send)
    except (BrokenPipeError, EOFError, ConnectionResetError):
        sys.exit(1)


# By default glibc returns large freed blocks to the system. Getting them back takes a third of the
# time of an evaluation. malloc reads these variables at the start of a process; other libcs ignore
# them.
_KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class Worker:
    """A process that executes one run after another."""

    def __init__(self, context: RunContext) -> None:
        spawn = get_context("spawn")
        self.pipe, worker_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_work_loop, args=(worker_pipe, context), daemon=True)
        self.process.start()
        worker_pipe.close()

    def messages(self, run: Run) -> Iterator[Message]:
        """The messages of a run. The last is its end, or ("died", exit code of the process)."""
        try:
            self.pipe.send(run)
            message: Message = ("",)
            while message[0] not in ("done", "failed", "stopped"):
                message = self.pipe.recv()
                yield message
        except (BrokenPipeError, EOFError, ConnectionResetError):
            self.process.join()
            yield ("died", self.process.exitcode)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()


class _Pool:
    """Worker processes, and a thread for each. A failed run does not end the others."""

    def __init__(self, runs: Sequence[Run], receive: Receive) -> None:
        self.waiting = deque(runs)
        self.receive = receive
        self.workers: list[Worker] = []
        self.deaths: Counter[object] = Counter()  # by run and point
        self.stopped = False
        self.lock = Lock()  # for all attributes, and while a message is received

    def execute(self, contexts: Sequence[RunContext]) -> None:
        """Execute all runs with one worker for each context."""
        with ThreadPoolExecutor(len(contexts)) as threads:
            try:
                for served in as_completed([threads.submit(self._serve, x) for x in contexts]):
                    served.result()
            finally:
                with self.lock:
                    self.stopped = True
                    for worker in self.workers:
                        worker.stop()

    def _serve(self, context: RunContext) -> None:
        """Execute waiting runs on a worker, or on a new one after its death."""
        worker = None
        while True:
            with self.lock:
                if self.stopped or not self.waiting:
                    return
                run, point = self.waiting.popleft(), None
                if worker is None:
                    self.workers.append(worker := Worker(context))
            for message in worker.messages(run):
                with self.lock:
                    if self.stopped:
                        return
                    if message[0] == "died":
                        worker = None
                        self.waiting.extendleft(self._after_death(run, point, message[1]))
                    else:
                        self.receive(run, message)
                if message[0] == "stage":
                    point = message[1]
                elif message[0] == "rows":
                    run = run.without(message[2])

    def _after_death(self, run: Run, point: object, code: int | None) -> list[Run]:
        """Returns a list: empty, or the run with the points to repeat. point: the one that was
        worked on; None is the training."""
        if not run.tests:
            self.receive(run, ("done", "done"))
            return []
        self.deaths[run.name, point] += 1
        if self.deaths[run.name, point] == 1:
            return [run]
        where = "in training" if point is None else f"at {point_text(point)}"
        if code != -signal.SIGKILL:
            reason = f"its process died twice {where}, exit code {code}"
            self.receive(run, ("failed", reason, ""))
            return []
        failure = Outcome("oom", f"process killed twice {where}, probably out of memory")
        for x in [point] if point in run.tests else list(run.tests):
            outcomes = dict.fromkeys(run.tests[x], failure)
            self.receive(run, ("rows", x, outcomes, NOT_TRAINED))
            run = run.without(outcomes)
        if not run.tests:
            self.receive(run, ("done", "out of memory"))
        return [run] if run.tests else []


def execute(runs: Sequence[Run], context: RunContext, receive: Receive, workers: int) -> None:
    """Execute all runs, in this process if ``workers`` is 0."""
    if workers == 0:
        for run in runs:
            _execute(run, context, partial(receive, run))
        return
    os.environ.update({x: os.environ.get(x, value) for x, value in _KEEP_FREED.items()})
    count = min(workers, len(runs))
    gpus = max(1, torch.cuda.device_count())
    # For "cuda" without an index, workers take the GPUs in rotation.
    all_gpus = context.device == "cuda"
    devices = [f"cuda:{i % gpus}" if all_gpus else context.device for i in range(count)]
    _Pool(runs, receive).execute([replace(context, device=device) for device in devices])


def default_workers(device: str) -> int:
    """The default number of workers: one per core that this process may use, or one per GPU."""
    if device.startswith("cuda"):
        return 1 if ":" in device else max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
