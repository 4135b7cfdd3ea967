"""The runner of the GPU stages loses no finding if a step hangs, crashes or loses the device."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu import checks, command, stages
from benchmarks.gpu.session import Session, Step
from benchmarks.harness import journal
from benchmarks.harness.report import CRASHED, DEVICE_LOST
from helpers.processes import output_of
from scripts.benchmark_tables import kernels_table

# A program that goes through items, and ends or hangs at some of them.
PROGRAM = f"""
import json, os, sys, time
names, file = sys.argv[sys.argv.index("--items") + 1], sys.argv[sys.argv.index("--journal") + 1]
def log(**line):
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\\n")
for name in names.split(","):
    log(begin=name)
    if name == "hang":
        time.sleep(60)
    if name == "crash":
        os.abort()
    if name == "raise":
        sys.exit({CRASHED})
    if name == "lose":
        os._exit({DEVICE_LOST})
    log(row=name)
"""


def session(tmp_path: Path, seconds: float = 60.0) -> Session:
    return Session(tmp_path, seconds, {}, tmp_path)


def step(*items: str, **limits: float) -> Step:
    program = (sys.executable, "-c", PROGRAM)
    return Step("items", program, 1, limits.pop("limit", 30), items, "--items", **limits)


def lines(session: Session) -> list[dict[str, Any]]:
    return journal.read(session.steps)


def rows(session: Session) -> list[str]:
    return [line["row"] for line in journal.read(session.journal) if "row" in line]


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["hang", "crash", "lose", "raise"])
def test_items_after_one_that_ends_the_process_are_measured(bad: str, tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    assert not stage_session.run_step(step("a", bad, "b", "c", item_limit=2))
    assert rows(stage_session) == ["a", "b", "c"]
    (failed,) = [line for line in lines(stage_session) if "failed" in line]
    assert failed["failed"] == bad
    assert [line["status"] == 0 for line in lines(stage_session) if "status" in line] == [
        False,
        True,
    ]


def test_a_step_that_ends_by_itself_is_complete(tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    assert stage_session.run_step(step("a", "b"))
    assert rows(stage_session) == ["a", "b"]
    assert len(lines(stage_session)) == 1


def test_a_process_that_exceeds_its_limit_is_stopped_with_its_children(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; pipe = open({str(pipe)!r}, 'w'); time.sleep(60)"
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(60)"
    )
    stage_session = session(tmp_path)
    assert not stage_session.run_step(
        Step("slow", (sys.executable, "-c", program), 1, 1, journaled=False)
    )
    line = lines(stage_session)[0]
    assert (line["status"], line["reason"]) == (None, "stopped after 1 s")
    wait_until(lambda: is_closed(reader))
    os.close(reader)


def test_steps_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    stage_session = session(tmp_path, seconds=1.0)
    assert not stage_session.run_step(step("a", "b"))
    (line,) = lines(stage_session)
    assert (line["left_out"], line["why"]) == ("a,b", "no time left")


def test_a_program_that_is_not_installed_is_listed(tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    assert not stage_session.run_step(Step("x", ("no-such-program",), 1, 9))
    assert "no-such-program cannot run: No such file" in lines(stage_session)[0]["reason"]


def test_a_status_that_is_not_0_is_a_problem(tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    assert not stage_session.run_step(
        Step("x", (sys.executable, "-c", "exit(2)"), 1, 9, journaled=False)
    )
    document = {"steps": lines(stage_session), "checks": [], "tests": None, "rows": []}
    assert command.problems(document) == ["step x: status 2"]


@pytest.mark.slow
def test_items_that_all_hang_do_not_use_up_the_session(tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    names = ["hang"] * 9
    step_of_one_second = Step(
        "items", (sys.executable, "-c", PROGRAM), 1, 1, (*names, "a"), "--items"
    )
    assert not stage_session.run_step(step_of_one_second)
    assert lines(stage_session)[-1]["left_out"].endswith("hang,a")
    assert len([line for line in lines(stage_session) if "failed" in line]) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_an_interrupted_runner_ends_its_step_and_writes_a_summary(
    number: int, tmp_path: Path
) -> None:
    """The step writes its process number, and would run for a minute."""
    file = tmp_path / "number"
    child = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys\n"
        "from benchmarks.__main__ import main\n"
        "from benchmarks.gpu import stages\n"
        "from benchmarks.gpu.session import Step\n"
        f"step = Step('slow', (sys.executable, '-c', {child!r}), 1, 99, journaled=False)\n"
        "stages.STAGES['contact'] = (step,)\n"
        f"main(['gpu', '--rehearse', '--out', {str(tmp_path / 'out')!r}])"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: file.exists() and file.read_text() != "")
        runner.send_signal(number)
        runner.wait(20)
    finally:
        runner.kill()
    wait_until(lambda: not alive(int(file.read_text())))
    assert "checks: 0 of 0" in (tmp_path / "out" / "summary.md").read_text()


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def is_closed(pipe: int) -> bool:
    """Whether no process has the other end open."""
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_half_written_line_of_a_journal_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    journal.append(file, {"row": 1})
    with file.open("a") as out:
        out.write('{"row": ')
    assert journal.read(file) == [{"row": 1}]
    journal.append(file, {"row": 2})
    assert journal.read(file) == [{"row": 1}, {"row": 2}]


# ---- the stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", stages.STAGES)
def test_steps_are_named_once_and_expect_less_than_their_limit(stage: str) -> None:
    steps = stages.STAGES[stage]
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.expected < step.limit for step in steps)


def test_contact_checks_and_tests_before_it_times() -> None:
    assert stages.CONTACT[:2] == (stages.SMOKE, stages.TESTS)
    assert stages.seconds("contact") < 345


@pytest.mark.parametrize("stage", stages.STAGES)
def test_commands_of_the_stages_are_accepted(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command gets as far as to ask for a GPU, or to print its help."""
    for each in stages.STAGES[stage]:
        if "benchmarks" not in each.command or "gpu" in each.command:
            continue
        words = [*each.command[each.command.index("benchmarks") + 1 :]]
        words += [each.option, ",".join(each.items)] if each.items else []
        with pytest.raises(SystemExit) as ended:
            main([*words, "--journal", "x", "--help"])
        assert ended.value.code == 0, words
    capsys.readouterr()


def test_names_of_checks_are_unique_and_sanitized_ones_exist() -> None:
    assert len(set(checks.NAMES)) == len(checks.NAMES)
    assert {*stages.SANITIZED.split(","), *stages.KERNELS.values()} <= set(checks.NAMES)


def test_backends_support_the_calls_of_all_checks() -> None:
    """In a process of its own, with a stand-in for the driver."""
    pytest.importorskip("triton")
    code = (
        "import attnzoo\n"
        "from benchmarks.gpu.checks import AGREEMENTS\n"
        "from benchmarks.kernels.stand_in import install\n"
        "install()\n"
        "for name, check in AGREEMENTS.items():\n"
        "    (q, k, v), options = check.inputs('cpu')\n"
        "    q, k, v = (x.requires_grad_(check.gradients) for x in (q, k, v))\n"
        "    plan = attnzoo.explain(q, k, v, check.variant, backend=check.backend,\n"
        "                           enable_gqa=True, **options)\n"
        "    assert plan.chosen == check.backend or check.backend == 'sdpa', (name, str(plan))\n"
    )
    assert output_of(code) == ""


def test_a_folder_with_another_run_and_a_cache_that_is_no_archive_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text("")
    assert main(["gpu", "--rehearse", "--out", str(tmp_path)]) == 2
    assert "--out must have no files of another run" in capsys.readouterr().err
    command = ["gpu", "--rehearse", "--out", str(tmp_path / "new"), "--cache"]
    assert main([*command, str(tmp_path / "log.txt")]) == 2
    assert "--cache must be a file of `benchmarks pack`" in capsys.readouterr().err


def test_checks_on_a_cpu_need_the_interpreter_and_a_check_that_runs_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["check", "--device", "cpu"]) == 2
    assert "requires TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["check", "--device", "cpu", "--only", "full,host"]) == 2
    assert capsys.readouterr().err.endswith("here, got host\n")


def test_a_bad_only_names_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--out", str(tmp_path / "x"), "--rehearse", "--only", "nothing"]) == 2
    assert "--only must be part of the name of a step (checks, tests" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "nowhere"], "gpu (without --rehearse) requires a CUDA device"),
        (["--out", "README.md"], "--out must be a folder, got 'README.md'"),
        (["--out", "nowhere", "--cache", "none.tar.xz"], "--cache must be a file, got 'none.tar"),
    ],
)
def test_usage_errors_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu", *options]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not Path("nowhere").exists()


# ---- the files ----------------------------------------------------------------------------------


def test_measured_tiles_are_written_to_the_folder_of_the_run(tmp_path: Path) -> None:
    """Later stages then have the tiles that other runs have, too."""
    args = argparse.Namespace(stage="tune", out=tmp_path, only="forward", rehearse=False)
    _, *steps = command.chosen_steps(args)
    assert len(steps) == 2
    for step in steps:
        assert step.command[-2:] == ("--output", str(tmp_path / "tiles.json"))
        assert "cuda" in step.command


@pytest.mark.slow
def test_a_rehearsal_writes_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checks and two timings run on the CPU, though a step between them hangs, and one dies."""
    pytest.importorskip("triton")
    hanging = Step("hanging", (sys.executable, "-c", "import time; time.sleep(60)"), 1, 2)
    dying = Step("dying", (sys.executable, "-c", "import os; os.abort()"), 1, 9)
    chosen = [stages.SMOKE, hanging, dying, *stages.CONTACT[2:4]]
    monkeypatch.setitem(stages.STAGES, "contact", tuple(chosen))
    monkeypatch.setattr(stages, "INTERPRETED", ("fp32-forward", "decode-ssmax"))
    status = main(["gpu", "--rehearse", "--out", str(tmp_path), "--commit", "0123"])
    assert status == 1  # a step did not end
    (file,) = tmp_path.glob("*-0123-contact.json")
    document = json.loads(file.read_text())
    assert [(check["name"], check["ok"]) for check in document["checks"]] == [
        ("fp32-forward", True), ("decode-ssmax", True),
    ]  # fmt: skip
    assert {row["suite"] for row in document["rows"]} == {"attention", "decode"}
    assert all(row["seconds"]["median"] > 0 for row in document["rows"])
    assert document["environment"]["commit"] == "0123"
    assert [x["status"] for x in document["steps"] if "status" in x] == [0, None, -6, 0, 0]
    summary = (tmp_path / "summary.md").read_text()
    assert "checks: 2 of 2 passed" in summary
    assert "stopped after 2 s" in summary
    assert "TFLOP/s, causal, float32, N = 64" in kernels_table(tmp_path, (16,))
    capsys.readouterr()


def test_failures_of_checks_tests_and_rows_are_problems(tmp_path: Path) -> None:
    stage_session = session(tmp_path)
    bad = {"name": "full", "ok": False, "figures": {"dq": 3.0}}
    row = {"name": "sigmoid", "length": 64, "check": {"ok": False}}
    journal.append(stage_session.journal, {"environment": {"device": None, "date": "2026-01-31"}})
    journal.append(stage_session.journal, {"check": bad})
    journal.append(stage_session.journal, {"row": row})
    journal.append(tmp_path / "tests.jsonl", {"test": "a::b", "outcome": "failed", "seconds": 1})
    args = command.argparse.Namespace(
        stage="contact", seconds=1.0, rehearse=False, commit="x", out=tmp_path
    )
    document = command.merged(args, stage_session)
    assert document["tests"]["summary"] == "0 passed, 1 failed, 0 skipped"
    assert command.problems(document) == [
        "check full: {'dq': 3.0}", "test a::b", "row sigmoid, N = 64: error budget exceeded",
    ]  # fmt: skip


def test_check_reports_an_error_as_a_failed_check(tmp_path: Path) -> None:
    def fail(device: str) -> Any:
        raise RuntimeError("no kernel\nand more")

    (result,) = checks.checked({"full": fail}, "cpu", tmp_path / "journal")
    assert (result["ok"], result["error"]) == (False, "RuntimeError: no kernel")
    assert [*journal.read(tmp_path / "journal")[0]] == ["begin"]
