"""Study plans: variant specs, invalid options, run keys, shards, result files, progress."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.variants import complete, parse_spec, parse_specs, split_list
from evals.__main__ import main
from evals.measures.metrics import Outcome
from evals.options import Options
from evals.plan import plan_study
from evals.progress import Progress, clock
from evals.reporting.plots import length_axis, name_lines
from evals.reporting.tables import notes
from evals.results.store import Folder, RowFile, Shard
from evals.results.summary import groups
from evals.results.summary_csv import summary_of
from evals.run import NOT_TRAINED
from evals.study import Study
from evals.tasks import TASKS
from evals.tasks.families.retrieval import RetrievalSettings
from helpers.evals_rows import row

TASK = TASKS["max-retrieval"]


def study(*specs: str, **settings: object) -> Study:
    chosen = RetrievalSettings(**{"steps": 3000, **settings})  # type: ignore[arg-type]
    return Study(TASK, tuple(parse_specs(list(specs))), ("none",), 1, (16,), chosen)


def key(of: Study, seed: int = 0, length: int = 16, positions: str = "none") -> str:
    one = replace(of, specs=of.specs[:1], positions=(positions,), seeds=seed + 1, xs=(length,))
    return one.runs({})[-1].keys[0]


def training_key(of: Study) -> str:
    return of.runs({})[0].training_key


@pytest.mark.parametrize(
    ("text", "train", "test", "params", "canonical"),
    [
        ("softmax", "softmax", "softmax", {}, "softmax"),
        ("ssmax( s = .5,b=-1)", "ssmax", "ssmax", {"s": 0.5, "b": -1}, "ssmax(b=-1, s=0.5)"),
        (" softmax -> log_n(train_length=16)", "softmax", "log_n", {"train_length": 16},
         "softmax->log_n(train_length=16)"),
        ("a->b(x=True,y=None,z='w')", "a", "b", {"x": True, "y": None, "z": "w"},
         "a->b(x=True, y=None, z='w')"),
        ("softmax->softmax", "softmax", "softmax", {}, "softmax"),
    ],
)  # fmt: skip
def test_specs_are_parsed(text: str, train: str, test: str, params: dict, canonical: str) -> None:
    spec = parse_spec(text)
    assert (spec.train.name, spec.test.name, spec.test.params) == (train, test, params)
    assert str(spec) == canonical
    assert parse_spec(str(spec)) == spec
    assert spec.is_substitution == ("->" in canonical)


def test_split_list_ignores_commas_in_parentheses() -> None:
    assert split_list("a, b(x=1,y=2),c->d(z=3)") == ["a", "b(x=1,y=2)", "c->d(z=3)"]


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a->", "->a", "a->b->c", "a(1)", "a(x)", "a(x=1", "a(**x)", "a(x=[1])", "a.b", "3",
     "a(x=open('f'))", "a()()", "a(x=1, x=2)"],
)  # fmt: skip
def test_malformed_specs_raise(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read variant"):
        parse_spec(text)


WRONG = {
    "unknown variant": (["--variants", "nosuch"], "unknown variant 'nosuch'; known: .*softmax"),
    "misspelled variant": (
        ["--variants", "softmx"],
        r"unknown variant 'softmx'; did you mean 'softmax'\? --plugin FILE.py loads",
    ),
    "unknown substitute": (["--variants", "softmax->nosuch"], "unknown variant 'nosuch'"),
    "unknown parameter": (["--variants", "ssmax(t=1)"], "no parameter 't'; it has: s, b"),
    "bad value": (["--variants", "entmax(alpha=9)"], "alpha must be"),
    "scale": (["--set", "scale=cube"], "scale must be 'sqrt' or 'none', got 'cube'"),
    "setting": (["--set", "scala=none"], "retrieval has no setting 'scala'; did you mean 'scale'"),
    "positions": (["--positions", "rope"], "--positions of max-retrieval must be none, got rope"),
    "config": (["--config", "no/such.toml"], "--config no/such.toml: No such file"),
    "too short": (["--variants", "cosformer(max_length=32)", "--lengths", "64"], "max_length"),
    "twice": (["--variants", "softmax,softmax"], "must not repeat an entry, got softmax twice"),
    "twice with the default": (
        ["--variants", "topk,topk(top_k=8)"],
        "--variants must not repeat an entry, got topk.* twice",
    ),
    "invalid value": (["--variants", "ssmax(s={[]: 1})"], "cannot read variant"),
    "log": (
        ["--log", "paper", "--dry-run"],
        "--log entries must be 'tensorboard' or 'wandb', got 'paper'",
    ),
    "out": (["--out", "/proc/nosuch"], "/proc/nosuch"),
    "empty variant": (["--variants", "softmax,,ssmax"], "cannot read variant ''"),
    "seeds": (["--seeds", "0"], "--seeds must be >= 1, got '0'"),
    "steps": (["--steps", "0"], "--steps must be >= 1, got '0'"),
    "workers": (["--workers", "-1"], "--workers must be >= 0, got '-1'"),
    "length": (["--lengths", "16,1"], "--lengths entries must be >= 2, got '1'"),
    "lengths twice": (["--lengths", "16,16"], "twice"),
    "device": (["--device", "abacus"], "--device must be cpu, cuda or cuda:N"),
    "no such GPU": (["--device", "cuda:99"], "got 'cuda:99'; torch finds"),
    "preset": (
        ["--preset", "smok"],
        "--preset must be 'smoke', 'quick', 'paper' or 'gpu', got 'smok'",
    ),
    "lengths": (["--lengths", "many"], "--lengths entries must be an int, got 'many'"),
    "set": (["--set", "cube"], "--set must be NAME=VALUE, got 'cube'"),
    "no int": (["--seeds", "x"], "--seeds must be an int, got 'x'"),
    "no plugin": (["--plugin", "no/such/file.py"], "--plugin must be a Python file"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_one_line_errors_and_write_nothing(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["max-retrieval", "--preset", "smoke", "--out", str(out), *options]) == 2
    shown = capsys.readouterr()
    assert re.search(rf"^error: .*{message}.*\n\Z", shown.err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["max-retrieval", "--sed", "1"], "unknown argument '--sed'; did you mean '--seeds'?"),
        (["max-retrieval", "--seeds"], "--seeds: expected one argument"),
        (["ranks", "--seed", str(2**64)], "--seed must be an int from 0 to 4294967295"),
    ],
)
def test_unreadable_arguments_end_with_a_hint_to_the_help(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {message}")
    assert second == f"For help: python -m evals {line[0]} --help"


def test_an_unknown_command_names_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["max-retreival"])
    assert "did you mean 'max-retrieval'?" in capsys.readouterr().err


def test_a_key_depends_on_everything_that_scores_depend_on() -> None:
    base = study("softmax")
    substitute = study("softmax->adaptive_temperature")
    keys = {
        key(base),
        key(base, seed=1),
        key(base, length=32),
        key(base, positions="rope"),
        key(substitute),
        key(study("softmax", steps=7)),
        key(study("softmax", scale="none")),
        key(study("softmax", test_sequences=9)),
        key(replace(base, device="cuda:1")),
        key(replace(base, plugins={"softmax": "f00"})),
        key(replace(base, task=TASKS["needle"])),
    }
    assert len(keys) == 11
    assert training_key(base) == training_key(substitute)
    assert training_key(base) == training_key(study("softmax", test_sequences=9))
    # More seeds, lengths or variants do not change the keys of other runs.
    wider = replace(base, specs=(*base.specs, *substitute.specs), seeds=5, xs=(16, 99))
    assert key(wider) == key(base)


def test_shards_partition_the_runs() -> None:
    planned = replace(study("softmax", "ssmax", "softmax->log_n(train_length=16)"), seeds=3)
    parts = [planned.runs({}, Shard(index, 4)) for index in range(4)]
    training_keys = [run.training_key for run in planned.runs({})]
    assert len(training_keys) == 6  # softmax->log_n uses the models of softmax
    assert sorted(run.training_key for part in parts for run in part) == sorted(training_keys)
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    # Finishing a run does not move other runs to another shard.
    done = {key: {} for key in parts[0][0].keys}
    assert [j.training_key for j in planned.runs(done, Shard(1, 4))] == [
        j.training_key for j in parts[1]
    ]


def test_the_train_length_and_required_parameters_are_added() -> None:
    options = Options(preset="smoke", lengths=[64], variants=["cosformer", "topk", "topk(top_k=3)"])
    planned = plan_study(TASK, options, {})
    assert planned.xs == (16, 64)
    names = [str(spec) for spec in planned.specs]
    assert names == ["cosformer(max_length=16384)", "topk(top_k=8)", "topk(top_k=3)"]
    # `complete` accepts unknown variants, because plan_study raises an error for them.
    assert complete(parse_spec("nosuch").train, 9).name == "nosuch"


@pytest.mark.parametrize(
    ("name", "preset"),
    [pytest.param(name, preset, marks=[pytest.mark.slow] * (preset == "paper"))
     for name, task in TASKS.items() for preset in task.presets],
)  # fmt: skip
def test_every_preset_can_be_planned(name: str, preset: str) -> None:
    planned = plan_study(TASKS[name], Options(preset=preset), {})
    assert planned.settings.train_longest in planned.xs
    once = preset == "smoke" or name == "language-model"  # hours per training
    assert planned.seeds == 1 if once else planned.seeds >= 5
    assert bool(planned.sweep.grid) == (preset == "quick" and not once)
    assert (planned.sweep.recorded is not None) == (preset == "paper")
    keys = [key for run in planned.runs({}) for key in run.keys]
    assert len(set(keys)) == len(keys)
    assert {reason for reason in planned.left_out.values() if "alibi" not in reason} == set()


def test_unsupported_position_encodings_are_left_out_or_raise() -> None:
    encodings = ["rope", "alibi"]
    options = Options(preset="smoke", variants=["softmax", "cosformer"], positions=encodings)
    planned = plan_study(TASKS["mqar"], options, {})
    assert [(str(s), p) for s, p in planned.left_out] == [("cosformer(max_length=4096)", "alibi")]
    assert sum(len(run.keys) for run in planned.runs({})) == 3 * len(planned.xs)
    with pytest.raises(UsageError, match="cosformer.*alibi"):
        plan_study(TASKS["mqar"], options.model_copy(update={"positions": ["alibi"]}), {})


def test_keys_do_not_change_between_versions() -> None:
    """Otherwise published results would be computed again. These keys are those of version 0.1."""
    options = Options(
        preset="smoke",
        variants=["softmax", "softmax->log_n(train_length=16)"],
        positions=["rope", "alibi"],
        lengths=[64],
    )
    assert [key for run in plan_study(TASKS["copy"], options, {}).runs({}) for key in run.keys] == [
        "d144d37704699a45ab57", "34a2a7afcc2462ce03fc", "9d3996bc19bacc01c621",
        "36eb3bd4d95ed7af146d", "08e331b85ca0276029bb", "ab4d888c1ed8ff68c016",
        "3a06cefefd7a56030833", "ba528b55155033deab83",
    ]  # fmt: skip
    options = Options(preset="smoke", variants=["ssmax"], lengths=[64])
    (run,) = plan_study(TASK, options, {}).runs({})
    assert run.keys == ["c65308865fb36c69ea71", "a254557ddbf658ae8ec2"]


def test_scaled_rope_has_rows_of_its_own_and_no_training() -> None:
    encodings = ["rope->yarn", "rope", "rope->ntk", "alibi"]
    variants = ["softmax", "softmax->adaptive_temperature"]
    options = Options(preset="smoke", variants=variants, positions=encodings)
    task, keys = TASKS["copy"], {}
    for chosen in (encodings, ["rope", "alibi"], ["rope->yarn"]):
        planned = plan_study(task, options.model_copy(update={"positions": chosen}), {})
        runs = planned.runs({})
        keys[len(chosen)] = {key for run in runs for key in run.keys}
        assert {run.positions for run in runs} == {x.split("->")[0] for x in chosen}
        assert len(runs) == len({run.training_key for run in runs}) == min(len(chosen), 2)
        assert len(keys[len(chosen)]) == len(chosen) * len(variants) * len(planned.xs)
    assert keys[2] | keys[1] < keys[4]
    planned = plan_study(task, options, {})
    rows = [
        planned.row(run, key, x, Outcome("ok", "", {"accuracy": 0.5}), NOT_TRAINED)
        for run in planned.runs({}) for x, tests in run.tests.items() for key in tests
    ]  # fmt: skip
    ordered = planned.rows({row["key"]: row for row in rows})
    assert list(dict.fromkeys(row["series"]["positions"] for row in ordered)) == encodings
    assert len({(row["variant"], row["series"]["positions"], row["x"]) for row in rows}) == len(
        rows
    )
    (group,) = groups(rows)
    text = "rope->b: trained with rope, which b scales at lengths above the train length"
    assert text in notes(summary_of(group))
    (unscaled,) = groups([row for row in rows if "->" not in row["series"]["positions"]])
    assert text not in notes(summary_of(unscaled))


def test_the_factor_of_scaled_rope_is_the_number_of_tokens_by_that_in_training() -> None:
    planned = plan_study(TASKS["copy"], Options(preset="smoke", positions=["rope->yarn"]), {})
    trained, tokens = (TASKS["copy"].tokens(n) for n in (planned.settings.train_longest, 64))
    assert planned.rope_scaling("rope", 64) is None
    assert planned.rope_scaling("rope->linear", 64) == {
        "rope_type": "linear", "factor": tokens / trained
    }  # fmt: skip
    assert planned.rope_scaling("p-rope->yarn", 4) == {
        "rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": trained
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "positions", "message"),
    [
        ("copy", "rope->dynamic", "--positions of copy must be none, .*, got rope->dynamic"),
        ("copy", "alibi->yarn", "rope->yarn, p-rope->linear, .*, got alibi->yarn"),
        ("needle", "rope->yarn", "--positions of needle must be none, got rope->yarn"),
    ],
)
def test_encodings_without_scaled_rope_raise(name: str, positions: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_study(TASKS[name], Options(preset="smoke", positions=[positions]), {})


def test_a_model_must_support_the_scaling() -> None:
    options = Options(preset="smoke", positions=["rope", "rope->ntk"], settings={"qk_dim": 2})
    with pytest.raises(UsageError, match="settings: .*'ntk' needs a head dimension above 2"):
        plan_study(TASKS["copy"], options, {})


def test_test_sets_of_equal_size_share_rows_and_tables() -> None:
    first, second = study("softmax", "ssmax"), study("softmax", "ssmax", test_least=1)
    assert first.settings.sequences(16) == second.settings.sequences(16)
    row_a, row_b = (
        planned.row(run, run.keys[0], 16, Outcome("ok", "", {"accuracy": 0.5}), NOT_TRAINED)
        for planned, run in ((first, first.runs({})[0]), (second, second.runs({})[1]))
    )
    assert row_a["group"] != row_b["group"]
    assert second.rows({row_a["key"]: row_a}) == [row_a]
    assert len(groups([row_a, row_b])) == 1
    assert len(groups([row_a, row_b | {"sequences": 9}])) == 2


def test_a_folder_reads_the_files_of_all_shards(tmp_path: Path) -> None:
    for index in range(2):
        Folder(tmp_path, Shard(index, 2)).append(row("softmax", 0.5, key=f"k{index}"))
    with (tmp_path / "rows-0-of-2.jsonl").open("ab") as file:
        file.write(b'{"key": "cut')
    folder = Folder(tmp_path)
    assert (sorted(folder.by_key), folder.damaged) == (["k0", "k1"], 1)
    folder.append(row("softmax", 0.5, key="k2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows-0-of-2.jsonl", "rows-1-of-2.jsonl", "rows.jsonl"
    ]  # fmt: skip


def test_unreadable_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "rows.jsonl"
    rows = RowFile(path)
    assert not path.parent.exists()
    for key in "abc":
        rows.append(row("softmax", 0.5, key=key))
    path.write_bytes(path.read_bytes()[:-5])  # truncate the last line
    rows = RowFile(path)
    assert (sorted(rows.by_key), rows.damaged) == (["a", "b"], 1)
    rows.append(row("softmax", 0.75, key="c"))
    with path.open("ab") as file:
        file.write(b'[1\n\xff\xfe\n{"no": \n')
    rows = RowFile(path)
    assert (sorted(rows.by_key), rows.damaged) == (["a", "b", "c"], 4)
    assert rows.by_key["c"]["metrics"] == {"accuracy": 0.75}
    for metrics in ({"accuracy": float("nan")}, {"acc": 0.5}):
        with pytest.raises(UsageError, match=r"invalid result of .*, softmax: metrics.* must"):
            rows.append(row("softmax", 0.5, key="d") | {"metrics": metrics})
    assert json.loads(path.read_bytes().splitlines()[0]) == row("softmax", 0.5, key="a")


def test_write_whole_replaces_a_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_whole(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Screen(io.StringIO):
    """A text stream in memory that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_shows_a_bar_per_run_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    screen = Screen()
    bars = Progress(2, screen)
    bars.update("softmax seed 0", 0.25, "training")
    bars.update("ssmax[x] seed 0", 0.75, "n = 128")
    bars._bars.refresh()
    bars.finish("ssmax[x] seed 0")
    bars._bars.refresh()
    bars.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"━{5}\S*\s+25% \S+ +softmax seed 0: training", text)
    assert re.search(r"━{15}\S*\s+75% \S+ +ssmax\[x\] seed 0: n = 128", text)
    assert "1 of 2 runs" in text
    assert clock(3661) == "1:01:01"


def test_progress_prints_lines_without_a_terminal() -> None:
    log = io.StringIO()
    progress = Progress(4, log, verbose=True, every=0.0)
    progress.finish("softmax seed 0")
    progress.update("ssmax seed 0", 0.5, "n = 64")
    progress.close()
    finished, status = log.getvalue().splitlines()
    assert finished.startswith("[1/4] softmax seed 0: done after 0:0")
    line = r"1 of 4 runs \(38%\) in 0:\d\d, about \d:\d\d left; now ssmax seed 0: n = 64, 50%"
    assert re.fullmatch(line, status)
    quiet = io.StringIO()
    progress = Progress(4, quiet, every=0.0)
    progress.update("softmax seed 0", 0.5, "n = 64")
    progress.finish("softmax seed 0", "failed")
    progress.close()
    assert re.fullmatch(r"\[1/4\] softmax seed 0: failed after 0:\d\d\n", quiet.getvalue())


def test_curve_labels_in_a_figure_do_not_overlap() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_ylim(0, 1)
    length_axis(axes, [16, 32])
    name_lines(axes, [(f"v{i}", 0.5 + i / 1000, "black") for i in range(9)], log=False)
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert len(heights) == 9
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.045
