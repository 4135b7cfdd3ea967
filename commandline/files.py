"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class NotWritten(OSError):
    """A file could not be written, as on a full disk; the text says which and why."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} could not be written: {error.strerror or error}")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises:
        NotWritten: and nothing of it is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # there only where something was raised
    except OSError as error:
        raise NotWritten(path, error) from error
