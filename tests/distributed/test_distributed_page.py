"""The torchrun example of docs/distributed.md runs as shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import python_blocks

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "distributed.md").read_text()


@pytest.mark.slow
def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    (command,) = re.findall(r"^torchrun (.+)$", TEXT, re.MULTILINE)
    for block in python_blocks(TEXT):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = (float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout))
    assert last < first / 2
