"""Rows of experiments: statistics over seeds, tables, and rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commandline.errors import UsageError
from evals.reporting.trials import documented, failures, report_html, tables
from evals.results.old_rows import converted
from evals.results.rows import problem
from evals.results.store import read_rows
from evals.results.trials import of_tasks, summary_lines, trial_groups, trials_csv

SETTINGS = {"steps": 3, "noise": 0.2}


def row(variant: str, condition: str, seed: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "key": f"{variant} {condition} {seed}",
        "task": "classification",
        "variant": variant,
        "condition": condition,
        "seed": seed,
        "status": "ok",
        "message": "",
        "metrics": {"accuracy": 0.5, "calibration_error": 0.1, "auroc": 0.75},
        "curves": {},
        "chance": 0.1,
        "settings": SETTINGS,
        "version": f"1 {variant}",
        "schedule": "short",
        "data": "digits",
        "device": "cpu",
        "torch": "2",
        "attnzoo": "0",
        "commit": "c",
        "cpu_seconds": 0.0,
    }
    return fields | changes


def accuracy(variant: str, seed: int, value: float, auroc: float | None = 0.75) -> dict[str, Any]:
    metrics = {"accuracy": value, "calibration_error": 0.1}
    return row(
        variant, "clean", seed, metrics=metrics | ({} if auroc is None else {"auroc": auroc})
    )


ROWS = [
    accuracy("softmax", 0, 0.8),
    accuracy("softmax", 1, 0.6),
    accuracy("sink", 0, 0.9, auroc=None),
    accuracy("sink", 1, 0.8),
    row("sink", "label-noise", 0, status="nan", message="training: diverged", metrics={}),
]


def test_a_summary_has_means_and_differences_paired_by_seed() -> None:
    (group,) = trial_groups(ROWS)
    lines = {(line["variant"], line["condition"]): line for line in summary_lines(group)}
    assert set(lines) == {("softmax", "clean"), ("sink", "clean"), ("sink", "label-noise")}
    sink = lines["sink", "clean"]
    assert float(sink["accuracy"]) == pytest.approx(0.85)
    assert float(sink["accuracy_se"]) == pytest.approx(0.05)
    assert float(sink["accuracy_minus_softmax"]) == pytest.approx(0.15)
    assert float(sink["accuracy_minus_softmax_se"]) == pytest.approx(0.05)
    assert lines["softmax", "clean"]["accuracy_minus_softmax"] == ""
    assert (sink["auroc"], sink["auroc_seeds"]) == ("0.75", "1")  # undefined in one seed
    assert lines["sink", "label-noise"]["failed"] == "missing:1 nan:1"


def test_tables_mark_undefined_and_failed_seeds() -> None:
    (group,) = trial_groups(ROWS)
    every = tables(group.task, [*summary_lines(group)])
    by_title = {table.title.split(",")[0]: table for table in every}
    assert by_title["Accuracy"].header == ["output layer", "clean", "label-noise"]
    assert by_title["Accuracy"].rows == [
        ["softmax", "70.0 ±10.0", "—"],
        ["sink", "85.0 ±5.0", "missing:1 nan:1"],
    ]
    assert len(every) == 3  # neither a gain nor the number of classes has a value
    auroc = by_title["AUROC of 1 − the largest probability"]
    assert auroc.rows[1][1] == "75.0*"
    assert failures(group) == ["failed: sink under label-noise: training: diverged (seeds 0)"]


def test_more_conditions_than_output_layers_are_the_rows() -> None:
    names = ("clean", "label-noise", "long-tail")
    (group,) = trial_groups([row("softmax", name, 0) for name in names])
    table = tables(group.task, [*summary_lines(group)])[0]
    assert table.header == ["condition", "softmax"]
    assert [line[0] for line in table.rows] == list(names)


def test_the_gain_over_another_condition_and_the_curve() -> None:
    def trial(condition: str, seed: int, values: list[float]) -> dict[str, Any]:
        return row(
            "softmax", condition, seed, task="active-learning",
            metrics={"mean_accuracy": sum(values) / 2, "accuracy": values[-1]},
            curves={"x": [20.0, 40.0], "score": values},
        )  # fmt: skip

    rows = [trial("margin", 0, [0.2, 0.4]), trial("margin", 1, [0.4, 0.4])]
    rows += [trial("margin-trimmed", 0, [0.3, 0.5]), trial("margin-trimmed", 1, [0.5, 0.7])]
    (group,) = trial_groups(rows)
    plain, trimmed = summary_lines(group)
    assert plain["mean_accuracy_gain"] == ""
    assert float(trimmed["mean_accuracy_gain"]) == pytest.approx(0.15)
    assert trimmed["curve"] == "20:0.4 40:0.6"
    curve = tables(group.task, [plain, trimmed])[-1]
    assert curve.header == ["", "20", "40"]
    assert curve.rows == [["margin", "30.0", "40.0"], ["margin-trimmed", "40.0", "60.0"]]


def test_groups_of_other_settings_and_older_versions_are_not_mixed() -> None:
    other = row("softmax", "clean", 0, key="other", settings=SETTINGS | {"noise": 0.4})
    first, second = trial_groups([accuracy("softmax", 0, 0.8), other])
    assert (first.distinction, second.distinction) == ("noise 0.2", "noise 0.4")
    old = accuracy("softmax", 0, 0.1) | {"version": "0"}
    (group,) = trial_groups([old, accuracy("softmax", 1, 0.8)])
    assert group.seeds == [1]
    assert group.left_out == ["softmax: left out 1 result(s) of other versions of the layer"]


def test_the_documentation_shows_the_tables_of_a_summary(tmp_path: Path) -> None:
    assert documented(tmp_path, "classification") == "Nothing has been measured yet.\n"
    (tmp_path / "classification.csv").write_text(trials_csv(trial_groups(ROWS)))
    text = documented(tmp_path, "classification")
    assert "| `sink` | 85.0 ±5.0 | missing:1 nan:1 |" in text
    assert "Mean ± standard error over 2 seeds" in text


def test_texts_in_the_report_are_escaped() -> None:
    page = report_html(trial_groups([row("<b>x</b>", "clean", 0)]), "a <note>")
    assert "<b>x</b>" not in page
    assert "&lt;b&gt;x" in page
    assert "a &lt;note&gt;" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"condition": 3.5}, "x must be a length >= 1 or a condition, got 3.5"),
        ({"settings": {}}, "settings.steps is missing"),
        ({"metrics": {}}, "metrics must have 'accuracy' where status is 'ok'"),
        ({}, None),
    ],
)
def test_rows_are_checked(changes: dict[str, Any], message: str | None) -> None:
    assert problem(converted(row("softmax", "clean", 0) | changes)) == message


def test_commands_for_tasks_get_only_rows_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"task": "mqar"}
    assert of_tasks([task, *ROWS], "export") == [task]
    assert "note: export leaves out classification" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    with pytest.raises(UsageError, match="compare needs results of tasks, got only those of clas"):
        of_tasks(read_rows([tmp_path]), "compare")
