"""Statistics, groups, tables, summary.csv, and the command report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commandline.errors import UsageError
from commandline.table import Table
from evals.__main__ import main
from evals.reporting.pages import scores as scores_table
from evals.reporting.shown import ShownGroup
from evals.results import load
from evals.results.statistics import estimate
from evals.results.store import Folder, Shard, read_rows
from evals.results.summary import Series, failures, groups, version_warnings
from evals.results.summary_csv import csv_text
from evals.results.tuned import TUNED
from helpers.evals_rows import SETTINGS, grid, pretrained, row, trial, written

SOFTMAX, SSMAX = Series("softmax"), Series("ssmax")


def test_rows_are_grouped_by_task_settings_device_and_data() -> None:
    rows = [
        row("softmax", 0.5, task="mqar", positions="rope"),
        row("softmax", 0.5),
        row("softmax", 0.6, seed=1, device="cpu"),
        row("softmax", 0.7, settings={**SETTINGS, "steps": 11}),
        row("softmax", 0.8, device="cuda:1"),
        row("softmax", 0.9, data="other"),
    ]
    all_groups = groups(rows)
    assert [group.task.name for group in all_groups] == ["max-retrieval"] * 4 + ["mqar"]
    assert sorted(len(group.rows) for group in all_groups) == [1, 1, 1, 1, 2]
    with pytest.raises(UsageError, match="unknown task 'nosuch': load its file with --plugin"):
        groups([row("softmax", 0.5) | {"task": "nosuch"}])


def test_differences_from_the_baseline_are_paired_by_seed() -> None:
    scores = {"softmax": {16: (0.5, 0.6, 0.7)}, "ssmax": {16: (0.6, 0.8, None)}}
    (group,) = groups(grid(scores))
    point = group.points[SSMAX, 16]
    assert point.versus_baseline == pytest.approx([0.1, 0.2])
    assert point.mean("accuracy") == estimate([0.6, 0.8])
    assert point.failures == {"oom": [2]}
    assert group.points[SOFTMAX, 16].versus_baseline == []
    assert failures(group) == ["failed: ssmax, n = 16: out of memory (1 of 3 seeds: 2)"]


def test_a_run_is_trained_if_its_score_reaches_the_threshold() -> None:
    rows = [row("softmax", 0.95), row("ssmax", 0.949), row("ssmax", 1.0, length=64)]
    (group,) = groups(rows)
    assert group.facts(SOFTMAX).untrained == 0
    assert group.facts(SSMAX).untrained == 1
    shown = ShownGroup(group)
    assert {line[0] for line in shown.tables[0].rows} == {"softmax", "ssmax † 1/1"}
    assert "chance 10.0" in shown.tables[0].title
    assert shown.notes == [
        "† 1/1: did not reach 95 % at the train length (n = 16) with these settings, not tuned"
    ]
    seeds = grid({"softmax": {16: (0.99, None, 0.5)}})
    # The failed seed, and the seed with score 0.5.
    assert groups(seeds)[0].facts(SOFTMAX).untrained == 2
    (partial,) = groups([*rows, row("softmax", 0.99, seed=1)])  # ssmax has no seed 1
    assert partial.name(SSMAX) == "ssmax † 1/2"  # not 2/2
    (text,) = groups([row("softmax", 4.0, task="language-model", positions="rope")])
    assert text.facts(Series("softmax", "rope")).untrained == 0


def test_a_repeated_run_of_another_shard_replaces_a_failure(tmp_path: Path) -> None:
    for shard, score in ((Shard(0, 2), 0.5), (Shard(0, 1), None)):
        Folder(tmp_path, shard).append(row("softmax", score, key="same"))
    (read_row,) = read_rows([tmp_path])
    assert read_row["metrics"] == {"accuracy": 0.5}


def test_tables_show_intervals_differences_costs_and_learned_parameters() -> None:
    rows = grid({"softmax": {16: (0.5, 0.6)}})
    rows += grid({"ssmax": {16: (0.7, 0.7)}}, learned={"s": [0.2, 0.4]})
    (group,) = groups(rows)
    score, spans, published, versus, *_, learned, costs = (
        table.rows for table in ShownGroup(group).tables
    )
    assert score == [["ssmax † 2/2", "70.0 ±0.0", "—"], ["softmax † 2/2", "55.0 ±5.0", "—"]]
    assert spans[0][1] == "-8.5 … 118.5"  # 55 ± 12.7 · 5
    assert published[:2] == [["softmax, here", "55.0"], ["softmax, paper", "98.6"]]
    assert versus == [["ssmax † 2/2", "+15.0 ±5.0"]]
    assert learned == [["ssmax", "s", "0.300 (0.200 to 0.400)"]]
    assert costs[0] == ["softmax", "2.0 (2.0 to 2.0)", "200.0 (200.0 to 200.0)",
                        "1.0 (1.0 to 1.0)"]  # fmt: skip


def test_table_columns_are_aligned() -> None:
    table = Table("T", ["n", "16", "1024"], [["softmax", "9.5", "10"], ["x", "—", "1"]])
    assert table.text() == "T\nn         16  1024\nsoftmax  9.5    10\nx          —     1"


def test_the_summary_does_not_depend_on_the_order_of_rows() -> None:
    rows = grid(dict.fromkeys("ab", dict.fromkeys((16, 64), (0.5, 0.5))))
    (one,), (two,) = groups(rows), groups(rows[::-1])
    assert csv_text([one]) == csv_text([two])
    lines = list(csv.DictReader(io.StringIO(csv_text([one]))))
    assert [(line["variant"], line["length"]) for line in lines] == [
        ("a", "16"), ("a", "64"), ("b", "16"), ("b", "64")
    ]  # fmt: skip
    assert lines[0]["accuracy_low"] == "0.5"
    assert lines[0]["train_length"] == "16"


def test_results_of_several_torch_versions_give_a_warning() -> None:
    rows = [row("softmax", 0.5), row("softmax", 0.5, seed=1, torch="3")]
    assert version_warnings(groups(rows)) == ["warning: results differ in torch: 2, 3"]


# If a plugin's file changed between two studies, only results of its latest version count. If a
# later sweep chose another learning rate, only results of the latest choice count.
@pytest.mark.parametrize(
    "fields",
    [
        lambda name, rate: {"version": name},
        lambda name, rate: {
            "settings": {**SETTINGS, "learning_rate": rate},
            "shared": {"learning_rate": TUNED},
        },
    ],
    ids=["versions", "tuned values"],
)
def test_two_versions_or_tuned_values_are_never_averaged(fields: Callable) -> None:
    rows = grid({"mine": {16: (0.1, 0.1)}}, **fields("old", 0.001))
    rows += [row("mine", 0.9, key="other", **fields("new", 0.003))]
    (group,) = groups(rows)
    assert group.points[Series("mine"), 16].values("accuracy") == {0: 0.9}
    assert [line.split("warning: max-retrieval: ")[1] for line in version_warnings([group])] == [
        "mine: left out 2 result(s) of other versions or settings of the variant"
    ]


def test_series_with_different_lengths_are_in_one_group() -> None:
    (group,) = groups([row("softmax", 0.9), row("ssmax", 0.8, length=64)])
    for series in group.series:
        assert group.tuned(series) == {"values": {}, "tried": []}
        assert group.variant_settings(series) == {}


def test_results_with_different_settings_or_test_sizes_are_separate_groups() -> None:
    more = {**SETTINGS, "steps": 11}
    rows = [
        row("softmax", 0.1),
        row("softmax", 0.2, key="longer", settings=more),
        row("softmax", 0.3, key="fewer", sequences=4),
        row("softmax", 0.4, key="elsewhere", device="cuda:0"),
    ]
    for order in (rows, rows[::-1]):
        all_groups = groups(order)
        assert {
            (group.distinction, group.rows[0]["metrics"]["accuracy"]) for group in all_groups
        } == {
            ("steps 10, device cpu, test sequences 8 at 16", 0.1),
            ("steps 11, device cpu, test sequences 8 at 16", 0.2),
            ("steps 10, device cpu, test sequences 4 at 16", 0.3),
            ("steps 10, device cuda, test sequences 8 at 16", 0.4),
        }
        assert version_warnings(all_groups) == []
        lines = list(csv.DictReader(io.StringIO(csv_text(all_groups))))
        assert sorted((line["accuracy"], line["steps"]) for line in lines) == [
            ("0.1", "10"), ("0.2", "11"), ("0.3", "10"), ("0.4", "10")
        ]  # fmt: skip
        assert {line["settings"] for line in lines} == {group.distinction for group in all_groups}
    assert [group.distinction for group in groups(rows[:1])] == [""]


def test_the_readme_table_shows_the_summary(tmp_path: Path) -> None:
    rows = grid({"softmax": {16: (0.96, 0.98), 64: (0.5, 0.5)},
                 "ssmax": {16: (0.9, 0.96), 64: (0.6, None)}})  # fmt: skip
    assert scores_table(tmp_path) == "Nothing has been measured yet.\n"
    (tmp_path / "max-retrieval.csv").write_text(csv_text(groups(rows)))
    text = scores_table(tmp_path)
    assert "**max-retrieval**: Accuracy, %, by eval length n. Mean of 2 seeds (95 % " in text
    assert "Train length n = 16, chance 10 %." in text
    short = [line.split(" | <svg")[0] for line in text.splitlines() if "<svg" in line]
    assert short == [
        "| 1. `ssmax` † 1/2 | 93.0 ±38.1 | 60.0* | —",
        "| 2. `softmax` | 97.0 ±12.7 | 50.0 ±0.0 | 16",
    ]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert lines == [
        "| `ssmax` † 1/2 | 93.0 (54.9–131.1) | 60.0* | — |",
        "| `softmax` | 97.0 (84.3–109.7) | 50.0 (50.0–50.0) | 16 |",
    ]
    assert "† k/2: did not reach 95 % at the train length (n = 16) in k of 2 seeds" in text
    assert "* some seeds failed or are missing" in text


# ---- results on disk


def test_load_gives_a_tidy_table_of_all_kinds_of_results(tmp_path: Path) -> None:
    rows = grid({"softmax": {16: (0.5, None)}})
    table = load(written(tmp_path, [*rows, trial(row("sink", 0.7))]))
    columns = ["task", "variant", "positions", "x", "seed", "metric", "status", "settings.steps"]
    lines = table[[*columns, "value"]].astype(object).where(table.notna(), None).values.tolist()
    assert lines == [
        ["classification", "sink", None, "clean", 0, "accuracy", "ok", 10, 0.7],
        ["max-retrieval", "softmax", "none", 16, 0, "accuracy", "ok", 10, 0.5],
        ["max-retrieval", "softmax", "none", 16, 1, None, "oom", 10, None],
    ]


def test_load_separates_rows_that_belong_to_different_tables_or_versions(tmp_path: Path) -> None:
    rows = [row("softmax", 0.5, version=text, key=text, data=text) for text in ("old", "new")]
    model = dict.fromkeys(("model", "text", "fingerprint", "dtype", "data"), "m")
    read = pretrained("softmax", 16, 0, **model)
    table = load(written(tmp_path, [*rows, read])).set_index("task")
    trained, loaded = table.loc["max-retrieval"], table.loc["pretrained"]
    for name in ("version", "settings.data"):
        assert sorted(trained[name]) == ["new", "old"]
    for name in model:
        assert loaded[f"settings.{name}"] == "m"
    with pytest.raises(UsageError, match=r"folder must be a path or a list of paths, got \[\]"):
        load([])


def test_results_are_read_from_an_output_folder_or_from_one_task_folder(tmp_path: Path) -> None:
    folder = written(tmp_path, [row("softmax", 0.5), row("softmax", 0.5, task="needle")])
    assert len(read_rows([folder])) == 2
    assert len(read_rows([folder / "needle"])) == 1
    assert len(read_rows([folder, folder / "needle"])) == 2
    with pytest.raises(UsageError, match=r"it has no rows\*\.jsonl with rows"):
        read_rows([folder, tmp_path / "nosuch"])


def changed_row(**changes: object) -> dict:
    """A valid result row with ``changes``. The value ``...`` removes a field."""
    changed = row("softmax", 0.5) | changes
    return {name: value for name, value in changed.items() if value is not ...}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed_row(seed=...), "seed is missing"),
        (
            changed_row(metrics={"accuracy": float("nan")}),
            "metrics.accuracy must be a finite number, got nan",
        ),
        (
            changed_row(metrics={"hit_rate": 0.5}),
            "metrics must have 'accuracy' where status is 'ok'",
        ),
        (changed_row(metrics=0.5), "metrics must be a table, got 0.5"),
        (
            changed_row(curves={"head_peak": [0.5, None]}),
            "curves.head_peak entries must be a number, got None",
        ),
        (changed_row(seed="0"), "seed must be an int, got '0'"),
        (changed_row(status="fine"), "status must be 'ok', 'nan' or 'oom', got 'fine'"),
        (changed_row(settings={"steps": 3}), "settings.train_shortest is missing"),
        (changed_row(task=["x"]), "task must be text, got ['x']"),
        (changed_row(x=0), "x must be a length >= 1 or a condition, got 0"),
        (changed_row(x="clean"), "x must be a length >= 1, got 'clean'"),
        (changed_row(group={}), "group.train_shortest is missing"),
        (
            changed_row(task="classification"),
            "x must be among clean, label-noise, long-tail, got 16",
        ),
        (
            changed_row(tuned={"values": {"warmup": 0.1}, "tried": [{"values": {}, "scores": []}]}),
            "tuned must have warmup in every candidate, got {}",
        ),
        ([1], "the row must be a table, got [1]"),
    ],
)
@pytest.mark.parametrize("command", ["report", "compare", "max-retrieval"])
def test_the_error_of_a_malformed_row_names_its_line(
    command: str, line: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "results", [row("softmax", 0.5)])
    file = folder / "max-retrieval" / "rows.jsonl"
    file.write_text(f"{file.read_text()}\n{json.dumps(line)}\n")
    before = file.read_bytes()
    arguments = {
        "report": [str(folder)],
        "compare": [str(folder), str(folder)],
        "max-retrieval": ["--preset", "smoke", "--out", str(folder)],
    }
    assert main([command, *arguments[command]]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {file}, line 3: {message}")
    assert shown.endswith("; correct or remove this line\n")
    assert shown.count("\n") == 1
    assert file.read_bytes() == before
    assert [path for path in folder.rglob("*") if path.is_file()] == [file]


def test_command_report_reads_existing_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.reporting.plots.png", lambda figure: b"")
    one = written(tmp_path / "one", [row("softmax", 0.5)])
    two = written(tmp_path / "two", [row("ssmax", 0.5, task="needle")])
    assert main(["report", str(one), str(two)]) == 0
    page = (one / "report.html").read_text()
    assert "max-retrieval" in page
    assert "needle" in page
    assert main(["report", str(one), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert main(["report", str(tmp_path / "nosuch")]) == 2
    assert "error: " in capsys.readouterr().err
