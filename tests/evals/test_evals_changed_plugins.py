"""Results of a plugin's file that changed are never mixed with those of the file before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commandline.variants import parse_specs
from evals.__main__ import main
from evals.command import Studies
from evals.measures.metrics import Outcome
from evals.results.store import Row
from evals.results.summary import groups
from evals.study import Study
from evals.tasks import TASKS

TASK = TASKS["copy"]


def scored(study: Study, score: float) -> list[Row]:
    """The rows of a study in which every run has this score."""
    outcome = Outcome("ok", "", {TASK.score.name: score})
    training = {"learned": {}, "train_cpu_seconds": 0.0}
    return [
        study.row(run, key, length, outcome, training)
        for run in study.runs({})
        for length, tests in run.tests.items()
        for key in tests
    ]


@pytest.mark.parametrize(
    ("names", "output"),
    [(("task copy",), "softmax"), (("entmax",), "entmax")],
    ids=["the task's plugin", "the output layer's plugin"],
)
def test_results_of_a_changed_plugin_have_a_table_of_their_own(
    names: tuple[str, ...], output: str
) -> None:
    settings = replace(TASK.presets["smoke"].settings, output=output)
    specs = tuple(parse_specs(["softmax", "ssmax"]))
    old = Study(TASK, specs, ("rope",), 3, (16,), settings, plugins=dict.fromkeys(names, "aaaa"))
    new = replace(old, seeds=1, plugins=dict.fromkeys(names, "bbbb"))
    plugin_groups = groups([*scored(old, 0.25), *scored(new, 0.75)])
    means = {
        group.distinction: {
            (series.variant, point.mean(TASK.score.name).mean, len(point.rows))
            for series in group.series
            for point in group.of(series)
        }
        for group in plugin_groups
    }
    version = TASK.data_version(None)
    assert means == {
        f"data {version}, plugin aaaa": {("softmax", 0.25, 3), ("ssmax", 0.25, 3)},
        f"data {version}, plugin bbbb": {("softmax", 0.75, 1), ("ssmax", 0.75, 1)},
    }


def test_the_data_of_rows_without_a_plugin_are_those_of_the_task() -> None:
    settings = TASK.presets["smoke"].settings
    study = Study(TASK, tuple(parse_specs(["softmax"])), ("rope",), 1, (16,), settings)
    # A plugin with a variant is in the version of that variant's rows only.
    for one in (study, replace(study, plugins={"ssmax": "aaaa"})):
        assert {row["data"] for row in scored(one, 0.5)} == {TASK.data_version(None)}


TASK_FILE = """
import torch
from evals import SequenceBatch, SequenceTask, draws, register_task

def draw(seed, split, length, start, stop, settings):
    words = draws.words(seed, split, length, start, stop, length)
    tokens = torch.from_numpy(draws.integers(words, 4))
    return SequenceBatch(tokens, tokens)

register_task(SequenceTask("echo", "Repeat each token.", draw, 4))
"""


@pytest.mark.slow
def test_a_plugin_that_changes_during_the_run_stops_it_and_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / f"echo_{tmp_path.name}.py", tmp_path / "out"
    file.write_text(TASK_FILE)
    show_plan = Studies.show_plan

    def edited(studies: Studies) -> None:
        file.write_text(TASK_FILE.replace("draws.integers(words, 4)", "draws.integers(words, 2)"))
        show_plan(studies)

    monkeypatch.setattr(Studies, "show_plan", edited)
    options = ["--preset", "smoke", "--variants", "softmax", "--steps", "2", "--workers", "1"]
    try:
        assert main(["echo", "--plugin", str(file), *options, "--out", str(out)]) == 2
    finally:
        TASKS.pop("echo", None)
    shown = capsys.readouterr().err
    assert f"error: --plugin {file} changed during the run; repeat the command\n" in shown
    assert not [*out.glob("echo/rows*.jsonl")]
