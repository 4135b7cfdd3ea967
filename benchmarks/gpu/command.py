"""Run a stage on a GPU machine: checks, tests and timings, each in its own process.

A step that hangs, crashes or loses the device costs its own time only. Every finding is written at
once, so a run that is stopped keeps what it measured.

Files in DIR: DEVICE-DATE-COMMIT-STAGE.json has everything and is what `make tables` reads, so
commit it to benchmarks/results; summary.md is a page to read; steps.jsonl, journal.jsonl and
tests.jsonl hold the findings as they came, log.txt all output, clocks.csv the clocks and the power.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import pack, stages
from benchmarks.gpu.session import Session, Step
from benchmarks.harness import journal
from benchmarks.harness.options import positive, require_cuda
from commandline.errors import UsageError
from commandline.files import check_folder, check_writable, write_whole

OUTCOMES = "ATTNZOO_GPU_OUTCOMES"  # environment variable, see tests/gpu/conftest.py
TEST_LIMIT = 60  # seconds for one test, if pytest-timeout is installed
CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"
COMPILE_LIMIT = 100.0  # seconds for all kernels of a stage, on 16 cores


def add_parser(commands: argparse._SubParsersAction) -> None:
    expected = "\n".join(
        f"  {name:<8} about {stages.seconds(name):.0f} s: {text}"
        for name, text in stages.WHAT.items()
    )
    parser = commands.add_parser(
        "gpu", help="Run checks, tests and timings on a GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{__doc__}\nStages, with estimates for an H100 and compiled kernels:\n"
        f"{expected}\n",
    )  # fmt: skip
    add = parser.add_argument
    add("--stage", choices=[*stages.STAGES], default="contact",
        help="Run this stage (default: contact)")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="Write the files to DIR")
    add("--seconds", type=positive(float), default=345.0, metavar="S",
        help="End after S seconds; steps that do not fit are left out (default: 345)")  # fmt: skip
    add("--cache", type=Path, metavar="FILE", help="Compiled kernels, from `benchmarks pack`")
    add("--only", metavar="TEXT", help="Run only the steps whose name contains TEXT")
    add("--commit", help="Record this commit (needed in a copy without .git)")
    add("--rehearse", action="store_true",
        help="Run the stage on a CPU, with small inputs and in Triton's interpreter")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_folder("--out", args.out)
    if args.cache is not None and not args.cache.is_file():
        raise UsageError(f"--cache must be a file, got {str(args.cache)!r}")
    if not args.rehearse:
        require_cuda("gpu (without --rehearse)")
    steps = chosen_steps(args)
    if (args.out / "log.txt").exists():
        raise UsageError(f"--out must have no files of another run, got {str(args.out)!r}")
    check_writable("--out", args.out)
    session = Session(args.out, args.seconds, environment(args.rehearse), pack.ROOT)
    if args.cache is not None:
        start = time.monotonic()
        pack.unpack(args.cache)
        session.record(step="unpack", seconds=round(time.monotonic() - start, 1))
    # Without this, a process that is told to end would leave a step running on the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with clocks(args.out / "clocks.csv"):
            for step in steps:
                session.run_step(step)
                write(args, session)
    finally:
        document = write(args, session)
    print((args.out / "summary.md").read_text())
    return 1 if problems(document) else 0


def chosen_steps(args: argparse.Namespace) -> list[Step]:
    """The steps to run. On a GPU, kernels that the cache lacks are compiled first."""
    steps = [with_files(step, args.out) for step in stages.STAGES[args.stage]]
    if args.only is not None:
        steps = [step for step in steps if args.only in step.name]
    if not steps:
        names = ", ".join(step.name for step in stages.STAGES[args.stage])
        raise UsageError(f"--only must be part of the name of a step ({names}), got {args.only!r}")
    if args.rehearse:
        return [stages.rehearsed(step) for step in steps]
    # Without those of the tests, because the workers of the tests compile them as fast.
    command = (*stages.BENCHMARKS, "pack", "--stage", args.stage, "--skip-tests")
    return [Step("compile", command, 5, COMPILE_LIMIT, journaled=False), *steps]


def with_files(step: Step, out: Path) -> Step:
    """The step of the tests, which write their outcomes at once, or of tiles, with their file."""
    if step in stages.TUNE:
        return replace(
            step, command=(*step.command, "--output", str((out / "tiles.json").resolve()))
        )
    if step is not stages.TESTS:
        return step
    command = step.command
    if importlib.util.find_spec("pytest_timeout") is not None:
        command = (*command, f"--timeout={TEST_LIMIT}", "--timeout-method=thread")
    return replace(step, command=command, env={OUTCOMES: str((out / "tests.jsonl").resolve())})


def environment(rehearse: bool) -> dict[str, str]:
    env = dict(os.environ) if rehearse else pack.environment()
    # A process that is stopped writes where it was.
    return {**env, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip


@contextlib.contextmanager
def clocks(file: Path) -> Iterator[None]:
    """Record clocks, power and temperature twice a second, if there is nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv", "-lms", "500"]
    with file.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()  # and not killed, so that it writes its last lines
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


# ---- the files ----------------------------------------------------------------------------------


def write(args: argparse.Namespace, session: Session) -> dict[str, Any]:
    """Write the JSON file and the summary from the findings so far."""
    document = merged(args, session)
    if document["environment"] is not None:
        name = f"{stem(document['environment'])}-{args.stage}.json"
        write_whole(args.out / name, json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_whole(args.out / "summary.md", summary(document))
    return document


def merged(args: argparse.Namespace, session: Session) -> dict[str, Any]:
    lines = journal.read(session.journal)

    def of(name: str) -> list[Any]:
        return [line[name] for line in lines if name in line]

    where = next(iter(of("environment")), None)  # None: no check or benchmark has begun
    if where is not None and args.commit is not None:
        where["commit"] = args.commit
    outcomes = journal.read(args.out / "tests.jsonl")
    return {
        "settings": {"stage": args.stage, "seconds": args.seconds, "rehearsal": args.rehearse},
        "environment": where,
        "steps": journal.read(session.steps),
        "checks": of("check"),
        "tests": tests_of(outcomes) if outcomes else None,
        "rows": of("row"),
        "tiles": of("tile"),
        "notes": of("note"),
        "left_out": of("left_out"),
    }


def tests_of(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    # A test that loses the device is reported twice. The first report has the reason.
    outcomes = [*{line["test"]: line for line in reversed(outcomes)}.values()]

    def count(outcome: str) -> int:
        return sum(line["outcome"] == outcome for line in outcomes)

    failed = [line for line in outcomes if line["outcome"] == "failed"]
    words = ", ".join(f"{count(x)} {x}" for x in ("passed", "failed", "skipped"))
    return {"summary": words, "failed": failed}


def stem(where: dict[str, Any]) -> str:
    """The name of the files without stage, such as h100-80gb-hbm3-2026-01-31-0123456789ab."""
    device = (where["device"] or platform.machine()).lower().removeprefix("nvidia ")
    parts = (device, where["date"], where["commit"])
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts if part)


def problems(document: dict[str, Any]) -> list[str]:
    """One line for each step that failed, for each failed check and test, and each wrong row."""
    texts = [
        f"step {step['step']}: {step.get('reason') or f'status {status}'}"
        for step in document["steps"] if (status := step.get("status", 0)) != 0
    ]  # fmt: skip
    texts += [f"step {x['step']}: left out {x['left_out']}, {x['why']}"
              for x in document["steps"] if "left_out" in x]  # fmt: skip
    texts += [
        f"check {check['name']}: {check.get('error') or check['figures']}"
        for check in document["checks"] if not check["ok"]
    ]  # fmt: skip
    tests = document["tests"]
    texts += [f"test {failed['test']}" for failed in (tests["failed"] if tests else ())]
    texts += [
        f"row {row['name']}, N = {row['length']}: error budget exceeded"
        for row in document["rows"] if row["check"] is not None and not row["check"]["ok"]
    ]  # fmt: skip
    return texts


def summary(document: dict[str, Any]) -> str:
    """The findings as Markdown."""
    checks, tests = document["checks"], document["tests"]
    passed = sum(check["ok"] for check in checks)
    where = document["environment"]
    device = "no check or benchmark has begun" if where is None else stem(where)
    text = [f"# {device}, stage {document['settings']['stage']}", ""]
    text += [f"- checks: {passed} of {len(checks)} passed"]
    text += [f"- tests: {tests['summary']}" if tests else "- tests: not run"]
    text += [f"- FAILED {line}" for line in problems(document)]
    text += ["", "## Steps", ""]
    for step in document["steps"]:
        text.append("- " + ", ".join(f"{name} {value}" for name, value in step.items()))
    figures = [check for check in checks if check["ok"] and check["figures"]]
    text += ["", "## Checks", ""] if figures else []
    for check in figures:
        shown = ", ".join(
            f"{name} {value:.3g}" for name, value in check["figures"].items() if value is not None
        )
        text.append(f"- {check['name']}: {shown}")
    text += ["", "## Times", ""] if document["rows"] else []
    for row in document["rows"]:
        text.append(f"- {row_text(row)}")
    text += ["", "## Block sizes", ""] if document["tiles"] else []
    text += [f"- {json.dumps(tile)}" for tile in document["tiles"]]
    return "\n".join(text) + "\n"


def row_text(row: dict[str, Any]) -> str:
    mask = "causal" if row["causal"] else "full"
    parts = [row["suite"], f"N = {row['length']}", f"B = {row['batch']}", f"D = {row['head_dim']}",
             mask, row["inputs"], row["direction"], row["name"], str(row["backend"])]  # fmt: skip
    if row["seconds"]:
        parts.append(f"{1e3 * row['seconds']['median']:.3f} ms")
    parts += [f"{name} {value:.3g}" for name, value in row["figures"].items()]
    parts += [f"time / {name} {ratio['median']:.2f}" for name, ratio in row["ratios"].items()]
    return ", ".join(filter(None, [*parts, row["note"]]))
