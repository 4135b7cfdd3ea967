"""Rows of experiments: statistics over seeds, tables, the report, and rows that are left out."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from evals.__main__ import main
from evals.reporting.pages import documented
from evals.reporting.report import report_html
from evals.reporting.shown import ShownGroup
from evals.results.rows import problem
from evals.results.summary import failures, groups
from evals.results.summary_csv import csv_text
from helpers.evals_rows import group, written

SETTINGS = {"steps": 3, "noise": 0.2}


def row(
    variant: str, condition: str, seed: int, settings: dict[str, Any] = SETTINGS, **changes: Any
) -> dict[str, Any]:
    fields = {
        "key": f"{variant} {condition} {seed}", "task": "classification", "variant": variant,
        "x": condition, "series": {}, "group": group(settings, "digits"), "seed": seed,
        "status": "ok", "message": "",
        "metrics": {"accuracy": 0.5, "calibration_error": 0.1, "auroc": 0.75}, "curves": {},
        "chance": 0.1, "settings": settings, "version": f"1 {variant}", "schedule": "short",
        "data": "digits", "device": "cpu", "torch": "2", "attnzoo": "0", "commit": "c",
        "cpu_seconds": 0.0,
    }  # fmt: skip
    return fields | changes


def accuracy(variant: str, seed: int, value: float, **more: float) -> dict[str, Any]:
    metrics = {"accuracy": value, "calibration_error": 0.1, **more}
    return row(variant, "clean", seed, metrics=metrics)


ROWS = [
    accuracy("softmax", 0, 0.8, auroc=0.75),
    accuracy("softmax", 1, 0.6, auroc=0.75),
    accuracy("sink", 0, 0.9),
    accuracy("sink", 1, 0.8, auroc=0.75),
    row("sink", "label-noise", 0, status="nan", message="training: diverged", metrics={}),
]


def lines_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, str]]:
    """The lines of summary.csv by (variant, condition)."""
    lines = csv.DictReader(io.StringIO(csv_text(groups(rows))))
    return {(line["variant"], line["condition"]): line for line in lines}


def test_a_summary_has_means_and_differences_paired_by_seed() -> None:
    lines = lines_of(ROWS)
    assert set(lines) == {("softmax", "clean"), ("sink", "clean"), ("sink", "label-noise")}
    sink = lines["sink", "clean"]
    expected = {"accuracy": "0.85", "accuracy_se": "0.05", "accuracy_minus_softmax": "0.15",
                "accuracy_minus_softmax_se": "0.05"}  # fmt: skip
    assert {name: sink[name] for name in expected} == expected
    assert lines["softmax", "clean"]["accuracy_minus_softmax"] == ""
    assert (sink["auroc"], sink["auroc_seeds"]) == ("0.75", "1")  # undefined in one seed
    assert lines["sink", "label-noise"]["failed"] == "missing:1 nan:1"


def test_tables_mark_undefined_and_failed_seeds() -> None:
    (group,) = groups(ROWS)
    every = ShownGroup(group).tables
    by_title = {table.title.split(",")[0]: table for table in every}
    assert by_title["Accuracy"].header == ["output layer", "clean", "label-noise"]
    assert by_title["Accuracy"].rows == [
        ["softmax", "70.0 ±10.0", "—"],
        ["sink", "85.0 ±5.0", "missing+nan"],
    ]
    assert len(every) == 3  # neither a gain nor the number of classes has a value
    auroc = by_title["AUROC of 1 − the largest probability"]
    assert auroc.rows[1][1] == "75.0*"
    assert failures(group) == [
        "failed: sink, label-noise: training: diverged (1 of 2 seeds: 0)",
        "failed: sink, label-noise: no result (1 of 2 seeds: 1)",
    ]


def test_more_conditions_than_output_layers_are_the_rows() -> None:
    names = ["clean", "label-noise", "long-tail"]
    (group,) = groups([row("softmax", name, 0) for name in names])
    table = ShownGroup(group).tables[0]
    assert table.header == ["condition", "softmax"]
    assert [line[0] for line in table.rows] == names


def test_the_gain_over_another_condition_and_the_curve() -> None:
    rows = [
        row("softmax", condition, seed, task="active-learning",
            metrics={"mean_accuracy": sum(values) / 2, "accuracy": values[-1]},
            curves={"x": [20.0, 40.0], "score": values})
        for condition, both in {"margin": ([0.2, 0.4], [0.4, 0.4]),
                                "margin-trimmed": ([0.3, 0.5], [0.5, 0.7])}.items()
        for seed, values in enumerate(both)
    ]  # fmt: skip
    plain, trimmed = lines_of(rows).values()
    assert plain["mean_accuracy_gain"] == ""
    assert trimmed["mean_accuracy_gain"] == "0.15"
    assert trimmed["curve"] == "20:0.4 40:0.6"
    curve = ShownGroup(groups(rows)[0]).tables[-1]
    assert curve.header == ["condition", "20", "40"]
    assert curve.rows == [["margin", "30.0", "40.0"], ["margin-trimmed", "40.0", "60.0"]]


def test_groups_of_other_settings_and_older_versions_are_not_mixed() -> None:
    other = row("softmax", "clean", 0, key="other", settings=SETTINGS | {"noise": 0.4})
    first, second = groups([accuracy("softmax", 0, 0.8), other])
    assert (first.distinction, second.distinction) == ("noise 0.2", "noise 0.4")
    old = accuracy("softmax", 0, 0.1) | {"version": "0"}
    (group,) = groups([old, accuracy("softmax", 1, 0.8)])
    assert group.seeds == [1]
    assert group.left_out[0].startswith("softmax: left out 1 result(s) of other versions")


def test_the_documentation_shows_the_tables_of_a_summary(tmp_path: Path) -> None:
    assert documented(tmp_path, "classification") == "Nothing has been measured yet.\n"
    (tmp_path / "classification.csv").write_text(csv_text(groups(ROWS)))
    text = documented(tmp_path, "classification")
    assert "| `sink` | 85.0 ±5.0 | missing+nan |" in text
    assert "Mean ± standard error over 2 seeds" in text


def test_texts_in_the_report_are_escaped() -> None:
    (group,) = groups([row("<b>x</b>", "clean", 0)])
    page = report_html([ShownGroup(group)], "a <note>")
    assert "<title>Output layers: classification</title>" in page
    assert "<b>x</b>" not in page
    assert "&lt;b&gt;x" in page
    assert "a &lt;note&gt;" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": 3.5}, "x must be a length >= 1 or a condition, got 3.5"),
        ({"settings": {}}, "settings.steps is missing"),
        ({"metrics": {}}, "metrics must have 'accuracy' where status is 'ok'"),
        ({}, None),
    ],
)
def test_rows_are_checked(changes: dict[str, Any], message: str | None) -> None:
    assert problem(row("softmax", "clean", 0) | changes) == message


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["export", "--format", "markdown"], "| `sink` | 85.0 (21.5–148.5) | missing+nan |"),
        (["compare", "FOLDER"], "softmax  "),
        (["report"], "Report: "),
    ],
    ids=lambda x: x[0],
)
def test_commands_show_results_of_experiments(
    command: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(written(tmp_path, ROWS))
    name, *options = [folder if word == "FOLDER" else word for word in command]
    assert main([name, folder, *options]) == 0
    assert text in capsys.readouterr().out
