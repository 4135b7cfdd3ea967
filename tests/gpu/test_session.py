"""What conftest.py does without a GPU, and when a GPU is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import ROOT, output_of, without_interpreter

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FAKE_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.synchronize = lambda: None
"""
CALLS = """
import attnzoo, pytest, torch

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("length", [4, 5])
def test_call(length):
    attnzoo.attention(*torch.ones(3, 1, 1, length, 8).unbind(), "cosformer", max_length=4)

def test_comparison():
    assert 1 + 1 == 3

def test_assertion_of_the_library():
    exec(compile("assert False", "library.py", "exec"))
"""
LOST = """
import pytest, torch

pytestmark = pytest.mark.gpu

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_before():
    pass

def test_lost():
    torch.cuda.synchronize = lost

def test_after():
    pass
"""


def outcomes(folder: Path, tests: str, *options: str, plugin: str = "") -> list[tuple[str, str]]:
    """(test, outcome or end of the traceback), in order, of a session with conftest.py's hooks."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(tests)
    (folder / "plugin.py").write_text(plugin)
    file = folder / "outcomes.jsonl"
    paths = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT)))
    env = {name: x for name, x in without_interpreter().items() if name != "PYTEST_XDIST_WORKER"}
    plugins = ("-p", "plugin", "-p", "gpu.conftest", "-p", "no:cacheprovider")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", ".", *options, "tests"],
        cwd=folder, capture_output=True,
        env={**env, **NO_GPU, "PYTHONPATH": paths, "ATTNZOO_GPU_OUTCOMES": str(file)},
    )  # fmt: skip
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(x["test"].partition("::")[2], x.get("why", x["outcome"])) for x in lines]


def test_collection_imports_no_optional_package() -> None:
    code = (
        "import pytest, sys; pytest.main(['-qq', '--collect-only', 'tests/gpu']); "
        "optional = 'entmax nbclient pydantic scipy selenium transformers'; "
        "print(sorted({*optional.split()} & {*sys.modules}))"
    )
    assert output_of(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("options", "runs"),
    [((), "skipped"), pytest.param(("--rehearse",), "passed", marks=pytest.mark.slow)],
)
def test_all_errors_count_without_a_gpu_except_failed_comparisons(
    tmp_path: Path, options: tuple[str, ...], runs: str
) -> None:
    (valid, invalid, comparison, other) = outcomes(tmp_path, CALLS, *options)
    assert valid == ("test_call[4]", runs)
    assert "ValueError" in invalid[1]
    assert comparison == ("test_comparison", runs)
    assert "AssertionError" in other[1]


@pytest.mark.slow
def test_worker_that_lost_its_device_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    before, lost, crashed, after = outcomes(tmp_path, LOST, "-n", "1", plugin=FAKE_GPU)
    assert before == ("test_before", "passed")
    assert "an illegal memory access" in lost[1]
    assert "crashed while running" in crashed[1]
    assert after == ("test_after", "passed")


@pytest.mark.slow
def test_rehearsal_compiles_kernels(tmp_path: Path) -> None:
    """The calls of one variant on a packed projection: flash and decode, with a graph."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rehearse", "tests/gpu", "-k",
         "softmax and (unaligned or graph and not compiles)"],
        cwd=ROOT, capture_output=True, text=True,
        env={**without_interpreter(), **NO_GPU, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    names = {path.name.split(".")[0] for path in tmp_path.rglob("*.cubin")}
    assert {"flash_forward", "decode"} <= names
