"""Published results: the summary in docs/results, what made it, and the lines below its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.reporting.pages import documented, overview, scores
from evals.results.provenance import holds, provenance, sentence
from evals.results.summary import groups
from evals.results.summary_csv import csv_text
from evals.results.tuned import TUNED
from evals.tasks import TASKS
from helpers.evals_rows import SETTINGS, group, pretrained, row, trial, written
from scripts import publish

COMMAND = "python -m evals max-retrieval"
SECOND = ("--environment", "ATEN_CPU_CAPABILITY=default", "--against")


def rows(**more: Any) -> list:
    """Two variants with two seeds and tuned learning rates, and a row of the sweep."""
    more |= {"shared": {"learning_rate": TUNED}}
    reported = [
        row(v, score, seed=seed, settings={**SETTINGS, "learning_rate": rate}, **more)
        for v, score, rate in (("softmax", 0.97, 0.001), ("ssmax", 0.99, 0.003))
        for seed in (0, 1)
    ]
    swept = row("softmax", 0.5, seed=1000, split="validation", key="sweep", **more)
    return [*reported, swept]


def changed(variant: str = "", **fields: Any) -> list:
    """The rows with other fields, in all rows or in those of a variant."""
    return [one | fields if one["variant"] == (variant or one["variant"]) else one
            for one in rows()]  # fmt: skip


def published(folder: Path, result_rows: list, *options: str) -> int:
    source = str(written(folder / "results", result_rows))
    return publish.main([source, "--command", COMMAND, "--to", str(folder / "docs"), *options])


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


@pytest.mark.parametrize(
    ("name", "title", "paper"),
    [("paper", "preset paper", True), ("new-variants", "new variants", False)],
)
def test_the_name_gives_the_title_and_the_published_scores(
    name: str, title: str, paper: bool, tmp_path: Path
) -> None:
    assert published(tmp_path, rows(), "--name", f"max-retrieval.{name}") == 0
    text = scores(tmp_path / "docs")
    assert text.startswith(f"#### max-retrieval: {title}\n\nAccuracy, %. 2 seeds, ")
    assert f"\n**max-retrieval** ({title}): Accuracy" in text
    assert ("| `softmax`, here |" in text) == paper
    assert ("| `softmax`, paper | 98.6 |" in text) == paper


def test_rows_that_do_not_hold_in_another_arithmetic_are_named(tmp_path: Path) -> None:
    other = changed("ssmax", metrics={"accuracy": 0.2}, arithmetic="DEFAULT")
    against = str(written(tmp_path / "default", other))
    assert published(tmp_path, rows(arithmetic="AVX2"), *SECOND, against) == 0
    text = scores(tmp_path / "docs")
    assert "§: the row does not hold in a second run with `ATEN_CPU_CAPABILITY=default`." in text
    assert "| `ssmax` §" in text
    assert "`softmax` §" not in text


def test_the_overview_says_that_no_row_holds(tmp_path: Path) -> None:
    other = changed(metrics={"accuracy": 0.2}, arithmetic="DEFAULT")
    against = str(written(tmp_path / "default", other))
    assert published(tmp_path, rows(), *SECOND, against) == 0
    assert overview(tmp_path / "docs") == "No row of `max-retrieval` holds on another CPU.\n"


def test_the_second_run_may_have_fewer_seeds(tmp_path: Path) -> None:
    """They are compared with the same seeds of the first run, not with all of them."""
    other = rows()
    further = [one | {"seed": 2, "key": f"{one['key']} 2"} for one in other if one["seed"] == 1]
    ours = [*other, *(one | {"metrics": {"accuracy": 0.1}} for one in further)]
    against = str(written(tmp_path / "default", other))
    assert published(tmp_path, ours, *SECOND, against) == 0
    made_by = json.loads((tmp_path / "docs" / "max-retrieval.json").read_text())
    assert made_by["arithmetic"]["seeds"] == [0, 1]
    assert holds(made_by, TASKS["max-retrieval"]) == {"softmax": True, "ssmax": True}
    text = sentence(made_by, "x.json")
    assert "holds in a second run with `ATEN_CPU_CAPABILITY=default`, of seeds 0 to 1." in text


def test_which_rows_hold_follows_from_the_scores_of_both_runs() -> None:
    """Not from an answer that a file stores; only files without these scores have one."""
    first = {"softmax": {"16": {"0": 0.9, "1": 0.92}, "64": {"0": 0.5, "1": 0.51}}}
    second = {"softmax": {"16": {"0": 0.91, "1": 0.92}, "64": {"0": 0.52, "1": 0.53}}}
    made_by = {"seeds": [0, 1], "scores": first}
    task = TASKS["max-retrieval"]
    stale = {"softmax": False}
    assert holds({**made_by, "arithmetic": {"holds": stale, "scores": second}}, task) == {
        "softmax": True
    }
    second["softmax"]["64"]["0"] = 0.7
    assert holds({**made_by, "arithmetic": {"scores": second}}, task) == stale
    assert holds({**made_by, "arithmetic": {"holds": stale}}, task) == stale


def test_a_row_that_failed_in_another_arithmetic_does_not_hold(tmp_path: Path) -> None:
    """The folder of the second run may have other tasks and lengths."""
    other = changed("ssmax", status="nan", metrics={})
    other.append(rows()[0] | {"x": 32, "key": "longer"})
    other.append(row("softmax", 0.5, task="needle"))
    assert published(tmp_path, rows(), *SECOND, str(written(tmp_path / "default", other))) == 0
    record = json.loads((tmp_path / "docs" / "max-retrieval.json").read_text())
    assert holds(record, TASKS["max-retrieval"]) == {"softmax": True, "ssmax": False}
    assert record["scores"]["ssmax"]["16"] == {"0": 0.99, "1": 0.99}
    assert record["arithmetic"]["scores"]["ssmax"]["16"] == {}
    assert record["arithmetic"]["scores"]["softmax"]["32"] == {"0": 0.97}


def pretrained_row(variant: str, length: int, sample: int, loss: float, **more: Any) -> dict:
    metrics = {"loss": loss, "retrieval": 0.5, "one_needle": 1.0}
    return pretrained(variant, length, sample, metrics=metrics, **more)


OTHER_STEPS = [
    row("softmax", 0.5, key=str(steps), settings={**SETTINGS, "steps": steps}) for steps in (10, 11)
]
# The rows and options, and the message
WRONG = [
    (rows(commit="abc-dirty"), (), "must be made by committed code"),
    (rows(commit="unknown"), (), "must be made by committed code"),
    (rows(), SECOND[:2], "--against and --environment must be given together"),
    (rows(), ("--name", "mqar"), "--name must be max-retrieval or max-retrieval.OTHER-WORDS"),
    (rows(), ("--name", "max-retrieval/../x"), "--name must be max-retrieval or"),
    (changed(split="validation"), (), "the folder must have results, got only those of a sweep"),
    (changed(status="nan", metrics={}), (), "DIR must have at least one score, got none"),
    ([*rows(), row("softmax", 0.5, task="needle")], (), "of one task, got max-retrieval, needle"),
    (OTHER_STEPS, (), "equal settings, got 2 groups: steps 10; steps 11"),
    ([trial(one, key=one["key"]) for one in OTHER_STEPS], (), "got 2 groups: steps 10; steps 11"),
    ([pretrained_row("log_n", 64, 0, 3.0, dtype=dtype, key=dtype)
      for dtype in ("float32", "bfloat16")], (), "float32, seed 0; tiny, text.txt, bfloat16, se"),
]  # fmt: skip
# The rows of the second run, and the message
WRONG_SECOND = [
    ([row("softmax", 0.5, task="needle")], "must have results of max-retrieval, got none"),
    (rows()[:1], "must have every row of DIR, it lacks ssmax at n = 16"),
    (changed(sequences=3), "must have as many test sequences as DIR, softmax at n = 16 has"),
    (
        changed(group=group({**SETTINGS, "learning_rate": "tuned", "steps": 9999}, "made by hand")),
        "must have the settings of DIR, steps = 10, got 9999",
    ),
    (
        changed(tuned={"values": {"learning_rate": 1.0}, "tried": []}),
        "must have the tuned values of DIR, ",
    ),
    (rows(arithmetic="AVX2"), "another arithmetic than DIR, both have AVX2"),
    ([one for one in rows() if one["seed"] == 0], "need two or more seeds"),
]


@pytest.mark.parametrize(
    ("result_rows", "second", "options", "message"),
    [
        *((result_rows, None, options, message) for result_rows, options, message in WRONG),
        *((rows(arithmetic="AVX2"), second, (), message) for second, message in WRONG_SECOND),
        (rows(), "results", (), "--against must have other results than DIR, both have "),
    ],
)
def test_wrong_results_or_options_are_one_error_and_write_nothing(
    result_rows: list, second: Any, options: tuple[str, ...], message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if second is not None:
        folder = tmp_path / "results" if second == "results" else written(tmp_path / "two", second)
        options = (*SECOND, str(folder))
    assert published(tmp_path, result_rows, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_changes_that_are_not_committed_are_named_below_the_table(tmp_path: Path) -> None:
    note = "The file x.json was changed."
    assert published(tmp_path, rows(commit="abc-dirty"), "--note", note) == 0
    text = scores(tmp_path / "docs")
    assert "commit abc-dirty," in text
    assert f"(results/max-retrieval.json). {note}" in text


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
    assert "| `log_n` | +0.250 ±0.000 | +0.250 ±0.000 |" in text
    assert "**Retrieval at n = 128, %**" in text
    assert "Samples: 2 at n = 64, 2 at n = 128." in text
    assert documented(tmp_path, "adapt") == "Nothing has been measured yet.\n"


def test_figures_of_a_pretrained_model_are_published(tmp_path: Path) -> None:
    result_rows = [
        pretrained_row("as loaded", n, sample, 3.0) for n in (64, 128) for sample in range(2)
    ]
    docs = tmp_path / "docs"
    assert published(tmp_path, result_rows) == 0
    assert (docs / "pretrained-by-length.png").read_bytes()[:4] == b"\x89PNG"
    assert "(docs/pretrained-by-length.png)" in documented(docs, "pretrained")
    without_loss = [{**row, "metrics": {"one_needle": 1.0}} for row in result_rows]
    assert published(tmp_path / "again", without_loss, "--to", str(docs)) == 0
    assert not (docs / "pretrained-by-length.png").exists()


def test_intervals_do_not_depend_on_the_order_of_rows() -> None:
    result_rows = [pretrained_row("as loaded", 64, sample, sample**1.5) for sample in range(20)]
    assert csv_text(groups(result_rows)) == csv_text(groups(result_rows[::-1]))
