"""Result files. Each line of rows.jsonl is one result row as JSON. Of several rows with one
key the last is used; of several files, one without a failure.

A line is appended in one write, so a killed process loses at most that line. Each shard writes its
own file, rows-I-of-N.jsonl, because network file systems do not append atomically from several
machines. Reading a folder reads all these files.

A line that is not JSON is counted and skipped. A line that is JSON but not a row is an error.
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


class RowFile:
    """The rows of a file by key. The first append creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Row] = {}
        self.damaged = 0
        self._lacks_newline = False
        if not path.exists():
            return
        data = path.read_bytes()
        self._lacks_newline = bool(data) and not data.endswith(b"\n")
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                self.damaged += 1
                continue
            if (wrong := problem(row)) is not None:
                raise UsageError(f"{path}, line {number}: {wrong}; correct or remove this line")
            self.by_key[row["key"]] = row

    def append(self, row: Row) -> None:
        """Append one row to the file.

        Raises:
            NotWritten: the file could not be written and is unchanged.
            UsageError: the row is invalid, for example because a task of a plugin lacks its score.
            ValueError: the row has a value that JSON cannot hold, such as NaN.
        """
        if (wrong := problem(row)) is not None:
            raise UsageError(f"invalid result of {row['task']}, {row['variant']}: {wrong}")
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._lacks_newline:
            line = b"\n" + line
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, line)
        except OSError as error:
            raise NotWritten(self.path, error) from error
        self._lacks_newline = False
        self.by_key[row["key"]] = row


def _append(path: Path, line: bytes) -> None:
    """Append a line. If the write fails, for example on a full disk, the file is unchanged."""
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


def _merge(rows: dict[str, Row], file_rows: dict[str, Row]) -> None:
    """Add the rows of another file. A failure does not replace the result of a repeated run."""
    for key, row in file_rows.items():
        if row["status"] == "ok" or rows.get(key, row)["status"] != "ok":
            rows[key] = row


def _changed(path: Path) -> tuple[int, str]:
    """Orders files by the time of their last change: of several versions the last one counts."""
    return path.stat().st_mtime_ns, path.name


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` parts of a study. local_rank: LOCAL_RANK of torchrun, if set."""

    index: int
    count: int
    local_rank: int | None = None


UNSHARDED = Shard(0, 1)


class Folder:
    """The rows of all files of a folder. New rows are appended to this shard's file."""

    def __init__(self, path: Path, shard: Shard = UNSHARDED) -> None:
        part = f"rows-{shard.index}-of-{shard.count}.jsonl"
        name = part if shard.count > 1 else "rows.jsonl"
        self.path = path
        self.shard_file = RowFile(path / name)
        self.damaged = self.shard_file.damaged
        self.by_key: dict[str, Row] = {}
        for file in sorted(path.glob("rows*.jsonl"), key=_changed):
            others = self.shard_file if file == self.shard_file.path else RowFile(file)
            _merge(self.by_key, others.by_key)
            self.damaged += 0 if others is self.shard_file else others.damaged

    def append(self, row: Row) -> None:
        """Append one row."""
        self.shard_file.append(row)
        self.by_key[row["key"]] = row


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Read the rows in these folders and direct subfolders. The last row of each key is kept.

    Raises:
        UsageError: a folder has no rows, or a file has a line that is JSON but not a row.
    """
    rows: dict[str, Row] = {}
    for folder in folders:
        folder_rows: dict[str, Row] = {}
        for path in (folder, *sorted(sub for sub in folder.glob("*") if sub.is_dir())):
            contents = Folder(path)
            _merge(folder_rows, contents.by_key)
            if contents.damaged:
                print(
                    f"warning: skipped {contents.damaged} unreadable line(s) in {path}",
                    file=sys.stderr,
                )
        if not folder_rows:
            raise UsageError(f"no results in {folder}: it has no rows*.jsonl with rows")
        _merge(rows, folder_rows)
    return list(rows.values())
