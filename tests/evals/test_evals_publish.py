"""Published results: the summary in docs/results, what made it, and the lines below its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commandline.errors import UsageError
from evals.reporting.pages import documented, scores
from evals.results.provenance import provenance, sentence
from evals.results.summary import groups
from evals.results.summary_csv import csv_text
from helpers.evals_rows import SETTINGS, row, written
from scripts import publish

COMMAND = "python -m evals max-retrieval"


def rows(**more: Any) -> list:
    """Two variants with two seeds and tuned learning rates, and a row of the sweep."""
    more |= {"shared": {"learning_rate": "tuned: 0.001, 0.003"}}
    reported = [
        row(v, score, seed=seed, settings={**SETTINGS, "learning_rate": rate}, **more)
        for v, score, rate in (("softmax", 0.97, 0.001), ("ssmax", 0.99, 0.003))
        for seed in (0, 1)
    ]
    swept = row("softmax", 0.5, seed=1000, split="validation", key="sweep", **more)
    return [*reported, swept]


def published(folder: Path, result_rows: list, *options: str) -> int:
    source = written(folder / "results", result_rows) / result_rows[0]["task"]
    return publish.main([str(source), "--command", COMMAND, "--to", str(folder / "docs"), *options])


def test_the_summary_and_what_made_it_are_published(tmp_path: Path) -> None:
    assert published(tmp_path, rows()) == 0
    record = json.loads((tmp_path / "docs" / "max-retrieval.json").read_text())
    assert record["command"] == COMMAND
    assert record["commit"] == ["abc"]
    assert record["seeds"] == [0, 1]
    assert record["sweep_seeds"] == [1000]
    assert record["settings"]["steps"] == 10
    assert record["settings"]["softmax"] == {"learning_rate": 0.001}
    assert record["settings"]["ssmax"] == {"learning_rate": 0.003}
    assert record["scores"]["ssmax"] == {"16": {"0": 0.99, "1": 0.99}}
    text = scores(tmp_path / "docs")
    assert "| `ssmax` | 99.0 (99.0–99.0) |" in text
    assert (
        "Made by `python -m evals max-retrieval`, commit abc, torch 2, seeds 0 to 1 (sweep: 1000); "
        "[all settings](results/max-retrieval.json)." in text
    )


def test_the_table_of_another_preset_shows_the_published_scores(tmp_path: Path) -> None:
    assert published(tmp_path, rows(), "--name", "max-retrieval.paper") == 0
    text = scores(tmp_path / "docs")
    assert text.startswith("**max-retrieval** (preset paper): Accuracy")
    assert "| `softmax`, here |" in text
    assert "| `softmax`, paper | 98.6 |" in text


def test_a_table_of_other_variants_has_its_words_in_the_title(tmp_path: Path) -> None:
    assert published(tmp_path, rows(), "--name", "max-retrieval.new-variants") == 0
    text = scores(tmp_path / "docs")
    assert text.startswith("**max-retrieval** (new variants): Accuracy")
    assert "paper" not in text


def test_rows_that_do_not_hold_in_another_arithmetic_are_named(tmp_path: Path) -> None:
    other = [
        one | {"metrics": {"accuracy": 0.2}} if one["variant"] == "ssmax" else one for one in rows()
    ]
    against = written(tmp_path / "default", other) / "max-retrieval"
    options = ("--against", str(against), "--environment", "ATEN_CPU_CAPABILITY=default")
    assert published(tmp_path, rows(), *options) == 0
    text = scores(tmp_path / "docs")
    assert "§: the row does not hold in a second run with `ATEN_CPU_CAPABILITY=default`." in text
    assert "| `ssmax` §" in text
    assert "`softmax` §" not in text


def test_a_row_that_failed_in_another_arithmetic_does_not_hold(tmp_path: Path) -> None:
    """The folder of the second run may have other tasks and lengths."""
    other = [one | {"status": "nan", "metrics": {}} if one["variant"] == "ssmax" else one
             for one in rows()]  # fmt: skip
    other.append(rows()[0] | {"length": 32, "key": "longer"})
    other.append(row("softmax", 0.5, task="needle"))
    against = str(written(tmp_path / "default", other))
    options = ("--against", against, "--environment", "ATEN_CPU_CAPABILITY=default")
    assert published(tmp_path, rows(), *options) == 0
    record = json.loads((tmp_path / "docs" / "max-retrieval.json").read_text())
    assert record["arithmetic"]["holds"] == {"softmax": True, "ssmax": False}
    assert record["scores"]["ssmax"]["16"] == {"0": 0.99, "1": 0.99}
    assert record["arithmetic"]["scores"]["ssmax"]["16"] == {}
    assert record["arithmetic"]["scores"]["softmax"]["32"] == {"0": 0.97}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([row("softmax", 0.5, task="needle")], "--against must have results of max-retrieval, got"),
        (rows()[:1], "--against must have every row of DIR, it lacks ssmax at n = 16"),
        (
            [one | {"sequences": 3} for one in rows()],
            "--against must have as many test sequences as DIR, softmax at n = 16 has",
        ),
        (
            [one | {"settings": {**one["settings"], "steps": 9999}} for one in rows()],
            "--against must have the settings of DIR, steps = 10, got 9999",
        ),
        (
            [one | {"tuned": {"values": {"learning_rate": 1.0}, "tried": []}} for one in rows()],
            r"--against must have the tuned values of DIR, ",
        ),
    ],
)
def test_a_second_run_with_other_settings_is_an_error(
    other: list, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against = written(tmp_path / "default", other)
    options = ("--against", str(against), "--environment", "ATEN_CPU_CAPABILITY=default")
    assert published(tmp_path, rows(), *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result_rows", "options", "message"),
    [
        (rows(commit="abc-dirty"), (), "must be made by committed code"),
        (rows(commit="unknown"), (), "must be made by committed code"),
        (rows(), ("--environment", "X=1"), "--against and --environment must be given together"),
        (rows(), ("--name", "mqar"), "--name must be max-retrieval or max-retrieval.OTHER-WORDS"),
        (rows(), ("--name", "max-retrieval/../x"), "--name must be max-retrieval or"),
        (
            [one | {"split": "validation"} for one in rows()],
            (),
            "the folder must have results, got only those of a sweep",
        ),
        (
            [one | {"status": "nan", "metrics": {}} for one in rows()],
            (),
            "DIR must have at least one score, got none",
        ),
    ],
)
def test_wrong_results_or_options_are_one_error_and_write_nothing(
    result_rows: list,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert published(tmp_path, result_rows, *options) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_a_second_run_must_have_other_results_in_another_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = ("--environment", "ATEN_CPU_CAPABILITY=default", "--against")
    same_folder = str(tmp_path / "results")  # has the folder of the task
    assert published(tmp_path, rows(arithmetic="AVX2"), *second, same_folder) == 2
    assert "--against must have other results than DIR, both have " in capsys.readouterr().err
    for name, status in (("AVX2", 2), ("DEFAULT", 0)):
        other = str(written(tmp_path / name, rows(arithmetic=name)))
        assert published(tmp_path / f"to {name}", rows(arithmetic="AVX2"), *second, other) == status
    message = "--against must be of another arithmetic than DIR, both have AVX2"
    assert message in capsys.readouterr().err


def test_changes_that_are_not_committed_are_named_below_the_table(tmp_path: Path) -> None:
    note = "The file x.json was changed."
    assert published(tmp_path, rows(commit="abc-dirty"), "--note", note) == 0
    text = scores(tmp_path / "docs")
    assert "commit abc-dirty," in text
    assert f"(results/max-retrieval.json). {note}" in text


def test_results_with_different_settings_are_an_error(tmp_path: Path) -> None:
    result_rows = [
        row("softmax", 0.5),
        row("softmax", 0.5, seed=1, settings={**SETTINGS, "steps": 11}),
    ]
    folder = written(tmp_path, result_rows)
    with pytest.raises(UsageError, match="equal settings, got 2 groups: steps 10; steps 11"):
        publish.publish(publish_options(folder))


def test_experiments_with_different_settings_are_an_error(tmp_path: Path) -> None:
    experiment = {"task": "classification", "condition": "clean"}
    result_rows = [row("softmax", 0.5, key=str(steps), settings={"steps": steps}) | experiment
             for steps in (10, 11)]  # fmt: skip
    folder = written(tmp_path, result_rows)
    with pytest.raises(UsageError, match="equal settings, got 2 groups: steps 10; steps 11"):
        publish.publish(publish_options(folder))


def test_results_of_two_tasks_are_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path, [row("softmax", 0.5), row("softmax", 0.5, task="needle")])
    with pytest.raises(UsageError, match="results of one task, got max-retrieval, needle"):
        publish.publish(publish_options(folder))


def publish_options(folder: Path) -> Any:
    options = {
        "folder": folder,
        "command": COMMAND,
        "note": None,
        "name": None,
        "to": folder / "docs",
    }
    return type("Options", (), {**options, "against": None, "environment": None})


def pretrained_row(variant: str, length: int, sample: int, loss: float) -> dict:
    return {
        "task": "pretrained", "variant": variant, "layers": "all", "model": "tiny",
        "fingerprint": "f", "limit": 64, "dtype": "float32", "text": "text.txt", "data": "d",
        "seed": 0, "planted": True, "length": length, "sample": sample, "status": "ok",
        "message": "", "curves": {}, "cpu_seconds": 1.0, "version": "1", "commit": "abc",
        "torch": "2", "attnzoo": "0", "device": "cpu", "key": f"{variant} {length} {sample}",
        "metrics": {"loss": loss, "retrieval": 0.5, "one_needle": 1.0},
    }  # fmt: skip


def test_tables_of_a_pretrained_model_show_the_paired_rise_of_the_loss(tmp_path: Path) -> None:
    result_rows = [
        pretrained_row(variant, n, sample, 3.0 + sample + rise)
        for variant, rise in (("as loaded", 0.0), ("log_n", 0.25))
        for n in (64, 128)
        for sample in range(2)
    ]
    (tmp_path / "pretrained.csv").write_text(csv_text(groups(result_rows)))
    record = provenance(result_rows, "python -m evals pretrained")
    assert record["samples"] == {"64": 2, "128": 2}
    assert "seed 0; [all settings](x.json)" in sentence(record, "x.json")
    (tmp_path / "pretrained.json").write_text(json.dumps(record))
    text = documented(tmp_path, "pretrained")
    # Samples differ by 1, but the rise is 0.25 in each of them.
    assert "| `log_n` | +0.250 (0.250 … 0.250) | +0.250 (0.250 … 0.250) |" in text
    assert "**Retrieval at n = 128, %**" in text
    assert "Samples: 2 at n = 64, 2 at n = 128." in text
    assert documented(tmp_path, "adapt") == "Nothing has been measured yet.\n"


def test_figures_of_a_pretrained_model_are_published(tmp_path: Path) -> None:
    result_rows = [
        pretrained_row("as loaded", n, sample, 3.0) for n in (64, 128) for sample in range(2)
    ]
    assert published(tmp_path, result_rows) == 0
    docs = tmp_path / "docs"
    assert (docs / "pretrained-by-length.png").read_bytes()[:4] == b"\x89PNG"
    assert "(docs/pretrained-by-length.png)" in documented(docs, "pretrained")
    without_loss = [{**row, "metrics": {"one_needle": 1.0}} for row in result_rows]
    assert published(tmp_path / "again", without_loss, "--to", str(docs)) == 0
    assert not (docs / "pretrained-by-length.png").exists()
    other = [pretrained_row("log_n", 64, 0, 3.0) | {"dtype": "bfloat16", "key": "other"}]
    with pytest.raises(UsageError, match="float32, seed 0; tiny, text.txt, bfloat16, seed 0"):
        folder = written(tmp_path / "two", result_rows + other) / "pretrained"
        publish.publish(publish_options(folder))


def test_intervals_do_not_depend_on_the_order_of_rows() -> None:
    result_rows = [pretrained_row("as loaded", 64, sample, sample**1.5) for sample in range(20)]
    assert csv_text(groups(result_rows)) == csv_text(groups(result_rows[::-1]))
