"""rows.jsonl: one JSON object per line, appended whole, found again by its key.

A shard of a run writes a file of its own, rows-I-of-N.jsonl, since appends of several machines are
whole on no network file system; a folder is read with all such files in it.

A line is written by one append of all its bytes, so that a kill costs at most that line. A line
that cannot be read is counted and skipped, and the next one starts on a line of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.cells import Refused

Row = dict[str, Any]


class Rows:
    """The rows of a file, by key; the file is created by the first append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Row] = {}
        self.damaged = 0
        self._ends_open = False
        if not path.exists():
            return
        data = path.read_bytes()
        self._ends_open = bool(data) and not data.endswith(b"\n")
        for line in data.split(b"\n"):
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("key"), str):
            self.by_key[row["key"]] = row
        else:
            self.damaged += 1

    def append(self, row: Row) -> None:
        """Write one row; a value that JSON cannot hold (NaN) is refused."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._ends_open:
            line = b"\n" + line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(file, line)
        finally:
            os.close(file)
        self._ends_open = written != len(line)
        if self._ends_open:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")
        self.by_key[row["key"]] = row


@dataclass(frozen=True)
class Shard:
    """The index-th of count parts; local_rank is torchrun's, of a process among those of a host."""

    index: int
    count: int
    local_rank: int | None = None


WHOLE = Shard(0, 1)


class Folder:
    """All rows of a folder; new ones are appended to the shard's own file."""

    def __init__(self, path: Path, shard: Shard = WHOLE) -> None:
        part = f"rows-{shard.index}-of-{shard.count}.jsonl"
        name = part if shard.count > 1 else "rows.jsonl"
        self.path = path
        self.own = Rows(path / name)
        self.damaged = self.own.damaged
        self.by_key: dict[str, Row] = {}
        for file in sorted(path.glob("rows*.jsonl")):
            others = self.own if file == self.own.path else Rows(file)
            self.by_key |= others.by_key
            self.damaged += 0 if others is self.own else others.damaged

    def append(self, row: Row) -> None:
        """Write one row."""
        self.own.append(row)
        self.by_key[row["key"]] = row


_NEEDED = (
    "task", "variant", "positions", "seed", "length", "status", "message", "metrics", "curves",
    "learned", "chance", "sequences", "settings", "version", "schedule", "data", "device", "torch",
    "attnzoo", "commit", "cpu_seconds", "train_cpu_seconds", "training",
)  # fmt: skip


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """The rows of results: of each folder, and of the tasks' folders in it; each key once.

    Raises:
        Refused: a folder has no rows, or rows that are not of an eval of this version.
    """
    found: dict[str, Row] = {}
    for folder in folders:
        mine: dict[str, Row] = {}
        for place in (folder, *sorted(path for path in folder.glob("*") if path.is_dir())):
            read = Folder(place)
            mine |= read.by_key
            if read.damaged:
                print(f"{read.damaged} unreadable line(s) of {place} skipped", file=sys.stderr)
        if not mine:
            raise Refused(f"{folder} has no results: there is no rows.jsonl in it")
        for row in mine.values():
            if lacking := [name for name in _NEEDED if name not in row]:
                raise Refused(f"{folder} has rows of another version: no {', '.join(lacking)}")
        found |= mine
    return list(found.values())


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(temporary, path)
