"""Tests that run on a GPU, and what they do where torch sees none.

Without a CUDA device, each test runs on the CPU up to its first call of a backend, and is then
skipped. So invalid inputs fail on every machine.

With ``--rehearse``, kernels are compiled for an H100 and bound to their arguments, but not
executed: see `benchmarks.kernels.stand_in`. Results are uninitialized memory, so a comparison that
fails does not count. Every other error does.

With a CUDA device and xdist, a worker whose device is lost ends, and xdist starts another one.
Outcomes are appended to the file ATTNZOO_GPU_OUTCOMES at once, because a pytest that is stopped
prints no summary.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from attnzoo.backends import BACKENDS

GPU = torch.cuda.is_available()
WORKER = "PYTEST_XDIST_WORKER" in os.environ
REASON = "gpu: torch sees no CUDA device"
REHEARSAL = "rehearsal without a GPU: kernels are not executed, failed comparisons do not count"
TRACEBACK_END = 1500  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse", action="store_true",
        help="Run the tests marked gpu without a GPU: kernels are compiled, but not executed",
    )  # fmt: skip


def needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def rehearses(config: pytest.Config) -> bool:
    return config.getoption("--rehearse", default=False)


def pytest_configure(config: pytest.Config) -> None:
    if not rehearses(config):
        return
    if GPU:
        raise pytest.UsageError("--rehearse is for machines without a GPU, but torch sees one")
    os.environ.pop("TRITON_INTERPRET", None)
    from benchmarks.kernels.stand_in import install

    install()


def pytest_report_header(config: pytest.Config) -> str | None:
    return REHEARSAL if rehearses(config) else None


@pytest.fixture
def device() -> str:
    return "cuda" if GPU else "cpu"


@pytest.fixture
def cuda() -> Any:
    """torch.cuda, or without a GPU an object whose functions do nothing."""
    if GPU:
        return torch.cuda
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 1.0
    cuda.memory_allocated.return_value = cuda.max_memory_allocated.return_value = 0
    return cuda


@pytest.fixture(autouse=True)
def without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU or not needs_gpu(request.node):
        return
    if rehearses(request.config):
        # Inductor would compile C++ code for the CPU, which says nothing about a GPU.
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        return
    for backend in BACKENDS.values():
        monkeypatch.setitem(vars(backend), "run", skip)


def skip(*args: Any) -> None:
    pytest.skip(REASON)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    if not needs_gpu(pyfuncitem):
        return (yield)
    try:
        result = yield
    except AssertionError as error:
        file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if GPU or pyfuncitem.config.rootpath / "tests" not in file.parents:
            raise
        result = True
    if GPU:
        torch.cuda.synchronize()  # raises errors of kernels that no result was read from
    elif not rehearses(pyfuncitem.config):
        skip()
    return result


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After some errors, such as an illegal address, every CUDA call of the process fails."""
    if not GPU:
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if WORKER:
            os._exit(1)
        pytest.exit(f"the device is lost: {error}", returncode=3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("ATTNZOO_GPU_OUTCOMES")
    if file is None or WORKER:
        return
    if report.when != "call" and report.outcome == "passed":
        return
    seconds = round(report.duration, 2)
    outcome = {"test": report.nodeid, "outcome": report.outcome, "seconds": seconds}
    if report.outcome == "failed":
        outcome["why"] = str(report.longrepr)[-TRACEBACK_END:]
    with open(file, "a") as lines:
        lines.write(json.dumps(outcome) + "\n")
