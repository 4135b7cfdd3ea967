"""rows.jsonl: one JSON object per line, appended whole, found again by its key.

A shard of a run writes a file of its own, rows-I-of-N.jsonl, since appends of several machines are
whole on no network file system; a folder is read with all such files in it.

A line is written by one append of all its bytes, so that a kill costs at most that line. A line
that is no JSON is counted and skipped, and the next one starts on a line of its own. A line that is
JSON and no row is an error: nobody wrote it here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commandline.errors import UsageError
from commandline.files import NotWritten
from evals.results.rows import Row, problem


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
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            self.damaged += 1
            return
        if (wrong := problem(row)) is not None:
            raise UsageError(f"{self.path}, line {number}: {wrong}; mend or remove this line")
        self.by_key[row["key"]] = row

    def append(self, row: Row) -> None:
        """Write one row; a value that JSON cannot hold (NaN) is refused.

        Raises:
            NotWritten: and the file is as it was.
        """
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._ends_open:
            line = b"\n" + line
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, line)
        except OSError as error:
            raise NotWritten(self.path, error) from error
        self._ends_open = False
        self.by_key[row["key"]] = row


def _append(path: Path, line: bytes) -> None:
    """Append all of a line, or nothing of it: a full disk may take a part."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size, left = os.fstat(file).st_size, line
        try:
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


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


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """The rows of results: of each folder, and of the tasks' folders in it; each key once.

    Raises:
        UsageError: a folder has no rows, or lines that are no rows.
    """
    found: dict[str, Row] = {}
    for folder in folders:
        mine: dict[str, Row] = {}
        for path in (folder, *sorted(sub for sub in folder.glob("*") if sub.is_dir())):
            read = Folder(path)
            mine |= read.by_key
            if read.damaged:
                print(f"{read.damaged} unreadable line(s) of {path} skipped", file=sys.stderr)
        if not mine:
            raise UsageError(f"{folder} has no results: there is no rows.jsonl in it")
        found |= mine
    return list(found.values())
