"""Reports: tables in text and Markdown, a JSON file, and a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import attnzoo
from benchmarks.harness.cases import SOFTMAX, Case, Setting
from benchmarks.harness.correctness import Check
from benchmarks.harness.journal import append
from benchmarks.harness.timing import Spread
from commandline.checkout import commit, output_of
from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.table import Table, aligned, markdown

# Optional figures of a row by name, each with its column title and number format.
FIGURES = {
    "tflops": ("TFLOP/s", "{:.3g}"),
    "empty_blocks": ("empty blocks", "{:.0%}"),
    "ns_per_token": ("ns/token", "{:.3g}"),
    "of_copy": ("bandwidth / copy", "{:.0%}"),
    "of_scores": ("peak / N·V·4", "{:.3f}"),
}
# Exit statuses of a command whose device failed, and of one that ended by an unexpected error.
DEVICE_LOST, CRASHED = 3, 70
ERROR, TIME, QUARTILES = "error (share of budget)", "median ms", "quartiles ms"
WIDTHS = {"direction": 9, "implementation": 28, "backend": 12, QUARTILES: 17, "note": 0}
LEFT = ("direction", "implementation", "backend", "note")


@dataclass
class Row:
    """One implementation in one direction. Figures that were not measured are None.

    Attributes:
        kind: "variant", "state" (one token through a linear variant's state, not checked) or
            "baseline" (code outside attnzoo).
        check: the comparison with fp64, for variants.
        error: for baselines, the rms error of the output divided by the rms of the output in fp64.
        ratios: the time divided by that of another implementation in the same rounds, by name.
        peak_bytes: peak memory without the inputs. For "backward" it includes the forward pass.
        note: the reason why a figure was not measured.
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
    """The rows of a command and its output files.

    The files ``json`` and ``markdown`` are rewritten after each part of a group. Lines are appended
    to the file ``journal`` at once, so that a process that is stopped loses only what it measures.
    """

    settings: dict[str, Any]
    json: str | None = None
    markdown: str | None = None
    journal: str | None = None
    device_lost: bool = False
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)  # shown after the rows
    more: dict[str, Any] = field(default_factory=dict)  # further entries of the JSON file
    heading: tuple[str, list[str]] = ("", [])  # title and columns last printed

    @staticmethod
    def of(args: argparse.Namespace) -> Report:
        options = {name: value for name, value in vars(args).items() if name != "run"}
        settings = {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}
        return Report(settings, args.json, args.markdown, args.journal)

    def __post_init__(self) -> None:
        files = (("--json", self.json), ("--markdown", self.markdown), ("--journal", self.journal))
        for option, path in files:
            check_target(option, path)
        self.environment = environment()
        print(headline(self.environment), flush=True)
        self.log(environment=self.environment, settings=self.settings)

    def log(self, **line: Any) -> None:
        if self.journal is not None:
            append(Path(self.journal), line)

    def begin(self, item: str) -> None:
        self.log(begin=item)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self.log(note=text)

    def table(self, table: Table) -> None:
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """Prints rows and writes them to the files."""
        self.rows += rows
        for row in rows:
            self.log(row=row.record())
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
                "left_out": self.left_out, "tables": [asdict(table) for table in self.tables],
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
        for table in self.tables:
            body = markdown([table.header, *table.rows]).rstrip()
            parts += [f"## {table.title}", body, *filter(None, [table.note])]
        for heading, texts in (("Notes", self.notes), ("Left out", self.left_out)):
            if texts:
                parts += [f"## {heading}", "\n".join(f"- {text}" for text in texts)]
        return "\n\n".join(parts) + "\n"

    def finish(self) -> int:
        """Writes the files and returns the exit status.

        3: the device failed. 1: wrong results. 2: no results.
        """
        self.write()
        for text in self.left_out:
            print(f"left out: {text}", file=sys.stderr)
            self.log(left_out=text)
        if self.device_lost:
            return DEVICE_LOST
        wrong = dict.fromkeys(f"{r.name} at {r.setting.length}" for r in self.rows if r.wrong)
        if wrong:
            names = ", ".join(wrong)
            print(f"error budget exceeded, therefore not timed: {names}", file=sys.stderr)
            return 1
        if not any(r.check is not None or r.kind == "state" for r in self.rows):
            print("nothing could be measured", file=sys.stderr)
            return 2
        return 0


# ---- a table ----------------------------------------------------------------------------------


def title(row: Row) -> str:
    return f"{row.suite}: {row.setting.title}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of a table, including each figure and ratio that at least one row has."""
    figures = [head for name, (head, _) in FIGURES.items() if any(name in r.figures for r in rows)]
    known = {name for row in rows for name in row.ratios}
    shared = [row.name for row in rows if row.case == SOFTMAX and row.name in known]
    peak = ["peak MB"] if any(r.peak_bytes is not None for r in rows) else []
    ratios = [f"time / {name}" for name in dict.fromkeys(shared)]
    first = ["B", "N", "direction", "implementation", "backend", ERROR, TIME, QUARTILES]
    return [*first, *figures, *ratios, *peak, "note"]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    error = f"out {row.error:.1e} relative" if row.error is not None else ""
    if row.check is not None:
        name, worst = row.check.worst
        error = f"{name} {worst.error:.1e} ({worst.share:.2f})"
    texts = {
        "B": str(row.setting.batch),
        "N": str(row.setting.length),
        "direction": row.direction,
        "implementation": row.name,
        "backend": row.backend or "",
        ERROR: error,
        TIME: milliseconds(row.seconds.median) if row.seconds else "",
        QUARTILES: quartiles(row.seconds) if row.seconds else "",
        "peak MB": f"{row.peak_bytes / 1e6:.0f}" if row.peak_bytes is not None else "",
    }
    texts |= {FIGURES[n][0]: FIGURES[n][1].format(x) for n, x in row.figures.items()}
    texts |= {f"time / {name}": f"{x.median:.2f}" for name, x in row.ratios.items()}
    # Ratios to other implementations of the same variant have no column and go into the note.
    other_ratios = [
        f"{x} = {texts[x]}" for x in texts if x.startswith("time / ") and x not in columns
    ]
    texts["note"] = "; ".join(filter(None, (row.note, *other_ratios)))
    return [texts.get(column, "") for column in columns]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4f}" if seconds < 1e-3 else f"{seconds * 1e3:.2f}"


def quartiles(spread: Spread) -> str:
    return f"{milliseconds(spread.lower)}–{milliseconds(spread.upper)}"


def line(columns: Sequence[str], texts: Sequence[str]) -> str:
    """One line of the console table. Column widths are fixed, since rows are printed one by one."""
    left = [i for i, column in enumerate(columns) if column in LEFT]
    return aligned(texts, [WIDTHS.get(name, max(6, len(name))) for name in columns], left)


# ---- the machine ------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The machine, the packages and the commit that the figures come from."""
    packages: dict[str, str | None] = {"attnzoo": attnzoo.__version__}
    for name in ("torch", "triton", "numpy", "entmax", "adasplash", "flash_sigmoid"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    machine = {
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
        gpu = torch.cuda.get_device_properties(0)
        machine |= {
            "device": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "cuda": torch.version.cuda,
            **nvidia_smi(),
        }
    return machine


# What `nvidia-smi` tells of a card: the power cap and the highest clocks.
CARD = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")


def nvidia_smi() -> dict[str, str | None]:
    """The driver, the power cap and the highest clocks of the first GPU; None if unknown.

    Each is asked for alone, because nvidia-smi answers nothing if it does not know one name.
    """

    def of(name: str) -> str | None:
        return output_of("nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader", "-i", "0")

    return {name.replace("driver_version", "driver").replace(".", "_"): of(name) for name in CARD}


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
    """Checks that a result file can be written, before anything is measured.

    Raises:
        UsageError: the file cannot be written.
    """
    if not path:
        return
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option} must be a file, got the folder {path}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}") from None


def write_json(path: str, document: dict[str, Any]) -> None:
    """Replaces the file in one step, so that no reader sees a partial file."""
    write_whole(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")
