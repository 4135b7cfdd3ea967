"""Small studies of max-retrieval: output, resuming, failures, shards, plugins."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnzoo import list_variants
from evals import run as runs
from evals.__main__ import main
from evals.run import NotFinite
from evals.tasks.families.retrieval import METRICS
from helpers.evals_rows import stored

ROOT = Path(__file__).parents[2]
SPECS = "softmax,softmax->log_n(train_length=16),ssmax"
SMALL = ["max-retrieval", "--preset", "smoke", "--variants", SPECS, "--seeds", "2"]
SMALL += ["--steps", "20", "--lengths", "16,32,64", "--set", "test_sequences=100"]
TASK = "max-retrieval"
ROWS = 3 * 2 * 3


lines = stored


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evals", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an uninterrupted study that ran in the test process."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evals.reporting.plots.png", lambda figure: b"")
        assert main([*SMALL, "--workers", "0", "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_study_writes_pictures(tmp_path: Path) -> None:
    few = ["--steps", "2", "--seeds", "1", "--workers", "0", "--out", str(tmp_path)]
    assert main([*SMALL, *few]) == 0
    for name in ("accuracy.png", "max_weight.png", "best_keys.png"):
        assert (tmp_path / TASK / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_study_of_every_variant(no_pictures: None, tmp_path: Path) -> None:
    study = ["copy", "--preset", "smoke", "--steps", "2", "--lengths", "16", "--workers", "0"]
    assert main([*study, "--out", str(tmp_path)]) == 0
    rows = (tmp_path / "copy" / "rows.jsonl").read_text().splitlines()
    specs = [json.loads(row)["variant"] for row in rows]
    assert {s.split("->")[-1].split("(")[0] for s in specs} == set(list_variants())


def test_a_study_writes_rows_summary_and_report(undisturbed: Path) -> None:
    rows = lines(undisturbed)
    assert len({row["key"] for row in rows}) == len(rows) == ROWS
    for row in rows:
        assert row["status"] == "ok"
        assert row["task"] == "max-retrieval"
        assert row["schedule"].startswith("one-cycle cosine, 20 steps")
        assert (row["settings"]["steps"], row["sequences"]) == (20, 100)
        assert all(isinstance(row["metrics"][metric.name], float) for metric in METRICS)
        assert row["cpu_seconds"] > 0
        assert row["train_cpu_seconds"] > 0
        assert row["torch"]
        assert row["commit"]
        assert len(row["curves"]["best_keys"]) == 16
        assert len(row["curves"]["head_peak"]) == 1
        assert ("s" in row["learned"]) == (row["variant"] == "ssmax")
    assert {(row["variant"], row["seed"], row["x"]) for row in rows} == {
        (variant, seed, length)
        for variant in SPECS.split(",")
        for seed in (0, 1)
        for length in (16, 32, 64)
    }
    # Inference-time substitutions are not trained, so only two variants × two seeds have models.
    assert len(list((undisturbed / TASK / "models").iterdir())) == 4
    with (undisturbed / TASK / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    assert len(summary) == ROWS / 2
    accuracies = [r["metrics"]["accuracy"] for r in rows if (r["variant"], r["x"]) == ("ssmax", 32)]
    mean = sum(accuracies) / 2
    line = next(s for s in summary if (s["variant"], s["length"]) == ("ssmax", "32"))
    assert float(line["accuracy"]) == pytest.approx(mean, rel=1e-5)
    assert (line["seeds"], line["failed"], line["chance"]) == ("2", "", "0.1")
    base = next(s for s in summary if (s["variant"], s["length"]) == ("softmax", "32"))
    gain = float(line["accuracy"]) - float(base["accuracy"])
    assert float(line["accuracy_minus_softmax"]) == pytest.approx(gain, abs=1e-5)
    half = 12.7062 * abs(accuracies[0] - accuracies[1]) / 2  # t of two values
    assert [float(line[f"accuracy_{end}"]) for end in ("low", "high")] == pytest.approx(
        [mean - half, mean + half], abs=1e-5
    )
    for name in ("accuracy.png", "max_weight.png", "best_keys.png"):
        assert (undisturbed / TASK / name).exists()
    assert "one-cycle cosine, 20 steps" in (undisturbed / TASK / "report.html").read_text()


def test_a_dry_run_estimates_from_stored_results_and_writes_nothing(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = [*SMALL, "--seeds", "3", "--dry-run", "--verbose", "--workers", "2"]
    assert main([*dry, "--out", str(tmp_path / "new")]) == 0
    text = capsys.readouterr().out
    # softmax->log_n uses the models of softmax, so 3 variants × 3 seeds need 6 training runs.
    assert re.search(r"max-retrieval: 3 variants, 3 seeds, .*: 6 runs to do\n", text)
    assert "6 trainings and 27 of 27 results" in text
    assert "max-retrieval: 6 runs, no estimate; 6 runs without stored results" in text
    assert not (tmp_path / "new").exists()
    assert main([*dry, "--out", str(undisturbed)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"  max-retrieval ssmax seed 2: 3 results, about \d+ s\n", text)
    assert re.search(
        r"max-retrieval: 2 runs, about [\d:]+ of computing time\n"
        r"Total: 2 runs, about [\d:]+ \(h:mm:ss or m:ss\) on 2 workers, from the medians",
        text,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_killed_study_continues_to_the_same_summary(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start([*SMALL, "--workers", "0", "--out", str(tmp_path)])
    file, deadline = tmp_path / TASK / "rows.jsonl", time.monotonic() + 600
    while time.monotonic() < deadline and not (file.exists() and file.read_bytes().count(b"\n")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = lines(tmp_path)
    assert 0 < len(before) < ROWS
    assert not (tmp_path / TASK / "summary.csv").exists()
    assert main([*SMALL, "--workers", "0", "--out", str(tmp_path)]) == 0
    assert f"{len(before)} of {ROWS} results are already in" in capsys.readouterr().out
    after = lines(tmp_path)
    assert after[: len(before)] == before
    assert len({row["key"] for row in after}) == len(after) == ROWS
    same = (tmp_path / TASK / "summary.csv").read_bytes()
    assert same == (undisturbed / TASK / "summary.csv").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_after_a_truncated_last_line_one_evaluation_is_repeated_without_training(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "truncated"
    shutil.copytree(undisturbed, out)
    rows, wanted = (out / TASK / "rows.jsonl"), (out / TASK / "summary.csv").read_bytes()
    rows.write_bytes(rows.read_bytes()[:-20])
    (out / TASK / "summary.csv").unlink()
    monkeypatch.setattr(runs, "train", None)  # models are on disk, so no run is trained
    assert main([*SMALL, "--workers", "0", "--out", str(out), "--verbose"]) == 0
    assert (out / TASK / "summary.csv").read_bytes() == wanted
    text = capsys.readouterr().out
    assert f"{ROWS - 1} of {ROWS} results are already in" in text
    assert f"to do: 0 trainings and 1 of {ROWS} results" in text
    assert "skipped 1 unreadable line(s)" in text
    assert rows.read_bytes().count(b"\n") == ROWS + 1


@pytest.mark.usefixtures("no_pictures")
def test_output_has_a_plan_a_line_per_run_a_score_table_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--workers", "0", "--out", str(tmp_path), "--steps", "2"]
    assert main([*SMALL, *options]) == 0
    shown = capsys.readouterr()
    first, so_far, second = shown.err.split("\n\n")
    assert [line.split(":")[0] for line in [*first.splitlines(), *second.splitlines()]] == [
        "[1/4] max-retrieval softmax seed 0", "[2/4] max-retrieval ssmax seed 0",
        "[3/4] max-retrieval softmax seed 1", "[4/4] max-retrieval ssmax seed 1",
    ]  # fmt: skip
    assert so_far.startswith("so far: max-retrieval: Accuracy, %")
    assert so_far.count(" † 1/1 ") == 3
    plan, _, title, header, *body = shown.out.splitlines()
    *table, effective, legend, note, _, preset, figure, report = body
    assert plan == (
        "max-retrieval: 3 variants, 2 seeds, train length 16, eval lengths up to 64: 4 runs to do"
    )
    assert title == (
        "max-retrieval: Accuracy, % (higher is better) by eval length n; train length 16, "
        "chance 10.0, mean ± standard error of 2 seeds"
    )
    assert re.fullmatch(r"variant +n = 16 +n = 32 +n = 64 +effective length", header)
    pattern = r"[^ ]+ † 2/2" + r" +\d+\.\d ±\d+\.\d" * 3 + " +—"
    assert len(table) == 3
    assert all(re.fullmatch(pattern, line) for line in table)
    assert effective.startswith("effective length: the longest n")
    assert (legend[:5], note[:5]) == ("a->b:", "† k/2")
    assert preset == "The smoke preset checks that everything runs. Its scores mean nothing."
    assert figure == f"Figure: {tmp_path / TASK / 'accuracy.png'}"
    assert report == f"Report: {tmp_path / TASK / 'report.html'}"


@pytest.mark.usefixtures("no_pictures")
def test_tables_so_far_come_when_the_number_of_seeds_has_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*SMALL, "--variants", "softmax", "--lengths", "16", "--steps", "1", "--workers", "0"]
    assert main([*few, "--seeds", "5", "--out", str(tmp_path)]) == 0
    shown = re.findall(r"so far: .*\n.*\nsoftmax † (\d)/", capsys.readouterr().err)
    assert shown == ["1", "2", "4"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_verbose_prints_all_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "paper", "--variants", "softmax,softmax->adaptive_temperature"]
    sizes = ["--seeds", "1", "--steps", "2", "--lengths", "16,32,33", "--workers", "0", "--verbose"]
    assert main(["max-retrieval", *options, *sizes, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"softmax, paper +98\.6 +97\.1\?\n", text)
    assert re.search(r"softmax->adaptive_temperature, here +\d+\.\d +\d+\.\d\n", text)
    assert "Accuracy, %: difference from softmax" in text
    assert "chance 10.0" in text
    assert "schedule: one-cycle cosine, 2 steps" in text
    assert re.search(r"softmax->adaptive_temperature +shared +shared +\d+\.\d", text)


@pytest.mark.usefixtures("no_pictures")
def test_a_nan_in_training_is_stored_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = runs.train

    def broken(task, variant, positions, seed, *args):
        if (variant.name, seed) == ("ssmax", 1):
            raise NotFinite("the training loss is nan at step 25")
        return train(task, variant, positions, seed, *args)

    monkeypatch.setattr(runs, "train", broken)
    options = ["--variants", "softmax,ssmax", "--lengths", "16", "--steps", "2", "--workers", "0"]
    run = [*SMALL, *options, "--out", str(tmp_path)]
    assert main(run) == 0
    bad = next(row for row in lines(tmp_path) if (row["variant"], row["seed"]) == ("ssmax", 1))
    assert (bad["status"], bad["metrics"]) == ("nan", {})
    assert bad["message"] == "training: the training loss is nan at step 25"
    text = capsys.readouterr().out
    assert "failed: ssmax, n = 16: training: the training loss is nan at step 25" in text
    with (tmp_path / TASK / "summary.csv").open() as file:
        line = next(line for line in csv.DictReader(file) if line["variant"] == "ssmax")
    assert (line["seeds"], line["failed"], line["accuracy_se"]) == ("1", "nan:1", "")
    assert main(run) == 0  # the failed run is not repeated
    assert "0 runs to do" in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_with_only_failures_is_shown_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(runs, "train", broken)
    options = ["--variants", "softmax", "--lengths", "16,32", "--workers", "0"]
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 1  # all runs failed
    assert {row["status"] for row in lines(tmp_path)} == {"oom"}
    assert re.search(r"softmax † 2/2 +oom +oom", capsys.readouterr().out)
    assert (tmp_path / TASK / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.undo()
    retry = [*SMALL, *options, "--out", str(tmp_path), "--retry-failed"]
    assert main(retry) == 0
    assert [row["status"] for row in lines(tmp_path)] == ["oom"] * 4 + ["ok"] * 4
    assert "failed" not in (tmp_path / TASK / "summary.csv").read_text().splitlines()[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_model_that_cannot_be_read_is_trained_again(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed / TASK / "models", tmp_path / TASK / "models")
    wrong = [b"", b"no model", (undisturbed / TASK / "rows.jsonl").read_bytes()]
    for path, content in zip(sorted((tmp_path / TASK / "models").iterdir()), wrong, strict=False):
        path.write_bytes(content)
    assert main([*SMALL, "--workers", "0", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("warning: cannot read ") == 3
    same = (tmp_path / TASK / "summary.csv").read_bytes()
    assert same == (undisturbed / TASK / "summary.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_second_study_in_a_folder_keeps_the_first_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study with other variants, test sizes or steps adds its results to the folder."""
    few = ["--lengths", "16,64", "--workers", "0", "--out", str(tmp_path), "--steps", "2"]
    small = ["--set", "test_least=4", "--set", "test_items=640"]
    seen: list[list[tuple[str, ...]]] = []
    for more in (["softmax"], ["ssmax"], ["softmax", *small], ["softmax", "--steps", "3"]):
        assert main([*SMALL, *few, "--seeds", "1", "--variants", *more]) == 0
        with (tmp_path / TASK / "summary.csv").open() as file:
            lines = list(csv.DictReader(file))
        seen.append([(x["variant"], x["length"], x["accuracy"], x["steps"]) for x in lines])
        assert all(line in seen[-1] for earlier in seen for line in earlier)
    assert [len(lines) for lines in seen] == [2, 4, 6, 8]
    assert {x["settings"] for x in lines} == {
        "steps 2, test sequences 100 at 16, 100 at 64",
        "steps 2, test sequences 40 at 16, 10 at 64",
        "steps 3, test sequences 100 at 16, 100 at 64",
    }
    assert capsys.readouterr().out.count(f"\n{TASK} (") == 5  # tables of 2 groups, then of 3
    page = (tmp_path / TASK / "report.html").read_text()
    assert all(f"<h2>{TASK} · {x['settings']}</h2>" in page for x in lines)
    assert "The folder also has 6 results made with other options." in page
    pictures = {path.name for path in (tmp_path / TASK).glob("accuracy*")}
    assert pictures == {"accuracy.png", "accuracy-2.png", "accuracy-3.png"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_two_shards_give_the_same_summary(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        shard = [*SMALL, "--workers", "0", "--shard", f"{index}/2", "--out", str(tmp_path)]
        assert main(shard) == 0
        text = capsys.readouterr().out
        assert f"2 runs to do in shard {index} of 2" in text
        assert ("Results of other shards are missing" in text) == (index == 0)
    names = {path.name for path in (tmp_path / TASK).glob("rows*")}
    assert names == {"rows-0-of-2.jsonl", "rows-1-of-2.jsonl"}
    summary = (tmp_path / TASK / "summary.csv").read_bytes()
    assert summary == (undisturbed / TASK / "summary.csv").read_bytes()


PLUGIN = """
import multiprocessing, os, signal
from attnzoo import Variant, register_variant

def relu(q, k, call):
    s = (call.scores(q, k) + call.bias).relu() / call.counts.clamp(min=1)[..., None]
    return s.masked_fill(~call.visible, 0.0)

def holes(q, k, call):  # NaN beyond 16 keys
    return relu(q, k, call) + (float("nan") if call.keys > 16 else 0.0)

def greedy(q, k, call):  # kills its worker at 32 keys, as Linux does when memory runs out
    if call.keys == 32 and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return relu(q, k, call)

def defect(q, k, call):
    if call.keys == 32 and multiprocessing.parent_process() is not None:
        raise KeyError("a defect")
    return relu(q, k, call)

for weights in (relu, holes, greedy, defect):
    register_variant(Variant(f"my_{weights.__name__}", "ReLU(z)/n", "a test", weights,
                             normalized=False))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_killed_workers_nan_and_plugin_errors_do_not_stop_other_runs(tmp_path: Path) -> None:
    plugin, out = tmp_path / "plugin.py", tmp_path / "out"
    plugin.write_text(PLUGIN)
    variants = "my_relu,softmax->my_holes,softmax->my_greedy,my_defect"
    sizes = ["--lengths", "16,32,48", "--steps", "5", "--workers", "1", "--out", str(out)]
    sizes += ["--sweep", "none"]
    run = ["max-retrieval", "--plugin", str(plugin), "--variants", variants, "--seeds", "1"]
    process = start([*run, *sizes])
    text, errors = process.communicate(timeout=900)
    by_point = {(row["variant"], row["x"]): row for row in lines(out)}
    assert {key: row["status"] for key, row in by_point.items()} == {
        ("my_relu", 16): "ok",
        ("my_relu", 32): "ok",
        ("my_relu", 48): "ok",
        ("softmax->my_holes", 16): "ok",
        ("softmax->my_holes", 32): "oom",  # my_greedy killed the worker process
        ("softmax->my_holes", 48): "nan",
        ("softmax->my_greedy", 16): "ok",
        ("softmax->my_greedy", 32): "oom",
        ("softmax->my_greedy", 48): "ok",
        ("my_defect", 16): "ok",
    }
    assert by_point["my_relu", 16]["metrics"]["weight_sum"] > 0
    assert "not finite" in by_point["softmax->my_holes", 48]["message"]
    assert "process killed twice at n = 32" in by_point["softmax->my_greedy", 32]["message"]
    assert "failed: softmax->my_greedy, n = 32: process killed twice" in text
    # A defect in a variant gives no row. The other runs continue, and the exit status is 1.
    assert process.returncode == 1
    assert "failed: max-retrieval my_defect seed 0: KeyError: 'a defect'" in errors
    assert "█" not in errors  # stderr is no terminal, so no progress bar
    assert "Traceback" not in errors
    assert re.search(r"my_defect † 1/1 +\d+\.\d +missing +missing", text)
