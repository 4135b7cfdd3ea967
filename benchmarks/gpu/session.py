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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import journal
from benchmarks.harness.report import DEVICE_LOST

POLL = 0.2  # seconds between two looks at a running process
SPARE = 5.0  # seconds of the session that are kept for its last files
SHORTEST = 10.0  # a step does not start with fewer seconds left


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

    def run(self, step: Step) -> bool:
        """Run a step. Returns whether all of it ended by itself."""
        items, complete = step.items, True
        while self.left >= SHORTEST:
            size = self.journal.stat().st_size if self.journal.exists() else 0
            command = [*step.command, *([step.option, ",".join(items)] if items else [])]
            ended = self.process(step, command)
            self.record(
                step=step.name, status=ended.status, seconds=ended.seconds,
                **({"reason": ended.reason} if ended.reason else {}),
            )  # fmt: skip
            if ended.status not in (None, DEVICE_LOST) and ended.status >= 0:
                return complete
            complete = False
            begun = [line["begin"] for line in journal.read(self.journal, size) if "begin" in line]
            last = next((name for name in reversed(begun) if name in items), None)
            if last is None:
                return False
            self.record(step=step.name, failed=last, why=ended.reason or f"status {ended.status}")
            items = items[items.index(last) + 1 :]
            if not items:
                return False
        names = ",".join(items)
        self.record(step=step.name, left_out=names or "all", why="no time left")
        return False

    def process(self, step: Step, command: Sequence[str]) -> Ended:
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
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError:
                return Ended(None, 0.0, f"{command[0]} is not installed")
            reason, size, written = "", -1, start
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
            ended = process.poll()
            # The group may have other processes, also if its leader has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            seconds = round(self.clock() - start, 1)
            log.write(f"==== {step.name}: status {ended}, {seconds} s {reason}\n")
        return Ended(ended, seconds, "" if ended is not None else reason)
