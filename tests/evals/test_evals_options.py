"""Options are read from files, the command line and launchers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commandline.errors import UsageError
from evals.__main__ import main, parser
from evals.options import Options, gather
from evals.plan import plan_study
from evals.tasks import TASKS

CONFIG = """
preset = "smoke"
seeds = 2
variants = ["softmax", "ssmax(s=1)"]
[settings]
width = 32
[mqar]
lengths = [64, 128]
[mqar.settings]
density = 8
"""


def test_help_has_one_line_per_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no help text is wrapped at a hyphen
    text = " ".join(parser().format_help().split())
    assert "flip-flop Flip-flop language modelling copy Read symbols" in text
    for action in parser().commands.values():
        for line in action.format_help().splitlines():
            if match := re.match(r"  (--\S+ .*|--\S+) {2,}(\S.*)", line):
                assert match[2][0].isupper(), line  # help begins with a capitalized verb
    for name, task in TASKS.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert " ".join(task.about.split()) in " ".join(capsys.readouterr().out.split())


def gathered(tmp_path: Path, text: str, *line: str, task: str = "mqar") -> Options:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return gather(parser().parse_args([task, "--config", str(file), *line]), [task])[task]


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    options = gathered(tmp_path, CONFIG, "--seeds", "1", "--set", "width=48", "--set", "steps=9")
    assert (options.preset, options.seeds, options.lengths) == ("smoke", 1, [64, 128])
    assert options.settings == {"width": 48, "density": 8, "steps": 9}
    settings = plan_study(TASKS["mqar"], options, {}).settings
    assert (settings.width, settings.steps, settings.batch) == (48, 9, 16)
    assert gathered(tmp_path, CONFIG, task="copy").lengths is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("presett = 'smoke'", "unknown key 'presett'; did you mean 'preset'"),
        ("[mqar]\nout = 'x'", r"\[mqar\] unknown key 'out'"),
        ("[nosuch]\nseeds = 1", r"unknown task \[nosuch\]; known: max-retrieval"),
        ("mqar = 3", "mqar must be a table, got 3"),
        ("seeds = 'two'", "seeds must be an int, got 'two'"),
        ("seeds = true", "seeds must be an int, got True"),
        ("out = 3", "out must be a path, got 3"),
        ("lengths = ['a']", "lengths entries must be an int, got 'a'"),
        ("lengths = 16", "lengths must be a list, got 16"),
        ("lengths = '16'", "lengths must be a list, got '16'"),
        ("settings = 3", "settings must be a table, got 3"),
        ("dry_run = 1", "dry_run must be true or false, got 1"),
        ("shard = '3/2'", "shard must be I/N with 0 <= I < N, or env, got '3/2'"),
        ("seeds = ", "Invalid value"),
        ("[settings]\nwidht = 3", "mqar has no setting 'widht'; did you mean 'width'"),
        ("[settings]\nwidth = 3.5", "setting width must be of type int, got 3.5"),
        ("[settings]\nwidth = 0", "setting width must be >= 1"),
        ("[settings]\ncurriculum = 2", "curriculum must be in"),
        ("[settings]\ntrain_stride = 7", "train_stride must divide"),
        ("preset = 'huge'", "preset must be 'smoke', 'quick', 'paper' or 'gpu', got 'huge'"),
        ("log = ['paper']", "log entries must be 'tensorboard' or 'wandb', got 'paper'"),
        ("lengths = [65]", "multiple of density = 4"),
        ("positions = ['up']", "--positions of mqar must be none, rope"),
        ("positions = []", "positions must be a non-empty list, got \\[\\]"),
        ("positions = ['rope', 'rope']", "positions must not repeat an entry, got rope twice"),
        ("shard = '²/3'", "shard must be I/N"),
        ("[needle.settings]\nfoo = 1", "needle has no setting 'foo'"),
        ("[settings]\nwidth = 3", "settings: embed_dim=3 is not a multiple of num_heads=2"),
        ("[settings]\nlearning_rate = nan", "learning_rate must be finite and > 0, got nan"),
        ("[settings]\nwarmup = 2", "warmup must be in"),
        ("[settings]\nbatch = 10000000000000000", "setting batch must be <="),
        ("lengths = [1000000000000]", "lengths entries must be <= 4194304, got 10"),
    ],
)
def test_a_wrong_option_in_a_file_is_a_one_line_error(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text(text if "preset" in text else f"preset = 'smoke'\n{text}")
    assert main(["mqar", "--config", str(file), "--out", str(out)]) == 2
    assert re.search(rf"^error: .*{message}.*\n\Z", capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--set", "width=16", "--set", "width=32"), "--set must name a setting once, got width"),
        (("--steps", "3", "--set", "steps=5"), "steps must be given once, got --steps 3 and --set"),
        (
            ("--output", "entmax", "--set", "output=sparsemax"),
            "output must be given once, got --output entmax and --set output=sparsemax",
        ),
        (("--device", "cpu:1", "--dry-run"), "--device must be cpu, cuda or cuda:N, got 'cpu:1'"),
    ],
)
def test_values_that_would_be_ignored_are_one_line_errors(
    line: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["mqar", "--preset", "smoke", "--out", str(out), *line]) == 2
    assert re.search(rf"^error: {message}.*\n\Z", capsys.readouterr().err)
    assert not out.exists()


def test_command_all_passes_each_task_the_options_that_it_supports() -> None:
    line = ["all", "--positions", "rope,none", "--set", "heads=4", "--set", "steps=9"]
    options = gather(
        parser().parse_args([*line, "--lengths", "64"]), ["needle", "mqar", "continual"]
    )
    assert (options["needle"].positions, options["needle"].settings) == (None, {"steps": 9})
    assert options["mqar"].positions == ["rope", "none"]
    assert options["mqar"].settings == {"heads": 4, "steps": 9}
    assert (options["mqar"].lengths, options["continual"].lengths) == ([64], None)
    assert (options["continual"].positions, options["continual"].settings) == (None, {"steps": 9})
    with pytest.raises(UsageError, match="no task has a setting 'head'"):
        gather(parser().parse_args(["all", "--set", "head=4"]), ["needle", "mqar"])


def test_a_shard_comes_from_the_command_line_or_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shard(text: str) -> tuple[int, int]:
        line = parser().parse_args(["copy", "--shard", text])
        parsed = gather(line, ["copy"])["copy"].shard
        return parsed.index, parsed.count

    for name in (
        "RANK",
        "WORLD_SIZE",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        "LOCAL_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    assert shard("1/3") == (1, 3)
    for wrong in ("3/3", "1", "-1/2", "a/b", "env"):
        with pytest.raises((UsageError, SystemExit)):
            shard(wrong)
    for name, value in (("ID", "9"), ("COUNT", "4"), ("MIN", "3"), ("STEP", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert shard("env") == (3, 4)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert shard("env") == (0, 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    line = ["copy", "--shard", "env", "--device", "cuda"]
    options = gather(parser().parse_args(line), ["copy"])["copy"]
    assert (options.device, options.workers) == ("cuda:3", 1)
    options = gather(parser().parse_args([*line[:3], "--workers", "5"]), ["copy"])["copy"]
    assert (options.device, options.workers) == ("cpu", 5)
