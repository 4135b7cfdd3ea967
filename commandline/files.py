"""Atomic writing of files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from commandline.errors import UsageError


class NotWritten(OSError):
    """A file could not be written, for example because the disk is full."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} could not be written: {error.strerror or error}")


def check_writable(what: str, folder: Path) -> None:
    """Make a folder if it does not exist; raises UsageError unless files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"{what} must be writable, got {str(folder)!r}: {error.strerror or error}"
        ) from error


def check_folder(what: str, path: Path) -> None:
    """Raise UsageError unless the path is a folder or can become one; makes nothing."""
    absolute = path.absolute()
    if not next(part for part in (absolute, *absolute.parents) if part.exists()).is_dir():
        raise UsageError(f"{what} must be a folder, got {str(path)!r}")


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically: a reader sees either the old or the new content, never a mixture.

    Raises:
        NotWritten: the file could not be written; an existing file is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # the temporary file exists only after an error
    except OSError as error:
        raise NotWritten(path, error) from error
