"""Progress on stderr: bars in a terminal, otherwise a line for each finished run."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

LINE_SECONDS = 30.0  # interval of the status lines of --verbose


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    total = int(seconds)
    minutes = f"{total // 60 % 60:02d}:{total % 60:02d}"
    return f"{total // 3600}:{minutes}" if total >= 3600 else minutes.removeprefix("0")


def counted(count: int, noun: str) -> str:
    """A count with its noun in the singular or plural.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{count} {noun}" + "s" * (count != 1)


class Progress:
    """Shows how many runs are finished.

    In a terminal it draws a bar for all runs and one for each run in progress. Elsewhere it prints
    a line for each finished run, and with ``verbose`` also a status line every ``every`` seconds.
    """

    def __init__(
        self,
        runs: int,
        stream: TextIO | None = None,
        verbose: bool = False,
        every: float = LINE_SECONDS,
    ) -> None:
        self.runs, self.finished, self.began = runs, 0, time.monotonic()
        # Maps the name of each run in progress to the fraction that is done and the current stage.
        self.running: dict[str, tuple[float, str]] = {}
        self._starts: dict[str, float] = {}
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # A thread prints the status lines, because a run may send no message for minutes.
        self._thread = threading.Thread(target=self._print_lines, args=(every,), daemon=True)
        console = Console(file=self._stream)
        self._bars = Bars(
            BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(compact=True),
            TextColumn("{task.description}", markup=False),
            console=console, transient=True, redirect_stdout=False,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._total = self._bars.add_task(f"0 of {runs} runs", total=runs)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()
        if self._bars.disable and verbose:
            self._thread.start()

    def update(self, name: str, fraction: float, stage: str) -> None:
        """Show the fraction of a run's work that is done, and its current stage."""
        with self._lock:
            self.running[name] = (fraction, stage)
            self._starts.setdefault(name, time.monotonic())
        if self._bars.disable:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=1.0)
        self._bars.update(self._tasks[name], completed=fraction, description=f"{name}: {stage}")
        self._bars.update(self._total, completed=self.finished + self._part)

    def finish(self, name: str, status: str = "done") -> None:
        """Show that a run is finished."""
        with self._lock:
            self.finished += 1
            self.running.pop(name, None)
        if self._bars.disable:
            elapsed = clock(time.monotonic() - self._starts.get(name, self.began))
            self._print(f"[{self.finished}/{self.runs}] {name}: {status} after {elapsed}")
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        text = f"{self.finished} of {self.runs} runs"
        self._bars.update(self._total, completed=self.finished + self._part, description=text)

    def close(self) -> None:
        """Remove the bars and print nothing more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bars.stop()

    @property
    def _part(self) -> float:
        """The sum of the finished fractions of the runs in progress: 0.5 and 0.25 give 0.75."""
        return sum(fraction for fraction, _ in self.running.values())

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _print_lines(self, every: float) -> None:
        while not self._closed.wait(every):
            self._print(self._line())

    def _line(self) -> str:
        """A status line, such as "3 of 8 runs (41%) in 2:00, about 2:55 left; now copy softmax seed
        0: training, 25%"."""
        with self._lock:
            done = (self.finished + self._part) / max(1, self.runs)
            now = [f"{name}: {stage}, {part:.0%}" for name, (part, stage) in self.running.items()]
        elapsed = time.monotonic() - self.began
        left = f"about {clock(elapsed * (1 - done) / done)} left" if done else "no estimate yet"
        line = f"{self.finished} of {self.runs} runs ({done:.0%}) in {clock(elapsed)}, {left}"
        return f"{line}; now {'; '.join(now)}" if now else line
