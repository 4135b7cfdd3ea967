"""Sweeps: candidates, choices, shards, resuming, recorded choices, and what tables say."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from commandline.errors import UsageError
from evals import run as runs
from evals import sweeps
from evals.__main__ import main
from evals.measures.metrics import Outcome
from evals.options import Options
from evals.plan import plan_study
from evals.reporting.tables import notes, settings_table
from evals.results.store import Row, Shard
from evals.results.summary import Series, groups
from evals.results.summary_csv import summary_of
from evals.results.tuned import TUNED
from evals.run import NOT_TRAINED, Run
from evals.sweeps import SWEEP_SEEDS, Sweep, choose
from evals.tasks import TASKS
from helpers.evals_rows import SETTINGS, row, stored

pytestmark = pytest.mark.usefixtures("no_pictures")
TASK = "max-retrieval"
RATES = {"learning_rate": [3e-3, 1e-3]}
SMALL = [TASK, "--preset", "smoke", "--variants", "softmax,ssmax,softmax->log_n(train_length=16)"]
SMALL += ["--steps", "4", "--lengths", "16,32", "--workers", "0", "--set", "test_items=640"]
SMALL += ["--set", "test_least=4", "--sweep", "learning_rate=3e-3,1e-3"]


def plan(preset: str = "quick", **more: object):
    options = {"preset": preset, "variants": ["softmax", "ssmax"], "lengths": [16], **more}
    return plan_study(TASKS[TASK], Options(**options), {})  # type: ignore[arg-type]


def split(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """The runs of the sweep, and the others."""
    return [run for run in runs if run.candidate], [run for run in runs if not run.candidate]


def scored(*scores: float | None) -> list[list[Row]]:
    """The rows of a candidate with one length, one seed per score."""
    return [[row("softmax", score)] for score in scores]


def test_the_best_mean_is_chosen_and_of_equal_means_the_smaller_value() -> None:
    grid = Sweep({"learning_rate": (3e-3, 1e-3), "warmup": (0.1,)}).candidates
    assert grid == [{"learning_rate": 1e-3, "warmup": 0.1}, {"learning_rate": 3e-3, "warmup": 0.1}]
    low, high = {"learning_rate": 1e-3}, {"learning_rate": 3e-3}
    both = [low, high]
    assert choose(both, [scored(0.5, 0.7), scored(0.6, 0.7)], "accuracy", False)["values"] == high
    assert choose(both, [scored(0.5, 0.7), scored(0.6, 0.7)], "accuracy", True)["values"] == low
    assert choose(both, [scored(0.5, 0.75), scored(0.75, 0.5)], "accuracy", False)["values"] == low
    for lower_is_better in (False, True):  # a failed seed
        failed = choose(both, [scored(0.9, None), scored(0.1, 0.1)], "accuracy", lower_is_better)
        assert failed["values"] == high
        assert failed["tried"][0] == {"values": low, "scores": [0.9, None]}
    assert choose(both, [scored(None, None)] * 2, "accuracy", False)["values"] == low


def test_candidates_that_are_equal_at_the_train_length_differ_at_a_longer_one() -> None:
    grid = [{"learning_rate": 1e-3}, {"learning_rate": 3e-3}]
    short, long = (row("softmax", 0.99) for _ in range(2)), (0.5, 0.7)
    rows = [[[at_train, row("softmax", score, x=192)]] for at_train, score in zip(short, long)]
    choice = choose(grid, rows, "accuracy", False)
    assert choice["values"] == grid[1]
    assert [tried["scores"] for tried in choice["tried"]] == [[0.745], [pytest.approx(0.845)]]
    rows[1][0][1] = row("softmax", None, x=192)  # failed at the longer length
    failed = choose(grid, rows, "accuracy", False)
    assert failed["values"] == grid[0]
    assert failed["tried"][1]["scores"] == [None]


def test_the_longer_length_of_a_sweep_is_not_reported() -> None:
    assert plan().sweep.lengths == (16, 192)
    with pytest.raises(UsageError, match="--lengths of max-retrieval must not have 192, at which"):
        plan(lengths=[64, 192])
    assert plan(lengths=[192], sweep="none").xs == (16, 192)
    flip_flop = plan_study(TASKS["flip-flop"], Options(preset="quick"), {})  # lengths in steps of 4
    assert flip_flop.sweep.lengths == (64, 384)


@pytest.mark.parametrize(
    ("small", "large", "lower_is_better", "chosen"),
    [
        (0.996, 1.0, False, "small"),
        (0.994, 1.0, False, "large"),
        (2.01, 2.0, True, "small"),
        (2.02, 2.0, True, "large"),
        (-1.004, -1.0, False, "small"),
        (-1.006, -1.0, False, "large"),
    ],
)
def test_means_within_half_a_percent_of_the_best_count_as_equal(
    small: float, large: float, lower_is_better: bool, chosen: str
) -> None:
    values = {"small": {"learning_rate": 1e-3}, "large": {"learning_rate": 3e-3}}
    rows = [scored(small, small), scored(large, large)]
    choice = choose(list(values.values()), rows, "accuracy", lower_is_better)
    assert choice["values"] == values[chosen]


def test_a_sweep_trains_candidates_with_seeds_that_are_not_reported() -> None:
    study = plan(sweep=RATES, seeds=2)
    tries, reported = split(study.runs({}))
    assert len(tries) == 2 * 2 * len(SWEEP_SEEDS)
    assert {run.seed for run in tries} == set(SWEEP_SEEDS)
    assert {run.settings.learning_rate for run in tries} == {1e-3, 3e-3}
    assert {tuple(run.tests) for run in tries} == {(16, 192)}
    assert {tuple(run.splits.values()) for run in tries} == {("validation",)}
    assert len({run.name for run in tries}) == len(tries)
    assert {(run.seed, run.waits) for run in reported} == {(0, True), (1, True)}


def test_keys_without_a_sweep_do_not_depend_on_the_sweep() -> None:
    plain, tuned = plan(sweep="none"), plan(sweep=RATES)
    keys = [{key for run in study.runs({}) for key in run.keys} for study in (plain, tuned)]
    assert not keys[0] & keys[1]
    # Models are shared with a study that gives the chosen value with --set. A run that waits for
    # the sweep has its first candidate.
    untuned = plan(sweep="none", settings={"learning_rate": 1e-3})
    models = [[run.training_key for run in split(study.runs({}))[1]] for study in (untuned, tuned)]
    assert models[0] == models[1]


def test_the_validation_split_is_neither_training_nor_test() -> None:
    for task in TASKS.values():
        settings, length = task.presets["smoke"].settings, task.presets["smoke"].lengths[0]
        drawn = [
            repr(task.batch(0, split, length, 0, 1, settings))
            for split in ("train", "validation", *task.splits.values())
        ]
        assert len(set(drawn)) == len(drawn)


def test_all_runs_of_a_variant_are_in_one_shard() -> None:
    study = plan(sweep=RATES, seeds=3)
    parts = [study.runs({}, shard) for shard in (Shard(0, 2), Shard(1, 2))]
    assert [{run.variant.name for run in part} for part in parts] == [{"softmax"}, {"ssmax"}]
    assert [len(part) for part in parts] == [7, 7]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a study with a sweep that was not interrupted."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evals.reporting.plots.png", lambda figure: b"")
        assert main([*SMALL, "--out", str(out)]) == 0
    return out


def test_reported_rows_have_the_choice_and_the_validation_scores(undisturbed: Path) -> None:
    rows = stored(undisturbed)
    tries = [row for row in rows if row.get("split") == "validation"]
    assert len(tries) == 2 * 2 * 2 * len(SWEEP_SEEDS)  # variants, rates, lengths, seeds
    reported = [row for row in rows if "split" not in row]
    assert {(row["variant"], row["seed"]) for row in reported} == {
        ("softmax", 0), ("ssmax", 0), ("softmax->log_n(train_length=16)", 0)
    }  # fmt: skip
    for result in reported:
        trained = result["variant"].split("->")[0]
        tries_of_variant = [row for row in tries if row["variant"] == trained]
        tried = result["tuned"]["tried"]
        for candidate in tried:
            rate = candidate["values"]["learning_rate"]
            tries_of_rate = [
                row for row in tries_of_variant if row["settings"]["learning_rate"] == rate
            ]
            for seed, mean in zip(SWEEP_SEEDS, candidate["scores"], strict=True):
                of_seed = [row for row in tries_of_rate if row["seed"] == seed]
                assert {row["x"] for row in of_seed} == {16, 24}
                assert mean == sum(row["metrics"]["accuracy"] for row in of_seed) / 2
        best = 0.995 * max(sum(candidate["scores"]) for candidate in tried)
        chosen = next(
            candidate["values"] for candidate in tried if sum(candidate["scores"]) >= best
        )
        assert result["tuned"]["values"] == chosen
        assert result["settings"]["learning_rate"] == chosen["learning_rate"]
    (group,) = groups(rows)  # one table, although the learning rates may differ
    assert group.settings["learning_rate"] == "tuned"
    with (undisturbed / TASK / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    assert {line["tuned"].split()[0] for line in summary} == {"learning_rate"}
    assert all(0 <= float(line["validation"]) <= 1 for line in summary)
    assert "peak tuned" in summary[0]["schedule"]


@pytest.mark.slow
def test_an_interrupted_sweep_continues_to_the_same_summary(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, done = runs.train, []

    def interrupted(*args):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(args)
        return train(*args)

    monkeypatch.setattr(runs, "train", interrupted)
    assert main([*SMALL, "--out", str(tmp_path)]) == 130
    assert len(stored(tmp_path)) == 2 * 5  # of 8 runs of the sweep
    monkeypatch.setattr(runs, "train", train)
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    same = (tmp_path / TASK / "summary.csv").read_bytes()
    assert same == (undisturbed / TASK / "summary.csv").read_bytes()


@pytest.mark.slow
def test_two_shards_of_a_sweep_equal_one_run(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        assert main([*SMALL, "--shard", f"{index}/2", "--out", str(tmp_path)]) == 0
        assert f"5 runs to do, with a sweep of learning_rate in shard {index}" in (
            capsys.readouterr().out
        )
    same = (tmp_path / TASK / "summary.csv").read_bytes()
    assert same == (undisturbed / TASK / "summary.csv").read_bytes()


def test_a_dry_run_counts_and_estimates_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--dry-run", "--verbose", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "10 runs to do, with a sweep of learning_rate" in text
    assert "sweep: 8 runs to do with learning_rate 0.001; learning_rate 0.003" in text
    assert "max-retrieval ssmax learning_rate 0.003 seed 1001: 2 results, no estimate" in text
    assert not (tmp_path / "out").exists()


def test_a_recorded_choice_is_used_in_place_of_a_sweep(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "RECORD", tmp_path / "tuned.json")
    assert plan("paper").sweep.names == []  # nothing is recorded
    tried = [{"values": {"learning_rate": 3e-3}, "scores": [0.9, 0.8]}]
    for variant, rate in (("softmax", 3e-3), ("entmax", 1e-2)):
        choice = {"values": {"learning_rate": rate}, "tried": tried}
        sweeps.record(TASK, [(variant, "none", choice)])
    study = plan("paper")
    by_variant = {run.variant.name: run for run in study.runs({})}
    assert not any(run.candidate for run in study.runs({}))
    assert by_variant["softmax"].settings.learning_rate == 3e-3
    assert by_variant["softmax"].fields["tuned"]["tried"] == tried
    # A variant without a recorded choice has the preset's value, and its rows say so.
    assert by_variant["ssmax"].settings.learning_rate == 1e-3
    assert by_variant["ssmax"].fields["tuned"] == {"values": {}, "tried": []}
    assert plan("paper", settings={"learning_rate": 5e-3}).sweep.names == []


def test_record_writes_the_choices_of_preset_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evals.sweeps.RECORD", tmp_path / "tuned.json")
    preset = TASKS[TASK].presets["quick"]
    small = replace(preset.settings, steps=2, test_items=640, test_least=4)
    presets = cast("dict[str, Any]", TASKS[TASK].presets)
    monkeypatch.setitem(presets, "quick", replace(preset, settings=small))
    quick = [TASK, "--variants", "softmax", "--lengths", "16", "--workers", "0", "--seeds", "1"]
    quick += ["--record"]
    assert main([*quick, "--out", str(tmp_path / "out")]) == 0
    ((variant, encodings),) = json.loads((tmp_path / "tuned.json").read_text())[TASK].items()
    (row, *_) = [row for row in stored(tmp_path / "out") if "split" not in row]
    assert (variant, encodings) == ("softmax", {"none": row["tuned"]})
    for more, message in (
        (["--sweep", "none"], "needs a sweep"),
        (["--preset", "smoke"], "needs"),
        (["--set", "width=16"], "needs the settings of preset quick, .* got another width"),
    ):
        assert main([*quick, *more]) == 2
        assert re.search(f"--record {message}", capsys.readouterr().err)
    assert main([TASK, "--seeds", "1001", "--dry-run"]) == 2
    assert "--seeds must be at most 1000 with a sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sweeps", "message"),
    [
        (["steps=1,2"], "--sweep must tune learning_rate, weight_decay, warmup, curriculum, got"),
        (["learning_rate=1"], "--sweep must give learning_rate two or more different numbers, got"),
        (["learning_rate=1,1"], "must give learning_rate two or more different numbers"),
        (["learning_rate=abc"], "--sweep must have numbers as values of learning_rate, got 'abc'"),
        (["learning_rate"], "--sweep must be NAME=V,V,…, none or recorded, got 'learning_rate'"),
        (["learning_rate=0,1"], "learning_rate must be finite and > 0"),
        (
            ["learning_rate=1,2", "learning_rate=3,4"],
            "--sweep must name a setting once",
        ),
        (["none", "learning_rate=1,2"], "none must be the only --sweep"),
    ],
)
def test_wrong_sweeps_are_one_line_errors(
    sweeps: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for text in sweeps for part in ("--sweep", text)]
    assert main([TASK, "--preset", "smoke", *options]) == 2
    assert re.search(rf"^error: .*{re.escape(message)}.*\n\Z", capsys.readouterr().err)


def test_a_setting_is_either_given_or_tuned(tmp_path: Path) -> None:
    fixed = {"learning_rate": 2e-3}
    assert plan(settings=fixed).sweep.grid == {}  # --set wins over the preset's sweep
    with pytest.raises(UsageError, match="must not name the same setting, got learning_rate"):
        plan(settings=fixed, sweep=RATES)
    assert plan(sweep="none").sweep == Sweep()
    config = tmp_path / "run.toml"
    config.write_text("[max-retrieval.sweep]\nwarmup = [0.1, 0.5]\n")
    options = ["--config", str(config), "--dry-run", "--variants", "softmax", "--seeds", "1"]
    assert main([TASK, "--preset", "smoke", *options, "--steps", "2"]) == 0


def test_only_after_a_sweep_a_variant_is_called_not_trained() -> None:
    def rows(*variants: str, **fields: object) -> list[Row]:
        return [row(variant, 0.5, **fields) for variant in variants]  # type: ignore[arg-type]

    (plain,) = groups(rows("softmax", "ssmax"))
    assert notes(summary_of(plain))[0].endswith("with these settings, not tuned")
    assert settings_table(plain) is None
    fields = {
        "settings": {**SETTINGS, "learning_rate": 1e-3},
        "shared": {"learning_rate": TUNED},
        "tuned": {
            "values": {"learning_rate": 1e-3},
            "tried": [
                {"values": {"learning_rate": 3e-4}, "scores": [0.2, 0.4]},
                {"values": {"learning_rate": 1e-3}, "scores": [0.5, 0.7]},
                {"values": {"learning_rate": 3e-3}, "scores": [0.5, None]},
            ],
        },
    }
    result_rows = rows("softmax", "ssmax", **fields)
    assert notes(summary_of(groups(result_rows)[0]))[0].endswith(
        ", with the best values of a sweep"
    )
    result_rows[1]["tuned"] = {"values": {}, "tried": []}
    (group,) = groups(result_rows)
    assert notes(summary_of(group))[0].endswith("best values of a sweep")
    assert (
        notes(summary_of(group))[1] == "Trained with the settings of the preset, not tuned: ssmax"
    )
    table = settings_table(group)
    assert table is not None
    assert table.header[3:] == [f"learning_rate {x}" for x in (0.0003, 0.001, 0.003)]
    assert table.rows == [
        ["softmax", "—", "learning_rate 0.001", "30.0", "60.0", "—"],
        ["ssmax", "—", "not tuned", "—", "—", "—"],
    ]
    assert group.tuned(Series("softmax")) == fields["tuned"]


def test_settings_that_papers_require_are_the_variants_own() -> None:
    options = {
        "variants": ["softmax", "sigmoid", "taylor"],
        "positions": ["rope"],
        "lengths": [512],
    }
    study = plan_study(TASKS["flip-flop"], Options(preset="paper", seeds=1, **options), {})  # type: ignore[arg-type]
    by_variant = {run.variant.name: run for run in study.runs({})}
    outcome = Outcome("nan")
    groups_of = {
        name: study.row(run, next(iter(run.tests[512])), 512, outcome, NOT_TRAINED)["group"]
        for name, run in by_variant.items()
    }
    assert "qk_norm" not in by_variant["softmax"].settings.identity()
    assert groups_of["softmax"] == groups_of["taylor"]
    assert "qk_dim" not in groups_of["taylor"]
    assert by_variant["sigmoid"].settings.identity()["qk_norm"] is True
    assert by_variant["sigmoid"].settings.layer_scale == 1e-4
    assert by_variant["taylor"].settings.qk_dim == 16
    off = Options(preset="paper", settings={"qk_dim": 0, "layer_scale": 0.0}, **options)  # type: ignore[arg-type]
    assert plan_study(TASKS["flip-flop"], off, {}).variant_settings == {
        "sigmoid": {"qk_norm": True}
    }


@pytest.mark.parametrize("option", ["steps", "output"])
def test_an_option_for_a_setting_replaces_what_variants_have_of_their_own(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS["copy"]
    variant_settings = {"sigmoid": {"steps": 7, "output": "sparsemax", "qk_norm": True}}
    presets = cast("dict[str, Any]", task.presets)
    monkeypatch.setitem(
        presets, "smoke", replace(task.presets["smoke"], variant_settings=variant_settings)
    )
    replaced = {"steps": 5} if option == "steps" else {"output": "entmax"}
    options = Options(preset="smoke", variants=["softmax", "sigmoid"], **replaced)  # type: ignore[arg-type]
    by_variant = {run.variant.name: run.settings for run in plan_study(task, options, {}).runs({})}
    assert getattr(by_variant["sigmoid"], option) == getattr(by_variant["softmax"], option)
    assert by_variant["sigmoid"].qk_norm
    other = "output" if option == "steps" else "steps"
    assert getattr(by_variant["sigmoid"], other) == variant_settings["sigmoid"][other]


def test_own_settings_are_in_one_table_and_shown() -> None:
    settings = {**SETTINGS, "qk_dim": 16}
    rows = [row("softmax", 0.5), row("taylor", 0.5, settings=settings, shared={"qk_dim": None})]
    (group,) = groups(rows)
    assert "qk_dim" not in group.settings
    table = settings_table(group)
    assert table is not None
    assert table.rows == [["softmax", "—", "not tuned"], ["taylor", "qk_dim 16", "not tuned"]]
