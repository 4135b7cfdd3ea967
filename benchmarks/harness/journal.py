"""Files of JSON lines, to which findings are appended at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends one line. A process that is killed later does not lose it."""
    text = json.dumps(line, allow_nan=False) + "\n"
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a killed process left half a line
                text = "\n" + text
        file.write(text.encode())


def read(path: Path, start: int = 0) -> list[Line]:
    """The lines from byte ``start`` on, without those that a killed process left unfinished."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        return [line for text in file.read().splitlines() if (line := parsed(text)) is not None]


def parsed(text: bytes) -> Line | None:
    try:
        return json.loads(text)
    except ValueError:
        return None
