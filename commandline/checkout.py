"""The git commit of the checkout, and the output of programs that are run in it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


def output_of(*command: str) -> str | None:
    """The output of a program run in the checkout, or None if it fails or does not exist."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def commit() -> str | None:
    """The checkout's commit, with "-dirty" if tracked files were changed; None outside of git."""
    head = output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = head and output_of("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head
