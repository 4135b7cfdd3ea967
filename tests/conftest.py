"""One thread per worker, a fixed seed per test, and the marker ``interpreter``.

Without a CUDA device, Triton kernels run in Triton's interpreter, in tests marked ``interpreter``.
With a CUDA device, kernels are compiled and these tests are skipped, because a process cannot
both compile and interpret kernels. Tests marked ``gpu`` are in ``tests/gpu``.
"""

from __future__ import annotations

import os

# torch reads these variables on import; subprocesses of tests inherit them. Without them, each
# worker would start as many threads as there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
# A CPU without AVX-512 has no AMX either. torch 2.13 multiplies bf16 with AMX regardless of this
# variable, and then raises "pack_vnni2 is only supported when avx512 is supported".
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import atexit
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from attnzoo.core import device, registry
from helpers.fast_interpreter import speed_up_interpreter

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this variable on import

gc.disable()  # until all tests are collected: the objects that imports make all stay


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if GPU:
        torch.manual_seed(0)
    else:  # torch.manual_seed also looks for other devices, which takes longer than most tests
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """Benchmarks set the number of threads. Two workers with two threads each slow each other."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    """Removes the graphs that a test compiled. More than eight of one function raise an error, also
    if several tests made them."""
    yield
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None and compiler.counters.pop("stats", None):
        torch.compiler.reset()


@pytest.fixture(params=["cpu", "gpu"])
def sizes_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the block sizes and loops of a CPU, and with those of a GPU."""
    if request.param == "gpu":
        monkeypatch.setattr(device, "CPU", ())


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank, this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ignores numpy's warnings about exp2 overflow and log2(0) in interpreted kernels."""
    if request.node.get_closest_marker("interpreter") is None:
        yield
        return
    speed_up_interpreter()
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variants that a test registers."""
    monkeypatch.setattr(registry, "_VARIANTS", dict(registry._VARIANTS))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty and similar functions return NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not GPU:
        return
    reason = "interpreter: kernels are compiled on this machine"
    for item in items:
        if item.get_closest_marker("interpreter"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # the collector then skips these objects in each of its runs
    gc.enable()
    atexit.register(gc.unfreeze)  # without it, Triton's bindings report objects as leaked
