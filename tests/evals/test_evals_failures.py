"""After an error, a study prints one line or writes a failed row. All results are kept."""

from __future__ import annotations

import json
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main as benchmarks
from benchmarks.harness import report
from commandline.files import NotWritten, write_whole
from evals import run as runs
from evals.__main__ import main
from evals.launch import execute, reason_of
from evals.options import Options
from evals.plan import plan_study
from evals.results.store import RowFile
from evals.run import NotFinite, Run, RunContext, fit
from evals.task import Settings
from evals.tasks import TASKS
from helpers.evals_rows import row

SMALL = ["max-retrieval", "--preset", "smoke", "--seeds", "1", "--steps", "2", "--lengths", "16"]
TASK = "max-retrieval"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit files to ``size`` bytes. A write beyond the limit is cut, and the next one fails."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


# ---- a full disk ------------------------------------------------------------------------------


def test_appending_a_row_on_a_full_disk_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path)
    rows.append(row("softmax", 0.5, key="a"))
    before = path.read_bytes()
    with full_disk(len(before) + 10), pytest.raises(NotWritten, match=r"rows\.jsonl could not be"):
        rows.append(row("softmax", 0.5, key="b"))
    assert path.read_bytes() == before
    assert sorted(rows.by_key) == ["a"]
    rows.append(row("softmax", 0.5, key="b"))
    assert sorted(RowFile(path).by_key) == ["a", "b"]
    assert RowFile(path).damaged == 0


def test_replacing_a_file_on_a_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "summary.csv"
    write_whole(file, "old")
    with full_disk(1000), pytest.raises(NotWritten, match=r"summary\.csv could not be written"):
        write_whole(file, "x" * 2000)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(NotWritten, match="could not be written"):
        write_whole(file / "below a file", "")


@pytest.mark.parametrize("command", ["laws", "ranks", "in-context"])
def test_out_is_checked_before_the_work(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for work in ("reporting.laws.measure", "theory.ranks.attention_table",
                 "reporting.in_context.baselines"):  # fmt: skip
        monkeypatch.setattr(f"evals.{work}", None)  # calling it raises TypeError
    assert main([command, "--out", __file__]) == 2
    error = f"error: --out must be writable, got {__file__!r}: File exists\n"
    assert capsys.readouterr().err == error


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_study_on_a_full_disk_ends_with_a_one_line_error(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*SMALL, "--variants", "softmax", "--workers", workers, "--out", str(tmp_path)]
    with full_disk(20_000):  # below the size of a model file; workers inherit the limit
        assert main(run) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {tmp_path / TASK / 'models'}")
    assert shown.endswith("could not be written: File too large\n")
    assert shown.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_benchmark_on_a_full_disk_ends_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    monkeypatch.setattr(report, "environment", lambda: {"cpu": "x" * 20_000, "cores": 1, "load": 0,
                                                        "commit": None})  # fmt: skip
    line = ["attention", "--variants", "softmax", "--lengths", "16", "--check-only"]
    with full_disk(10_000):
        assert benchmarks([*line, "--json", str(file)]) == 2
    assert f"{file} could not be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pictures")
def test_an_error_ends_only_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = runs.train

    def broken(task, variant, *following):
        if variant.name == "softmax":
            raise KeyError("a defect")
        return train(task, variant, *following)

    monkeypatch.setattr(runs, "train", broken)
    run = [*SMALL, "--variants", "softmax,ssmax", "--workers", "0", "--out", str(tmp_path)]
    assert main(run) == 1
    rows = (tmp_path / TASK / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in rows] == ["ssmax"]
    shown = capsys.readouterr().err
    first, _, *following = shown.splitlines()
    assert first.startswith("[1/2] max-retrieval softmax seed 0: failed after ")
    assert following == [
        "failed: max-retrieval softmax seed 0: KeyError: 'a defect'",
        "Repeat the command with --verbose for the traceback.",
    ]
    assert main([*run, "--verbose"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


class ShortLived:
    """A worker that does its first run and dies before the next one is sent."""

    def __init__(self, context: object) -> None:
        self.used = False

    def messages(self, run: Run) -> list[tuple[Any, ...]]:
        self.used, used = True, self.used
        return [("died", 1)] if used else [("done", "done")]

    def stop(self) -> None:
        pass


def test_the_run_of_a_worker_that_died_idle_gets_a_new_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evals.launch.Worker", ShortLived)
    of_task = plan_study(TASKS[TASK], Options(preset="smoke", seeds=3), {}).runs({})[:3]
    ends: list[Any] = []
    context = RunContext("cpu", None, Path(), None)
    execute(of_task, context, lambda run, message: ends.append((run, message)), workers=1)
    assert ends == [(run, ("done", "done")) for run in of_task]


# ---- divergence -------------------------------------------------------------------------------

STEPS = Settings(
    steps=1, batch=1, train_shortest=2, train_longest=2, test_sequences=1, test_least=1
)


def test_nan_parameters_after_the_last_step_raise() -> None:
    model = nn.Linear(1, 1)

    def loss(step: int) -> torch.Tensor:  # the loss is finite, its gradient is not
        return (model.weight - model.weight.detach()).abs().sum().sqrt()

    with pytest.raises(NotFinite, match="parameters are not finite after step 1"):
        fit(model, loss, STEPS, lambda step, value, part: None)


def test_an_error_with_nan_parameters_is_reported_as_not_finite() -> None:
    model = nn.Linear(1, 1)

    def loss(step: int) -> torch.Tensor:
        raise IndexError("index -1 is out of bounds")

    with pytest.raises(IndexError):
        fit(model, loss, STEPS, lambda step, value, part: None)
    model.weight.data.fill_(float("nan"))
    with pytest.raises(NotFinite, match="not finite at step 1: index -1 is out of bounds"):
        fit(model, loss, STEPS, lambda step, value, part: None)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("steps", ["1", "2", "30"])
def test_a_diverging_run_gives_rows_with_status_nan(
    steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parameters are huge but finite after one step, and not finite after two steps."""
    options = ["--variants", "softmax,ssmax,softmax->topk", "--set", "learning_rate=1e38"]
    run = [*SMALL, *options, "--steps", steps, "--workers", "0", "--out", str(tmp_path)]
    assert main(run) in (0, 1)
    rows = [json.loads(x) for x in (tmp_path / TASK / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["nan"] * 3
    assert all("finite" in row["message"] or "nan" in row["message"] for row in rows)
    hint = "; 3 failed, --retry-failed repeats them"
    assert hint not in capsys.readouterr().out
    assert main([*run, "--dry-run"]) == 0
    assert hint in capsys.readouterr().out
    assert main([*run, "--dry-run", "--retry-failed"]) == 0
    assert hint not in capsys.readouterr().out


def test_reason_of_a_failure_is_the_first_line_of_its_message() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("no memory\nCompile with debug symbols for details.") from error
    except RuntimeError:
        text = traceback.format_exc()
    assert reason_of(text) == "RuntimeError: no memory"
