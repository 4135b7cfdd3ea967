"""What a run says about itself, its table, and its JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.correctness import Check
from benchmarks.harness.timing import Spread
from commandline.errors import UsageError
from commandline.files import write_whole


@dataclass
class Row:
    """One variant at one length. What was not measured is None; `note` says what went wrong."""

    spec: str
    length: int
    direction: str
    backend: str | None = None
    check: Check | None = None
    seconds: Spread | None = None
    ratio: Spread | None = None  # of the times, to SDPA's in the same round
    peak_bytes: int | None = None
    speedup: float | None = None  # of attnzoo over this row: this row's time over attnzoo's
    note: str = ""

    def record(self) -> dict[str, Any]:
        record = asdict(self)
        if self.check is not None:
            record["check"]["ok"] = self.check.ok
        return record


COLUMNS = ("N", "variant", "backend", "error (of budget)", "ms", "quartiles", "x SDPA", "peak MB")
WIDTHS = (6, 28, 8, 20, 9, 15, 7, 8)


def line(cells: tuple[str, ...]) -> str:
    return aligned(cells, WIDTHS, left=(1, 2))


def aligned(texts: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    """A line of a table: names to the left, numbers to the right."""
    columns = enumerate(zip(texts, widths, strict=True))
    return "  ".join(t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in columns).rstrip()


def row_line(row: Row) -> str:
    times = ("", "")
    if row.seconds is not None:
        t = row.seconds
        times = (f"{t.median * 1e3:.2f}", f"{t.lower * 1e3:.2f}–{t.upper * 1e3:.2f}")
    cells = (
        str(row.length),
        row.spec,
        row.backend or "",
        row.check.shown if row.check is not None else "",
        *times,
        f"{row.ratio.median:.2f}" if row.ratio else "",
        f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes is not None else "",
    )
    note = row.note
    if row.speedup is not None:
        note = f"attnzoo was {compared(row.speedup)} {note}".rstrip()
    return line(cells) + (f"  {note}" if note else "")


def compared(speedup: float) -> str:
    """Of a ratio of times, theirs over ours, in words: such as "1.3 × faster", "1.3 × slower"."""
    faster = speedup >= 1
    times = f"{speedup if faster else 1 / speedup:.1f}"
    return "as fast" if times == "1.0" else f"{times} × {'faster' if faster else 'slower'}"


def environment() -> dict[str, Any]:
    """Where the figures come from."""
    packages = {}
    for name in ("attnzoo", "torch", "numpy", "entmax"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "packages": packages,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "commit": commit(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside of git."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if git("status", "--porcelain") else "")


def add_plugin(parser: argparse.ArgumentParser, words: str = "") -> None:
    """``--plugin``, which `benchmarks.__main__` loads before the command runs."""
    words = f"a file that registers more variants{words}"
    parser.add_argument("--plugin", type=Path, metavar="FILE.py", help=words)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a command, as its JSON file has them."""
    given = {name: value for name, value in vars(args).items() if name not in ("run", "json")}
    return {name: str(x) if isinstance(x, Path) else x for name, x in given.items()}


def check_target(option: str, path: str | None) -> None:
    """Refuses, before anything is measured, a file that could not be written after it."""
    if not path:
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option} must be a file, {path} is a folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from None
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{option} {path}: its folder cannot be written to")


def write_json(path: str, document: dict[str, Any]) -> None:
    """All or nothing: a reader never sees half a file."""
    write_whole(Path(path), json.dumps(document, indent=1) + "\n")
