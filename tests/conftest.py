"""One thread per worker, a fixed seed per test, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the processes that tests start: two workers with two
# threads each would fight over two cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")

import random

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no CUDA device"))
