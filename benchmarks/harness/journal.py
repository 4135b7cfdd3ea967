"""Files of JSON lines, to which findings are appended at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends one line. A process that is killed later does not lose it."""
    with path.open("a+b") as file:
        broken = file.tell() > 0 and file.seek(-1, 2) >= 0 and file.read(1) != b"\n"
        text = json.dumps(line, allow_nan=False) + "\n"
        file.write(("\n" + text if broken else text).encode())


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
