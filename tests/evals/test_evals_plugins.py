"""Plugins can add tasks to the evals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals import SequenceTask, register_task
from evals.__main__ import main
from evals.tasks import TASKS

DOCS = Path(__file__).parents[2] / "docs" / "evals.md"
SMALL = ["--variants", "softmax,ssmax", "--steps", "2", "--lengths", "16,24", "--workers", "1"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.reporting.plots.png", lambda figure: b"")


def documented_task() -> str:
    """The source of the example task in docs/evals.md."""
    found = re.search(r"```python\n(# recall\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_a_task_from_a_plugin_runs_in_workers_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "recall.py", str(tmp_path / "out")
    file.write_text(documented_task())
    plugin = ["--plugin", str(file)]
    assert main(["recall", *plugin, *SMALL, "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "recall: Accuracy, % (higher is better)" in shown
    assert "chance 6.2" in shown
    rows = (tmp_path / "out" / "recall" / "rows.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in rows} == {"ok"}
    assert main(["compare", out, out, *plugin]) == 0
    with pytest.raises(SystemExit):
        main(["recall", *plugin, "--help"])
    assert "Recall the first symbol of a sequence." in capsys.readouterr().out
    assert main(["recall", *plugin, "--preset", "paper"]) == 2
    assert "recall has no preset 'paper'; it has: quick" in capsys.readouterr().err
    # Keys of runs contain a hash of the plugin's file, so after a change all runs are new.
    with file.open("a") as more:
        more.write("# changed\n")
    assert main(["recall", *plugin, *SMALL, "--dry-run", "--out", out]) == 0
    assert "2 runs to do" in capsys.readouterr().out
    del TASKS["recall"]
    assert main(["report", out]) == 2
    assert "unknown task 'recall': load its file with --plugin" in capsys.readouterr().err


@pytest.fixture
def recall(tmp_path: Path) -> Iterator[Path]:
    """Path of a plugin with the documented task, which is unregistered after the test."""
    file = tmp_path / f"recall_{tmp_path.name}.py"
    file.write_text(documented_task())
    yield file
    TASKS.pop("recall", None)


def test_a_plugin_named_in_the_config_file_is_loaded(
    recall: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["recall", *SMALL])
    assert "A task of your own needs --plugin FILE.py" in capsys.readouterr().err
    config = tmp_path / "run.toml"
    config.write_text(f'plugin = "{recall}"\n[recall]\nlengths = [16, 24]\n')
    options = ["--config", str(config), "--variants", "softmax", "--dry-run"]
    assert main(["recall", *options]) == 0
    assert "eval lengths up to 24: 1 run to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return tokens, answers", "ValueError: draw must return a SequenceBatch, got tuple"),
        (
            "return SequenceBatch(tokens[:, 1:], answers[:, 1:])",
            "ValueError: tokens must have the shape (stop - start, size(2)) = (1, 2), got (1, 1)",
        ),
        ("return SequenceBatch(tokens, answers.int())", "ValueError: answers must be int64, got"),
        (
            "return SequenceBatch(tokens, answers + 99)",
            "ValueError: answers must be from -1 to vocabulary - 1 = 15, got",
        ),
        (
            "return SequenceBatch(tokens, answers - 7)",
            "ValueError: answers must be from -1 to vocabulary - 1 = 15, got -8 to",
        ),
        (
            "return SequenceBatch(tokens + 99, answers)",
            "ValueError: tokens must be from 0 to vocabulary - 1 = 15, got",
        ),
        (
            "return SequenceBatch(tokens, answers * 0 - 1)",
            "ValueError: answers must have an entry >= 0, got only -1",
        ),
        ("return tokens[99]", "IndexError: "),
    ],
)
def test_a_wrong_draw_is_a_one_line_error_before_training(
    line: str, message: str, recall: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recall.write_text(documented_task().replace("return SequenceBatch(tokens, answers)", line))
    options = ["recall", "--plugin", str(recall), *SMALL, "--dry-run"]
    assert main(options) == 2
    shown = capsys.readouterr().err
    assert f"error: recall: draw failed at length 2: {message}" in shown
    assert "--verbose" in shown
    with pytest.raises((ValueError, IndexError)):
        main([*options, "--verbose"])


def test_register_task_checks_the_name_and_the_presets() -> None:
    def task(name: str, **presets: Any) -> SequenceTask:
        return SequenceTask(name, "", lambda *_: None, 2, 0.5, presets)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="task name 'mqar' is taken"):
        register_task(task("mqar"))
    with pytest.raises(ValueError, match="must be letters, digits and hyphens and .*, got 'a b'"):
        register_task(task("a b"))
    with pytest.raises(ValueError, match="task 'mine' needs a preset"):
        register_task(task("mine"))
    with pytest.raises(ValueError, match="must be among smoke, quick, paper, got fast"):
        register_task(task("mine", fast=None))


def test_a_plugin_without_variant_or_task_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "registers_nothing.py"
    file.write_text("")
    assert main(["needle", "--plugin", str(file)]) == 2
    assert "registered no variant and no task" in capsys.readouterr().err
