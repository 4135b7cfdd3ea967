"""Plugins can add tasks to the evals."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evals import RetrievalTask, SequenceTask, register_task
from evals import run as runs
from evals.__main__ import main
from evals.tasks import TASKS

pytestmark = pytest.mark.usefixtures("no_pictures")
DOCS = Path(__file__).parents[2] / "docs" / "evals.md"
SMALL = ["--variants", "softmax,ssmax", "--steps", "2", "--lengths", "16,24", "--workers", "1"]


RECALL = '''# recall.py
import torch
from evals import Preset, SequenceBatch, SequenceSettings, SequenceTask, draws, register_task

SYMBOLS = 16


def draw(seed, split, length, start, stop, settings):
    """Sequences start .. stop - 1: random symbols; the last token must recall the first one."""
    words = draws.words(seed, split, length, start, stop, length)  # (B, length) random uint64
    tokens = torch.from_numpy(draws.integers(words, SYMBOLS))  # (B, length) of 0 .. 15
    answers = torch.full_like(tokens, -1)  # -1: nothing to predict at this token
    answers[:, -1] = tokens[:, 0]
    return SequenceBatch(tokens, answers)


settings = SequenceSettings(steps=400, batch=64, train_shortest=2, train_longest=16)
register_task(
    SequenceTask(
        name="recall",
        about="Recall the first symbol of a sequence.",
        draw=draw,
        vocabulary=SYMBOLS,
        chance_score=1 / SYMBOLS,
        presets={
            "quick": Preset(lengths=(16, 32, 64, 128), positions=("rope",), settings=settings)
        },
    )
)
'''


def documented(name: str) -> str:
    """The source of an example in docs/evals.md, by the name of its file."""
    match = re.search(rf"```python\n(# {name}\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.slow
def test_a_task_from_a_plugin_runs_in_workers_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "recall.py", str(tmp_path / "out")
    file.write_text(RECALL)
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
    assert (
        "recall has no preset 'paper'; choose one with --preset: quick" in capsys.readouterr().err
    )
    # Keys of runs contain a hash of the plugin's file, so after a change all runs are new.
    with file.open("a") as more:
        more.write("# changed\n")
    assert main(["recall", *plugin, *SMALL, "--dry-run", "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "2 runs to do" in shown
    assert "Total: 2 runs, about 0:0" in shown  # from the rows of the older file
    assert main(["recall", *plugin, *SMALL, "--dry-run", "--out", f"{out}-new"]) == 0
    assert "Total: 2 runs, no estimate.\n" in capsys.readouterr().out
    del TASKS["recall"]
    assert main(["report", out]) == 2
    assert "unknown task 'recall': load its file with --plugin" in capsys.readouterr().err


@pytest.fixture
def recall(tmp_path: Path) -> Iterator[Path]:
    """Path of a plugin with the task of `RECALL`, which is unregistered after the test."""
    file = tmp_path / f"recall_{tmp_path.name}.py"
    file.write_text(RECALL)
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
            "ValueError: tokens must be a tensor (stop - start, size(2)) = (8, 2), got (8, 1)",
        ),
        ("return SequenceBatch(tokens, answers.int())", "ValueError: answers must be torch.int64"),
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
            "ValueError: answers must have an entry >= 0 in every sequence, got only -1 in "
            "sequence 0",
        ),
        (
            "answers[3] = -1; return SequenceBatch(tokens, answers)",
            "ValueError: answers must have an entry >= 0 in every sequence, got only -1 in "
            "sequence 3",
        ),
        ("return SequenceBatch(tokens.numpy(), answers)", "ValueError: tokens must be a tensor"),
        (
            "return SequenceBatch(torch.randint(16, tokens.shape), answers)",
            "ValueError: two draws with the same arguments must be equal: use evals.draws",
        ),
        ("return tokens[99]", "IndexError: "),
    ],
)
def test_a_wrong_draw_is_a_one_line_error_before_training(
    line: str, message: str, recall: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recall.write_text(RECALL.replace("return SequenceBatch(tokens, answers)", line))
    options = ["recall", "--plugin", str(recall), *SMALL, "--dry-run"]
    assert main(options) == 2
    shown = capsys.readouterr().err
    assert f"error: recall: draw of split 'train' failed at length 2: {message}" in shown
    assert "--verbose" in shown
    with pytest.raises((ValueError, IndexError)):
        main([*options, "--verbose"])


def test_the_splits_of_the_evaluation_are_checked_before_training(
    recall: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recall.write_text(RECALL.replace("draw=draw,", 'draw=draw, splits={"": "mine"},'))
    assert main(["recall", "--plugin", str(recall), *SMALL, "--dry-run"]) == 2
    message = "error: recall: draw of split 'mine' failed at length 16: ValueError: split must be"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("chance_score=1 / SYMBOLS", "chance_score=float('nan')", "a finite number, got nan"),
        ('Preset(lengths=(16, 32, 64, 128), positions=("rope",), settings=settings)', "3",
         "presets of task 'recall' must be Preset, got 3 for 'quick'"),
    ],
)  # fmt: skip
def test_a_wrong_task_is_a_one_line_error_before_training(
    old: str, new: str, message: str, recall: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in RECALL
    recall.write_text(RECALL.replace(old, new))
    assert main(["recall", "--plugin", str(recall), *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.full((1, 4, 1), math.nan)}, "features must be finite"),
        ({"features": torch.zeros(1, 3, 1)}, r"features must be a tensor (1, 4, 1), got (1, 3, 1)"),
        ({"classes": torch.full((1, 4), 10)}, "classes must be from 0 to 9, got 10 to 10"),
        ({"query": torch.zeros(1, 1).double()}, "query must be torch.float32, got torch.float64"),
        ({"closeness": None}, "closeness must be a tensor (1, 4), got NoneType"),
    ],
)
def test_a_wrong_draw_of_items_is_an_error(change: dict[str, Any], message: str) -> None:
    task = TASKS["max-retrieval"]
    assert isinstance(task, RetrievalTask)
    settings = task.presets["smoke"].settings
    good = task.batch(0, "test", 4, 0, 1, settings)
    wrong = dataclasses.replace(task, draw=lambda *_: dataclasses.replace(good, **change))
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong.batch(0, "test", 4, 0, 1, settings)


EXAMPLES = {"kth_largest.py": "kth-largest", "count.py": "count"}
BRIEF = ["--preset", "smoke", "--variants", "softmax,ssmax", "--seeds", "2", "--steps", "2"]
BRIEF += ["--lengths", "16,24", "--set", "test_sequences=4", "--set", "test_least=4"]
BRIEF += ["--workers", "0"]


def rows_of(folder: Path, task: str) -> list[dict[str, Any]]:
    files = (folder / task).glob("rows*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), EXAMPLES.items())
def test_a_documented_task_trains_resumes_and_is_split_into_shards(
    name: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = documented(name), tmp_path / name
    assert len(source.splitlines()) <= 25
    file.write_text(source)
    command = [task, "--plugin", str(file), *BRIEF, "--out"]
    train, done = runs.train, []

    def interrupted(*args: Any) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(args)
        return train(*args)

    try:
        once, resumed, split = (tmp_path / part for part in ("whole", "resumed", "split"))
        assert main([*command, str(once)]) == 0
        assert {row["status"] for row in rows_of(once, task)} == {"ok"}
        assert len(rows_of(once, task)) == 2 * 2 * 2
        monkeypatch.setattr(runs, "train", interrupted)
        assert main([*command, str(resumed)]) == 130
        assert len(rows_of(resumed, task)) == 2  # one of four runs, two lengths
        monkeypatch.setattr(runs, "train", train)
        assert main([*command, str(resumed)]) == 0
        for index in range(2):
            assert main([*command, str(split), "--shard", f"{index}/2"]) == 0
    finally:
        TASKS.pop(task, None)
    texts = {(out / task / "summary.csv").read_bytes() for out in (once, resumed, split)}
    assert len(texts) == 1


def drawn(name: str) -> Any:
    """The function ``draw`` of a documented task."""
    namespace: dict[str, Any] = {}
    exec(documented(name).split("about =")[0], namespace)
    return namespace["draw"]


def test_the_answers_of_the_documented_tasks() -> None:
    batch = drawn("kth_largest.py")(0, "test", 6, 0, 50, None)
    for tokens, answers in zip(batch.tokens.tolist(), batch.answers.tolist()):
        *numbers, asked = tokens
        assert answers == [-1] * 5 + [sorted(numbers, reverse=True)[asked - 32]]
    assert set(batch.tokens[:, -1].tolist()) == {32, 33, 34, 35}
    batch = drawn("count.py")(0, "test", 300, 0, 2, None)
    for tokens, answers in zip(batch.tokens.tolist(), batch.answers.tolist()):
        assert answers == [min(16, tokens[: i + 1].count(x)) for i, x in enumerate(tokens)]


def test_register_task_checks_the_name_and_the_presets() -> None:
    def task(name: str, **presets: Any) -> SequenceTask:
        return SequenceTask(name, "", lambda *_: None, 2, 0.5, presets)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="task name 'mqar' is taken"):
        register_task(task("mqar"))
    with pytest.raises(ValueError, match="must be letters, digits and hyphens and .*, got 'a b'"):
        register_task(task("a b"))
    with pytest.raises(ValueError, match="task 'mine' needs a preset"):
        register_task(task("mine"))
    with pytest.raises(ValueError, match="must be among smoke, quick, paper, gpu, got fast"):
        register_task(task("mine", fast=None))


def test_a_plugin_without_variant_or_task_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "registers_nothing.py"
    file.write_text("")
    assert main(["needle", "--plugin", str(file)]) == 2
    assert "registered no variant and no task" in capsys.readouterr().err
