"""How far a run is, on stderr: bars on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

_BAR = 20
_REDRAW_SECONDS = 0.2
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
    """On a terminal, bars of the cells that run, above one line for the whole; a finished bar stays
    above them. Elsewhere, a line every so many seconds, from a thread: a cell may be silent."""

    def __init__(
        self, cells: int, stream: TextIO | None = None, every: float = LINE_SECONDS
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty()
        self.cells = cells
        self.finished = 0
        self.began = time.monotonic()
        self.running: dict[str, tuple[float, float, str]] = {}  # name: began, fraction, stage
        self._lines = 0
        self._drawn = 0.0
        self._lock = threading.Lock()  # of what the lines are made of
        self._closed = threading.Event()
        self._speaker = threading.Thread(target=self._speak, args=(every,), daemon=True)
        if not self.shown:
            self._speaker.start()

    def update(self, name: str, fraction: float, stage: str) -> None:
        """A cell stands at ``fraction`` of its work, in a stage to name."""
        with self._lock:
            began = self.running[name][0] if name in self.running else time.monotonic()
            self.running[name] = (began, fraction, stage)
        if time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._draw()

    def finish(self, name: str, word: str = "done") -> None:
        """A cell ended."""
        with self._lock:
            self.finished += 1
            began = self.running.pop(name, (time.monotonic(), 0.0, ""))[0]
        self._draw(self._bar(name, 1.0, word, time.monotonic() - began))

    def close(self) -> None:
        """Take the bars that still run off the screen, and say no more."""
        self._closed.set()
        if self._speaker.is_alive():
            self._speaker.join()
        self.running.clear()
        if self.shown and self._lines:
            self.stream.write(f"\x1b[{self._lines}F\x1b[J")
            self.stream.flush()
            self._lines = 0

    @property
    def _done(self) -> float:
        """The fraction of all cells' work."""
        running = sum(fraction for _, fraction, _ in self.running.values())
        return (self.finished + running) / max(1, self.cells)

    def _speak(self, every: float) -> None:
        while not self._closed.wait(every):
            self.stream.write(f"{self._line()}\n")
            self.stream.flush()

    def _line(self) -> str:
        """Such as "3 of 8 runs done (41 %) after 2:00, about 2:53 left; now copy softmax seed 0:
        training, 25 %"."""
        with self._lock:
            done, elapsed = self._done, time.monotonic() - self.began
            now = [
                f"{name}: {stage}, {part:.0%}" for name, (_, part, stage) in self.running.items()
            ]
        left = f"about {clock(elapsed * (1 - done) / done)} left" if done else "no estimate yet"
        line = (
            f"{self.finished} of {self.cells} runs done ({done:.0%}) after {clock(elapsed)}, {left}"
        )
        return f"{line}; now {'; '.join(now)}" if now else line

    def _bar(self, name: str, fraction: float, stage: str, elapsed: float) -> str:
        filled = round(fraction * _BAR)
        left = f"{clock(elapsed * (1 - fraction) / fraction)} left" if fraction else "…"
        if fraction == 1.0:
            left = f"{clock(elapsed)} taken"
        return f"{'█' * filled}{'░' * (_BAR - filled)} {fraction:4.0%} {left:>12}  {name}  {stage}"

    def _draw(self, finished: str | None = None) -> None:
        if not self.shown:
            return
        now = self._drawn = time.monotonic()
        lines = [finished] if finished else []
        bars = [
            self._bar(n, f, stage, now - began) for n, (began, f, stage) in self.running.items()
        ]
        total = self._bar(
            f"{self.finished} of {self.cells} cells", self._done, "", now - self.began
        )
        width = max(20, shutil.get_terminal_size().columns - 1)
        text = "\n".join(line[:width] for line in [*lines, *bars, total])
        back = f"\x1b[{self._lines}F" if self._lines else ""
        self.stream.write(f"{back}\x1b[J{text}\n")
        self.stream.flush()
        self._lines = len(bars) + 1
