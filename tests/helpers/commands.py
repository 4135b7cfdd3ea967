"""Runs `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from helpers.processes import ROOT, without_interpreter


def benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process that sees no GPU. Returns the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT, capture_output=True, text=True,
        env={**without_interpreter(), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error message for invalid options. The command runs in this process to save time."""
    try:
        status = main(list(args))
    except SystemExit as stop:  # raised by argparse
        status = stop.code
    assert status == 2
    return capsys.readouterr().err
