"""Progress on stderr: bars in a terminal, otherwise a line for each finished run."""

from __future__ import annotations

import math
import sys
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
    a line for each finished run, and with ``verbose`` also a status line at the first message of a
    run after ``every`` seconds.
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
        self._every, self._last = every if verbose else math.inf, self.began
        console = Console(file=self._stream)
        self._bars = Bars(
            BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(compact=True),
            TextColumn("{task.description}", markup=False),
            console=console, transient=True, redirect_stdout=False,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._total = self._bars.add_task("", total=runs)
        self._show_total()
        self._bars.start()

    def update(self, name: str, fraction: float, stage: str) -> None:
        """Show the fraction of a run's work that is done, and its current stage."""
        self.running[name] = (fraction, stage)
        self._starts.setdefault(name, time.monotonic())
        if not self._bars.disable:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task("", total=1.0)
            text = f"{name}: {stage}"
            self._bars.update(self._tasks[name], completed=fraction, description=text)
            self._show_total()
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            self._print(self._line())

    def finish(self, name: str, status: str = "done") -> None:
        """Show that a run is finished."""
        self.finished += 1
        self.running.pop(name, None)
        if self._bars.disable:
            elapsed = clock(time.monotonic() - self._starts.get(name, self.began))
            self._print(f"[{self.finished}/{self.runs}] {name}: {status} after {elapsed}")
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        self._show_total()

    def show(self, text: str) -> None:
        """Print a text, in a terminal above the bars."""
        if self._bars.disable:
            self._print(text)
        else:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()

    @property
    def _done(self) -> float:
        """The number of finished runs and parts of runs."""
        return self.finished + sum(fraction for fraction, _ in self.running.values())

    def _show_total(self) -> None:
        text = f"{self.finished} of {self.runs} runs"
        self._bars.update(self._total, completed=self._done, description=text)

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _line(self) -> str:
        """A status line, such as "3 of 8 runs (41%) in 2:00, about 2:55 left; now copy softmax seed
        0: training, 25%"."""
        done, elapsed = self._done / max(1, self.runs), time.monotonic() - self.began
        now = [f"{name}: {stage}, {part:.0%}" for name, (part, stage) in self.running.items()]
        left = f"about {clock(elapsed * (1 - done) / done)} left" if done else "no estimate yet"
        line = f"{self.finished} of {self.runs} runs ({done:.0%}) in {clock(elapsed)}, {left}"
        return f"{line}; now {'; '.join(now)}"
