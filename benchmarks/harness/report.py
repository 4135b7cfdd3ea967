"""What a run says: about itself, its tables in text and Markdown, and its JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cases import SOFTMAX, Case, Setting
from benchmarks.harness.correctness import Check
from benchmarks.harness.timing import Spread
from commandline.checkout import commit, said
from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.table import aligned, markdown

# What a row may have beside its time: a column's title and how a number is shown.
FIGURES = {
    "tflops": ("TFLOP/s", "{:.3g}"),
    "ns_per_token": ("ns/token", "{:.3g}"),
    "of_copy": ("of copy", "{:.0%}"),
}
WIDTHS = {"direction": 9, "who": 28, "backend": 12, "error (of budget)": 20, "quartiles": 17,
          "note": 0}  # fmt: skip
LEFT = ("direction", "who", "backend", "note")


@dataclass
class Row:
    """One call in one direction. What was not measured is None; `note` says what went wrong.

    kind is "variant", "state" (a variant's next token on its state, which is not checked) or
    "baseline" (another's implementation of a variant). ``error`` of a baseline is relative to fp64;
    ``ratios`` are of the times, to those named, in the same rounds; ``peak_bytes`` in backward are
    those of a forward and a backward pass together.
    """

    suite: str
    name: str
    case: Case
    kind: str
    direction: str
    setting: Setting
    backend: str | None = None
    check: Check | None = None
    error: float | None = None
    seconds: Spread | None = None
    ratios: dict[str, Spread] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        return self.check is not None and not self.check.ok

    def record(self) -> dict[str, Any]:
        record = asdict(self)
        record["case"] = self.case.spec
        setting = record.pop("setting") | {"inputs": self.setting.inputs}
        record["check"] = None if self.check is None else self.check.record()
        return record | setting


@dataclass
class Report:
    """What was measured so far. Its files are written whole after each group, so that a run which
    is killed leaves all groups before."""

    settings: dict[str, Any]
    json: str | None = None
    markdown: str | None = None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # else what the JSON file holds
    heading: tuple[str, list[str]] = ("", [])  # of the last rows

    @staticmethod
    def of(args: argparse.Namespace) -> Report:
        given = {name: value for name, value in vars(args).items() if name != "run"}
        settings = {name: str(x) if isinstance(x, Path) else x for name, x in given.items()}
        return Report(settings, args.json, args.markdown)

    def __post_init__(self) -> None:
        for option, path in (("--json", self.json), ("--markdown", self.markdown)):
            check_target(option, path)
        self.environment = environment()
        print(headline(self.environment), flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """Prints these rows, a group, and writes the files anew."""
        self.rows += rows
        if not rows:
            return
        columns = columns_of(rows)
        heading, self.heading = self.heading, (title(rows[0]), columns)
        if heading != self.heading:
            print(f"\n{title(rows[0])}\n{line(columns, columns)}")
        for row in rows:
            print(line(columns, cells(row, columns)), flush=True)
        self.write()

    def write(self) -> None:
        if self.json is not None:
            write_json(self.json, {
                "settings": self.settings, "environment": self.environment, **self.more,
                "rows": [row.record() for row in self.rows], "notes": self.notes,
                "left_out": self.left_out,
            })  # fmt: skip
        if self.markdown is not None:
            write_whole(Path(self.markdown), self.in_markdown())

    def in_markdown(self) -> str:
        parts = [headline(self.environment)]
        tables: dict[str, list[Row]] = {}
        for row in self.rows:
            tables.setdefault(title(row), []).append(row)
        for name, rows in tables.items():
            columns = columns_of(rows)
            table = markdown([columns, *(cells(row, columns) for row in rows)])
            parts += [f"## {name}", table.rstrip()]
        for heading, texts in (("Notes", self.notes), ("Left out", self.left_out)):
            if texts:
                parts += [f"## {heading}", "\n".join(f"- {text}" for text in texts)]
        return "\n\n".join(parts) + "\n"

    def finish(self) -> int:
        """The exit status: 1 where a result was wrong, 2 where nothing could be measured."""
        self.write()
        for text in self.left_out:
            print(f"left out: {text}", file=sys.stderr)
        wrong = dict.fromkeys(f"{r.name} at {r.setting.length}" for r in self.rows if r.wrong)
        if wrong:
            said = f"outside the error budget, and not timed: {', '.join(wrong)}"
            print(said, file=sys.stderr)
            return 1
        if not any(r.check is not None or r.kind == "state" for r in self.rows):
            print("nothing could be measured", file=sys.stderr)
            return 2
        return 0


# ---- a table ----------------------------------------------------------------------------------


def title(row: Row) -> str:
    return f"{row.suite}: {row.setting.title}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Of the figures and ratios those that some row has."""
    figures = [head for name, (head, _) in FIGURES.items() if any(name in r.figures for r in rows)]
    known = {name for row in rows for name in row.ratios}
    shared = [row.name for row in rows if row.case == SOFTMAX and row.name in known]
    peak = ["MB"] if any(r.peak_bytes is not None for r in rows) else []
    ratios = [f"x {name}" for name in dict.fromkeys(shared)]
    first = ["B", "N", "direction", "who", "backend", "error (of budget)", "ms", "quartiles"]
    return [*first, *figures, *ratios, *peak, "note"]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    error = f"out {row.error:.1e} of rms" if row.error is not None else ""
    if row.check is not None:
        name, worst = row.check.worst
        error = f"{name} {worst.error:.1e} ({worst.share:.2f})"
    found = {
        "B": str(row.setting.batch),
        "N": str(row.setting.length),
        "direction": row.direction,
        "who": row.name,
        "backend": row.backend or "",
        "error (of budget)": error,
        "ms": milliseconds(row.seconds.median) if row.seconds else "",
        "quartiles": quartiles(row.seconds) if row.seconds else "",
        "MB": f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes is not None else "",
    }
    found |= {FIGURES[n][0]: FIGURES[n][1].format(x) for n, x in row.figures.items()}
    found |= {f"x {name}": f"{x.median:.2f}" for name, x in row.ratios.items()}
    # Ratios that have no column: to what computes the same variant.
    own = [f"{x} {found[x]}" for x in found if x.startswith("x ") and x not in columns]
    found["note"] = "; ".join(filter(None, (row.note, *own)))
    return [found.get(column, "") for column in columns]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4f}" if seconds < 1e-3 else f"{seconds * 1e3:.2f}"


def quartiles(spread: Spread) -> str:
    return f"{milliseconds(spread.lower)}–{milliseconds(spread.upper)}"


def line(columns: Sequence[str], texts: Sequence[str]) -> str:
    """Of the console's table, whose widths are set before its rows are known."""
    left = [i for i, column in enumerate(columns) if column in LEFT]
    return aligned(texts, [WIDTHS.get(name, max(6, len(name))) for name in columns], left)


# ---- where it ran -----------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Where the figures come from."""
    packages = {}
    for name in ("attnzoo", "torch", "triton", "numpy", "entmax", "adasplash"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    found = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": packages,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "commit": commit(),
        "device": None,
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "device": card.name,
            "capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
            "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return found


def headline(where: dict[str, Any]) -> str:
    machine = f"{where['cpu']}, {where['cores']} cores, load {where['load'] or 0:.1f}"
    if where.get("device"):
        machine = f"{where['device']}, driver {where['driver']}, CUDA {where['cuda']}"
    return f"{machine}; torch {torch.__version__}, commit {where['commit']}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# ---- files ------------------------------------------------------------------------------------


def check_target(option: str, path: str | None) -> None:
    """To be called before anything is measured.

    Raises:
        UsageError: the file could not be written.
    """
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
    write_whole(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")
