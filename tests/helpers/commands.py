"""`python -m benchmarks` in a process of its own, as on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]


def benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    # Not under the interpreter, which the tests of the kernels turn on.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT, capture_output=True, text=True, env={**env, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command says when it refuses these options; in this process, which is quicker."""
    try:
        status = main(list(args))
    except SystemExit as stop:  # argparse refuses by itself
        status = stop.code
    assert status == 2
    return capsys.readouterr().err
