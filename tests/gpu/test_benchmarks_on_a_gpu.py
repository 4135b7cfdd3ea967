"""The timer, the check of results and a benchmark command on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness.cases import SOFTMAX, Inputs, Setting
from benchmarks.harness.correctness import Reference
from benchmarks.harness.timing import CudaEvents

pytestmark = pytest.mark.gpu


def test_cuda_events_measure_time_and_peak_memory(device: str, cuda: Any) -> None:
    x = torch.randn(1024, 1024, device=device)
    timer = CudaEvents(cuda, torch.empty(2**28, dtype=torch.int8, device=device).zero_)
    seconds = timer.rounds({"one": lambda: x @ x, "two": lambda: x @ x @ x}, 5, 0.001)
    peak = timer.peak_bytes(lambda: x @ x)
    timer.synchronize()
    timer.release()
    assert min(seconds["one"]) > 0
    assert sum(seconds["two"]) > sum(seconds["one"])
    assert peak is not None
    assert peak >= x.numel() * 4


@pytest.mark.parametrize("causal", [True, False])
def test_check_passes_on_a_gpu(causal: bool, device: str) -> None:
    setting = Setting(
        length=150, batch=3, heads=3, head_dim=16, causal=causal, device=device, dtype="bfloat16"
    )
    checked = Reference.of(SOFTMAX, Inputs.make(setting, gradients=True)).check("tiled", True)
    assert checked.ok, checked.worst


def test_attention_command_on_a_gpu(tmp_path: Path, device: str) -> None:
    """Each row has a note or a positive time."""
    file = tmp_path / "out.json"
    command = ["attention", "--device", device, "--variants", "softmax", "--lengths", "256",
        "--head-dim", "64", "--heads", "2", "--batch", "2", "--inputs", "iid", "--repeats", "3",
        "--backend", "tiled", "--baselines", "flash,cudnn", "--json", str(file)]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3
    assert all(row["note"] or row["seconds"]["median"] > 0 for row in rows)
    assert all(row["check"]["ok"] for row in rows if row["name"] == "softmax")
