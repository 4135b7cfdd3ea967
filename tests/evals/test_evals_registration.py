"""What `register_task` accepts: a wrong field is one error that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals import Preset, SequenceSettings, SequenceTask, register_task
from evals.__main__ import main
from evals.tasks import TASKS, draws, two_back
from evals.tasks.checks import check_task
from evals.tasks.families.answers import LOSS

SETTINGS = SequenceSettings(steps=2, batch=2, train_shortest=2, train_longest=8)
PRESET: dict[str, Any] = {"lengths": (8, 16), "settings": SETTINGS, "variants": ("softmax",)}


def task(**fields: Any) -> SequenceTask:
    """A valid task named "mine", with some fields replaced."""
    presets = {"smoke": Preset(**PRESET)}
    good = {"name": "mine", "about": "A task.", "draw": None, "vocabulary": 4, "presets": presets}
    return SequenceTask(**{**good, **fields})


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    TASKS.pop("mine", None)


def test_a_valid_task_is_registered() -> None:
    assert register_task(task()) is TASKS["mine"]
    for one in TASKS.values():
        check_task(one)


OF_PRESET = [
    ("settings", None, "must be settings such as SequenceSettings, got None"),
    ("lengths", (), "must be a non-empty tuple, got ()"),
    ("lengths", (8, 1), "must be ints from 2 to 4194304, got 1"),
    ("lengths", (8, 8), "must not repeat an entry, got (8, 8)"),
    ("variants", (), "must be a non-empty tuple, got ()"),
    ("variants", "softmax", "must be a non-empty tuple, got 'softmax'"),
    ("positions", ("up",), "must be among none, rope, p-rope, alibi, nape, t5, rope->linear, "),
    ("seeds", 0, "must be an int >= 1, got 0"),
    ("sweep", "best", "must be a dict or 'recorded', got 'best'"),
    ("sweep", {"width": (1, 2)}, "must tune learning_rate, weight_decay, warmup, curriculum"),
    ("sweep", {"warmup": ()}, "must give warmup two or more different numbers, got ()"),
    ("variant_settings", {"softmax": {"widht": 3}}, "must name settings, got 'widht' for"),
    ("variant_settings", {"softmax": {"width": 0}}, "for 'softmax': width must be >= 1, got 0"),
]
LOWER = "because lower values of loss are better, got 0.95"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"about": None}, "about of task 'mine' must be a description, got None"),
        ({"metrics": ()}, "metrics of task 'mine' must have the score, got none"),
        ({"metrics": (LOSS,)}, f"trained_score of task 'mine' must be None, {LOWER}"),
        ({"splits": {"a_": "test"}}, "splits of task 'mine' must have the key '', of the split"),
        ({"vocabulary": 0}, "vocabulary of task 'mine' must be an int >= 1, got 0"),
        *(
            (
                {"presets": {"smoke": Preset(**{**PRESET, name: value})}},
                f"{name} of preset 'smoke' of task 'mine' {message}",
            )
            for name, value, message in OF_PRESET
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        register_task(task(**fields))
    assert "mine" not in TASKS


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="split must be one of train, test, .*, got 'far'"):
        draws.words(0, "far", 8, 0, 1, 2)


def test_a_wrong_task_in_a_plugin_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"wrong_{tmp_path.name}.py"
    file.write_text(
        "from evals import SequenceTask, register_task\n"
        'register_task(SequenceTask("mine", None, None, 4))\n'
    )
    assert main(["mine", "--plugin", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: --plugin {file} raised ValueError: about of task 'mine' must be a description, "
        "got None\n"
    )


def test_a_study_without_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # `register_task` rejects this task.
    presets = {"smoke": Preset(**{**PRESET, "variants": ()})}
    TASKS["mine"] = task(
        draw=two_back.draw, vocabulary=16, size=lambda length: length + 1, presets=presets
    )
    assert main(["mine", "--preset", "smoke", "--out", str(tmp_path / "out")]) == 2
    assert "error: nothing to run: mine has no variant" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
