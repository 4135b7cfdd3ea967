"""Runs a function on several ranks, each a process, with gloo."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "call").write_bytes(
            pickle.dumps((function.__module__, function.__qualname__, arguments))
        )
        command = [sys.executable, "-m", "helpers.ranks", folder, str(count), str(seconds)]
        env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env=env, text=True, cwd=TESTS.parent,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(count)
        ]  # fmt: skip
        end = time.monotonic() + seconds
        texts = []
        for process in processes:
            try:
                texts.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                texts.append(f"no result after {seconds} s\n{process.communicate()[0]}")
        paths = [path / f"result-{rank}" for rank in range(count)]
        return [
            pickle.loads(path.read_bytes()) if path.exists() else text
            for path, text in zip(paths, texts, strict=True)
        ]


def _main(folder: str, count: str, seconds: str, rank: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, name, arguments = pickle.loads((Path(folder) / "call").read_bytes())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(count),
        timeout=timedelta(seconds=float(seconds)),
    )  # fmt: skip
    result = getattr(import_module(module), name)(int(rank), *arguments)
    path = Path(folder) / f"result-{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(result))
    path.with_suffix(".part").rename(path)
    # Threads of gloo may still run, and Python's shutdown then sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
