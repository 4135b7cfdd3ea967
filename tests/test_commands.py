"""What all commands of the repository share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commandline.start import start
from helpers.processes import ROOT, without_interpreter


def closed_pipe() -> int:
    """The end of a pipe to write to; nobody reads the other end."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("letters", [1, 100_000], ids=["in the buffer", "beyond the buffer"])
def test_a_closed_output_ends_a_command_without_an_error(
    letters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(lambda: 3) == 3
    with os.fdopen(closed_pipe(), "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert start(lambda: print("x" * letters) or 0) == 1


def test_another_closed_pipe_is_an_error() -> None:
    with pytest.raises(BrokenPipeError):
        start(lambda: os.write(closed_pipe(), b"x"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evals ties --sequences 2", "benchmarks -h", "attnzoo"])
def test_no_command_prints_a_traceback_if_its_output_is_closed(command: str) -> None:
    writer = closed_pipe()
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, env=without_interpreter(),
    )  # fmt: skip
    os.close(writer)
    assert "Error" not in done.stderr
