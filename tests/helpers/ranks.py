"""Runs a function on several ranks, each a process, with gloo.

Imports take seconds per process. So one process imports what the functions need, and the ranks of
all tests are its forks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120
) -> list[Any]:
    """The results of function(rank, *arguments) on ``count`` ranks. It must be a module's function.

    A rank that raises or ends gives the text of its output instead.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, call = Path(name), (function.__module__, function.__qualname__, arguments)
        (folder / "call").write_bytes(pickle.dumps((*call, count, seconds)))
        forking = forking_process()
        assert forking.stdin is not None
        assert forking.stdout is not None
        print(folder, file=forking.stdin, flush=True)
        assert forking.stdout.readline() == "done\n", "the process that starts the ranks has ended"
        return [
            pickle.loads(result.read_bytes()) if result.exists() else output.read_text()
            for result, output in (_files(folder, rank) for rank in range(count))
        ]


@cache
def forking_process() -> subprocess.Popen[str]:
    """The process that forks. It ends with its input, and so with this process."""
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.ranks"], env=env, text=True, cwd=TESTS.parent,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"result-{rank}", folder / f"output-{rank}"


def _run_calls() -> None:
    """Run the calls in the folders that the standard input names, one per line."""
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        folder = Path(line.removesuffix("\n"))
        module, name, arguments, count, seconds = pickle.loads((folder / "call").read_bytes())
        function = getattr(import_module(module), name)
        ranks = [
            fork.Process(target=_run_rank, args=(folder, rank, count, seconds, function, arguments))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        for rank, process in enumerate(ranks):
            process.join(max(1.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                with _files(folder, rank)[1].open("a") as output:
                    output.write(f"no result after {seconds} s\n")
        print("done", flush=True)


def _run_rank(
    folder: Path,
    rank: int,
    count: int,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    result, output = _files(folder, rank)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps(function(rank, *arguments)))
    part.rename(result)
    # Threads of gloo may still run, and Python's shutdown then sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _run_calls()
