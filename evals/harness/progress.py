"""How far a run is, on stderr: bars on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

LINE_SECONDS = 30.0  # between two lines where there is no terminal


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    whole = int(seconds)
    minutes = f"{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")


class Progress:
    """On a terminal, a bar for the whole and one for each run that runs; a line for each finished
    run stays above them. Elsewhere, a line every so many seconds, from a thread: a run may be
    silent."""

    def __init__(
        self, runs: int, stream: TextIO | None = None, every: float = LINE_SECONDS
    ) -> None:
        self.runs, self.finished, self.began = runs, 0, time.monotonic()
        self.running: dict[str, tuple[float, str]] = {}  # name: fraction, stage
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()  # of what the lines are made of
        self._closed = threading.Event()
        self._speaker = threading.Thread(target=self._speak, args=(every,), daemon=True)
        console = Console(file=self._stream)
        self._bars = Bars(
            BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(compact=True),
            TextColumn("{task.description}", markup=False),
            console=console, transient=True, redirect_stdout=False,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._whole = self._bars.add_task(f"0 of {runs} runs", total=runs)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()
        if self._bars.disable:
            self._speaker.start()

    def update(self, name: str, fraction: float, stage: str) -> None:
        """A run stands at ``fraction`` of its work, in a stage to name."""
        with self._lock:
            self.running[name] = (fraction, stage)
        if self._bars.disable:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=1.0)
        self._bars.update(self._tasks[name], completed=fraction, description=f"{name}: {stage}")
        self._bars.update(self._whole, completed=self.finished + self._part)

    def finish(self, name: str, word: str = "done") -> None:
        """A run ended."""
        with self._lock:
            self.finished += 1
            self.running.pop(name, None)
        if name in self._tasks:
            task = next(task for task in self._bars.tasks if task.id == self._tasks[name])
            words = f"{name}: {word} after {clock(task.elapsed or 0)}"
            self._bars.print(words, markup=False, highlight=False)
            self._bars.remove_task(self._tasks.pop(name))
        words = f"{self.finished} of {self.runs} runs"
        self._bars.update(self._whole, completed=self.finished + self._part, description=words)

    def close(self) -> None:
        """Take the bars that still run off the screen, and say no more."""
        self._closed.set()
        if self._speaker.is_alive():
            self._speaker.join()
        self._bars.stop()

    @property
    def _part(self) -> float:
        """The work of the running runs, in runs."""
        return sum(fraction for fraction, _ in self.running.values())

    def _speak(self, every: float) -> None:
        while not self._closed.wait(every):
            self._stream.write(f"{self._line()}\n")
            self._stream.flush()

    def _line(self) -> str:
        """Such as "3 of 8 runs done (41 %) after 2:00, about 2:53 left; now copy softmax seed 0:
        training, 25 %"."""
        with self._lock:
            done = (self.finished + self._part) / max(1, self.runs)
            now = [f"{name}: {stage}, {part:.0%}" for name, (part, stage) in self.running.items()]
        elapsed = time.monotonic() - self.began
        left = f"about {clock(elapsed * (1 - done) / done)} left" if done else "no estimate yet"
        line = (
            f"{self.finished} of {self.runs} runs done ({done:.0%}) after {clock(elapsed)}, {left}"
        )
        return f"{line}; now {'; '.join(now)}" if now else line
