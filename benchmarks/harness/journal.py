"""Files of JSON lines, to which findings are appended at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends one line. A process that is killed later does not lose it."""
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read(path: Path, start: int = 0) -> list[Line]:
    """The lines from byte ``start`` on. A last line that is not complete is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
