"""Loggers get the training loss and the metrics at each length.

The tests replace TensorBoard and wandb by stubs that record calls.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evals.__main__ import main

pytestmark = pytest.mark.usefixtures("no_pictures")
RUN = ["max-retrieval", "--preset", "smoke", "--variants", "softmax,ssmax(s=0.5)", "--steps", "30"]
RUN += ["--workers", "0", "--set", "test_sequences=20", "--lengths", "16"]


@pytest.mark.slow
def test_tensorboard_has_a_folder_per_training_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[tuple[str, int]]] = {}
    closed = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            self.folder = folder
            seen[folder] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, float)
            seen[self.folder].append((name, step))

        def close(self) -> None:
            closed.append(self.folder)

    stand_in = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    assert main([*RUN, "--log", "tensorboard", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "tensorboard" / "max-retrieval"
    assert set(seen) == {
        str(folder / "softmax" / "none" / "seed0"),
        str(folder / "ssmax_s=0.5_" / "none" / "seed0"),
    }
    assert closed == list(seen)
    calls = seen[str(folder / "softmax" / "none" / "seed0")]
    assert [step for name, step in calls if name == "train/loss"] == [25, 30]
    assert ("test/accuracy", 16) in calls


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that are started of a stub of wandb."""
    runs: list[Any] = []

    def init(**options: Any) -> Any:
        run = SimpleNamespace(options=options, axes={}, rows=[], finished=False)
        run.define_metric = lambda name, step_metric=None: run.axes.update({name: step_metric})
        run.log = run.rows.append
        run.finish = lambda: setattr(run, "finished", True)
        runs.append(run)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return runs


@pytest.mark.slow
def test_each_training_run_is_a_wandb_run_with_its_own_axes(
    tmp_path: Path, wandb_runs: list[Any]
) -> None:
    assert main([*RUN, "--log", "wandb", "--out", str(tmp_path)]) == 0
    assert [run.options["name"] for run in wandb_runs] == [
        "max-retrieval/softmax/none/seed0",
        "max-retrieval/ssmax(s=0.5)/none/seed0",
    ]
    for run in wandb_runs:
        assert run.options["dir"] == str(tmp_path)
        assert run.options["group"] == "max-retrieval"
        config = run.options["config"]
        assert config["variant"] in run.options["name"]
        assert (config["task"], config["positions"], config["seed"]) == ("max-retrieval", "none", 0)
        assert (config["settings"]["steps"], config["settings"]["test_sequences"]) == (30, 20)
        assert run.axes["test/*"] == "length"
        assert [row["step"] for row in run.rows if "train/loss" in row] == [25, 30]
        assert any(row.get("length") == 16 and "test/accuracy" in row for row in run.rows)
        assert run.finished


@pytest.mark.slow
def test_the_config_of_a_wandb_run_has_its_scaling_of_rope(
    tmp_path: Path, wandb_runs: list[Any]
) -> None:
    line = ["copy", "--preset", "smoke", "--variants", "softmax", "--positions", "rope,rope->yarn"]
    line += ["--steps", "2", "--workers", "0", "--lengths", "16", "--set", "test_sequences=4"]
    assert main([*line, "--log", "wandb", "--out", str(tmp_path)]) == 0
    configs = [run.options["config"] for run in wandb_runs]
    assert [config["positions"] for config in configs] == ["rope", "rope->yarn"]
    assert [config["condition"] for config in configs] == [None, None]


def test_a_missing_logger_package_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    out = tmp_path / "out"
    assert main([*RUN, "--log", "wandb", "--out", str(out)]) == 2
    assert "error: --log wandb needs a package" in (text := capsys.readouterr().err)
    assert "pip install wandb" in text
    assert not out.exists()
