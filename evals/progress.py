"""One bar per cell with the time left, on stderr, and nothing at all where that is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_BAR = 20
_REDRAW_SECONDS = 0.2


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    whole = int(seconds)
    minutes = f"{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 3600}:{minutes}" if whole >= 3600 else minutes.removeprefix("0")


class Progress:
    """Bars of the cells that run, above one line for the whole; a finished bar stays above them."""

    def __init__(self, cells: int, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty()
        self.cells = cells
        self.finished = 0
        self.began = time.monotonic()
        self.running: dict[str, tuple[float, float, str]] = {}  # name: began, fraction, stage
        self._lines = 0
        self._drawn = 0.0

    def update(self, name: str, fraction: float, stage: str) -> None:
        """A cell stands at ``fraction`` of its work, in a stage to name."""
        began = self.running[name][0] if name in self.running else time.monotonic()
        self.running[name] = (began, fraction, stage)
        if time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._draw()

    def finish(self, name: str, word: str = "done") -> None:
        """A cell ended."""
        self.finished += 1
        began = self.running.pop(name, (time.monotonic(), 0.0, ""))[0]
        self._draw(self._bar(name, 1.0, word, time.monotonic() - began))

    def close(self) -> None:
        """Take the bars that still run off the screen."""
        self.running.clear()
        if self.shown and self._lines:
            self.stream.write(f"\x1b[{self._lines}F\x1b[J")
            self.stream.flush()
            self._lines = 0

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
        done = (self.finished + sum(f for _, f, _ in self.running.values())) / max(1, self.cells)
        total = self._bar(f"{self.finished} of {self.cells} cells", done, "", now - self.began)
        width = max(20, shutil.get_terminal_size().columns - 1)
        text = "\n".join(line[:width] for line in [*lines, *bars, total])
        back = f"\x1b[{self._lines}F" if self._lines else ""
        self.stream.write(f"{back}\x1b[J{text}\n")
        self.stream.flush()
        self._lines = len(bars) + 1
