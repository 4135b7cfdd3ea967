"""New processes in which Triton compiles kernels. conftest.py turns on its interpreter here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_interpreter() -> dict[str, str]:
    """The environment variables of this process, without that of Triton's interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def output_of(code: str) -> str:
    """Run code in a new process, with warnings as errors, and return the printed text."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT, capture_output=True, text=True, env=without_interpreter(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
