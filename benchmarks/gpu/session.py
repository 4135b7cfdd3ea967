"""Runs the steps of a stage, each in its own process, and loses nothing if one of them fails.

A step that hangs, crashes or loses the device costs its own time only: the next step starts in a
new process, with a new CUDA context. Steps and their findings are appended to files at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import journal
from benchmarks.harness.report import CRASHED, DEVICE_LOST

POLL = 0.2  # seconds between two looks at a running process
SPARE = 5.0  # seconds of the session that are left for its last files
SHORTEST = 10.0  # a step does not start with fewer seconds left
RESTARTS = 2  # a step is not started again after this multiple of its limit
DIED = (DEVICE_LOST, CRASHED)  # exit statuses after which the remaining items are run


@dataclass(frozen=True)
class Step:
    """A command of a stage.

    A step can have items, such as checks or variants. Its process writes the line {"begin": item}
    to the journal before each item. If the process dies or hangs, it is started again with the
    items after the one that it had begun last. So a step with items must go through them once and
    in order.

    Attributes:
        expected: seconds on an H100, an estimate. It is shown to the user and limits nothing.
        limit: seconds after which a process is stopped.
        items: names that are passed as ``option a,b,c``.
        item_limit: seconds after which a process is stopped that has written no line.
        journaled: whether the command writes to the journal. It then gets ``--journal FILE``.
        env: environment variables.
    """

    name: str
    command: tuple[str, ...]
    expected: float
    limit: float
    items: tuple[str, ...] = ()
    option: str = ""
    item_limit: float = float("inf")
    journaled: bool = True
    env: dict[str, str] = field(default_factory=dict)


class Ended(NamedTuple):
    """How a process ended. ``status`` is None if it was stopped at a limit."""

    status: int | None
    seconds: float
    reason: str


class Session:
    """Runs steps until the time is used up.

    Files in ``out``: ``steps.jsonl`` has a line for each process and for each item that ended one,
    ``journal.jsonl`` has the lines of the commands, and ``log.txt`` all output.
    """

    def __init__(
        self, out: Path, seconds: float, env: dict[str, str], cwd: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.out, self.env, self.cwd, self.clock = out, env, cwd, clock
        self.start = clock()
        self.end = self.start + seconds
        self.steps, self.journal = out / "steps.jsonl", out / "journal.jsonl"
        self.log = out / "log.txt"

    @property
    def left(self) -> float:
        return self.end - self.clock() - SPARE

    def record(self, **line: object) -> None:
        line = {"at": round(self.clock() - self.start, 1), **line}
        journal.append(self.steps, line)
        print(", ".join(f"{name}: {value}" for name, value in line.items()), flush=True)

    def run_step(self, step: Step) -> bool:
        """Run a step. Returns whether all of it ended with status 0."""
        items, complete, start = step.items, True, self.clock()
        while self.left >= SHORTEST and self.clock() - start <= RESTARTS * step.limit:
            size = self.journal.stat().st_size if self.journal.exists() else 0
            command = [*step.command, *([step.option, ",".join(items)] if items else [])]
            kernels = compiled(self.env)
            ended = self.run_process(step, command)
            reason = {"reason": ended.reason} if ended.reason else {}
            new = compiled(self.env) - kernels
            self.record(
                step=step.name, status=ended.status, seconds=ended.seconds, compiled=new, **reason
            )
            if ended.status is not None and ended.status >= 0 and ended.status not in DIED:
                return complete and ended.status == 0
            complete = False
            begun = [line["begin"] for line in journal.read(self.journal, size) if "begin" in line]
            last = next((name for name in reversed(begun) if name in items), None)
            if last is None:
                self.record(step=step.name, left_out=",".join(items) or "all", why="no item began")
                return False
            self.record(step=step.name, failed=last, why=ended.reason or f"status {ended.status}")
            items = items[items.index(last) + 1 :]
            if not items:
                return False
        self.record(step=step.name, left_out=",".join(items) or "all", why="no time left")
        return False

    def run_process(self, step: Step, command: Sequence[str]) -> Ended:
        """Run a command in a process group of its own, and stop it at its limits."""
        start = self.clock()
        end = start + min(step.limit, self.left)
        if step.journaled:
            command = [*command, "--journal", str(self.journal.resolve())]
        with self.log.open("a") as log:
            log.write(f"\n==== {step.name}: {' '.join(command)}\n")
            log.flush()
            try:
                process = subprocess.Popen(
                    command, cwd=self.cwd, env={**self.env, **step.env}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, process_group=0,
                )  # fmt: skip
            except OSError as error:
                return Ended(None, 0.0, f"{command[0]} cannot run: {error.strerror or error}")
            reason, size, written = "", -1, start
            try:
                while process.poll() is None and not reason:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(POLL)
                    now = self.clock()
                    if self.journal.exists() and self.journal.stat().st_size != size:
                        size, written = self.journal.stat().st_size, now
                    if now >= end:
                        reason = f"stopped after {now - start:.0f} s"
                    elif now - written >= step.item_limit:
                        reason = f"stopped: nothing written for {now - written:.0f} s"
                status = process.poll()
            finally:  # also if this process is interrupted
                stop(process)
            seconds = round(self.clock() - start, 1)
            log.write(f"==== {step.name}: status {status}, {seconds} s {reason}\n")
        return Ended(status, seconds, "" if status is not None else reason)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which may live on after it.

    A Python process first gets the time to write where it hangs. A process that waits for a driver
    may not end at all.
    """
    signals = [signal.SIGKILL] if process.poll() is not None else [signal.SIGABRT, signal.SIGKILL]
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0 if number == signal.SIGABRT else 10.0)


def compiled(env: Mapping[str, str]) -> int:
    """The number of kernels in Triton's cache. A step that adds some lacked them in the pack."""
    folder = env.get("TRITON_CACHE_DIR")
    return 0 if folder is None else sum(1 for _ in Path(folder).glob("*/*.cubin"))
