"""Measure attention, decoding, linear forms and losses on a GPU, then run tests, within a budget.

Writes a JSON file and a Markdown file, named after the device, the date and the commit. Commit them
to benchmarks/results: `make tables` makes the published table of kernels from them. Both files are
rewritten after each group of calls. After three quarters of the budget no further group starts, and
the groups left out are listed. The last quarter is for the tests that require a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.grid import Budget
from benchmarks.harness.options import positive, require_cuda
from benchmarks.harness.report import Report
from benchmarks.suites import attention, decode, linear, losses
from commandline.arguments import add_plugin
from commandline.errors import UsageError

ROOT = Path(__file__).parents[2]
# The settings of the published table come first. Later attention commands omit FlexAttention,
# which compiles again for each shape.
PLAN = (
    "attention --lengths 16384 --head-dim 128 --mask causal --inputs iid",
    "attention --lengths 16384 --head-dim 64 --mask causal --inputs iid",
    "decode --lengths 65536,4096 --batches 1",
    "linear --lengths 16384,131072",
    "losses",
    "attention --lengths 16384 --head-dim 128 --inputs block-sparse --mask causal "
    "--baselines flash,cudnn,adasplash",
    "attention --lengths 4096,1024,32768 --mask causal --inputs iid --baselines flash,cudnn",
    "attention --lengths 16384,4096 --mask full --inputs iid --baselines flash,cudnn",
    "decode --lengths 16384,262144 --batches 1,32",
)
SUITES: dict[str, Any] = {
    "attention": attention, "decode": decode, "linear": linear, "losses": losses
}  # fmt: skip
TESTS = 0.25  # share of the budget for the tests
DEVICE = "cuda"


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "gpu", help="Measure on a GPU, then run the tests that require one", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="Write the files to DIR")
    add("--budget", type=positive(float), default=480.0, metavar="SECONDS",
        help="Use about SECONDS, a quarter of them for the tests (default: 480)")  # fmt: skip
    add("--skip-tests", action="store_true", help="Skip the tests that require a GPU")
    add("--variants", metavar="a,b(x=1)",
        help="Measure these variants in attention and decode (default: all)")  # fmt: skip
    add_plugin(parser)
    add("--commit", help="Record this commit (needed in a copy without .git)")
    parser.set_defaults(run=run, json=None, markdown=None)


def run(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out must be a folder, got the file {args.out}")
    require_cuda("gpu")
    start = time.monotonic()
    steps = [parsed(line, args) for line in PLAN]
    cases = [suite.prepare(options) for suite, options in steps]
    report = Report.of(args)
    if args.commit:
        report.environment["commit"] = args.commit
    name = args.out / stem(report.environment)
    report.json, report.markdown = f"{name}.json", f"{name}.md"
    report.more["tests"] = None
    reserved = 0.0 if args.skip_tests else TESTS * args.budget
    budget = Budget(args.budget - reserved)
    for line, (suite, options), found in zip(PLAN, steps, cases, strict=True):
        if budget.spent:
            report.left_out.append(line)
        else:
            suite.measure(options, found, report, budget=budget)
    failed = False
    if not args.skip_tests:
        tests = pytest_gpu(max(reserved, args.budget - (time.monotonic() - start)))
        report.more["tests"] = tests
        report.note(f"tests: {'; '.join((tests['summary'], *tests['failed']))}")
        failed = tests["status"] != 0
    status = report.finish()
    print(f"wrote {report.json}, {report.markdown}")
    return status or int(failed)


def parsed(line: str, args: argparse.Namespace) -> tuple[Any, argparse.Namespace]:
    """The suite and the parsed options of a line of PLAN."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for suite in SUITES.values():
        suite.add_parser(commands)
    words = line.split()
    options = parser.parse_args([*words, "--device", DEVICE])
    options.plugin = args.plugin
    if words[0] in ("attention", "decode"):
        options.variants = args.variants
    return SUITES[words[0]], options


def stem(where: dict[str, Any]) -> str:
    """The name of the files without suffix, such as h200-2026-01-31-0123456789ab."""
    device = (where["device"] or platform.machine()).lower().removeprefix("nvidia ")
    parts = (re.sub(r"[^a-z0-9]+", "-", device).strip("-"), where["date"], where["commit"])
    return "-".join(part for part in parts if part)


def pytest_gpu(seconds: float, arguments: Sequence[str] = ("-m", "gpu")) -> dict[str, Any]:
    """Runs pytest in a subprocess, with several workers if xdist is installed.

    Tests that failed before ``seconds`` were over are listed too.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        summary, status = summary_line(output), process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # pytest and its workers have their own session
        output, _ = process.communicate()
        summary, status = f"stopped after {seconds:.0f} s", -1
    took = time.monotonic() - start
    return {
        "summary": summary, "status": status, "seconds": round(took, 1), "failed": failures(output)
    }  # fmt: skip


def failures(output: str) -> list[str]:
    """The lines of failed tests: those of pytest's summary, or of its progress if it was killed.

    The line of a progress is ``[gw0] [ 50%] FAILED tests/…`` with workers, else ``tests/… FAILED``.
    """
    lines = output.splitlines()
    summary = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return summary or [line for line in lines if re.search(r" (FAILED|ERROR)\b", line)]


def summary_line(output: str) -> str:
    """The last line of pytest's output, without = signs."""
    lines = [text.strip("= \n") for text in output.splitlines() if text.strip("= \n")]
    return lines[-1] if lines else "no output from pytest"
