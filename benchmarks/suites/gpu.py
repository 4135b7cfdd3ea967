"""Everything that a GPU must show, within a budget of time: its tests, then the tables.

Leaves a JSON file, a Markdown file and a picture in a folder, named after the device, the date and
the commit, to be committed to benchmarks/results, from which the README's table is made. No cell is
begun once the budget is spent, and those left out are named. Meanwhile all that there is stands in
NAME.partial.jsonl; of a run that was killed, `--assemble` makes the files from that.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.cases import Setting
from benchmarks.harness.grid import Budget, grid
from benchmarks.harness.timing import CudaEvents
from benchmarks.suites import competitors, gpu_report
from benchmarks.suites.attention import SEED, positive, seed
from benchmarks.suites.gpu_attention import DEVICE, accepted, require_cuda, show
from benchmarks.suites.gpu_cells import GATE, Bench, matrix_peak, targets, unlisted
from commandline.errors import UsageError

ROOT = Path(__file__).parent.parent
# The README's length first; FlexAttention, which compiles anew for each shape, there alone.
LENGTHS = (16384, 4096, 1024, 32768)
HEADS, HEAD_DIMS = 16, (128, 64)
# What is tested may take this share of the budget.
TESTS = 0.5


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "gpu", help="run the tests and make the tables of a GPU", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write the files to")
    add("--budget", type=positive(float), default=480.0, metavar="SECONDS",
        help="after so many seconds nothing more is begun (default: 480)")  # fmt: skip
    add("--skip-tests", action="store_true", help="do not run the tests that need a GPU")
    add(
        "--variants",
        metavar="a,b(x=1)",
        help="variants with their parameters; default: every one that the backend takes",
    )
    report.add_plugin(parser)
    add("--backend", default="flash", help="default: flash")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="default: bfloat16")
    add("--seed", type=seed, default=0, help=SEED)
    add("--commit", help="the commit to name where the checkout came without its history")
    add("--assemble", type=Path, metavar="FILE.partial.jsonl",
        help="measure nothing, and make the files from what a killed run has left")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out must be a folder, {args.out} is a file")
    if args.assemble is not None:
        if not args.assemble.is_file():
            raise UsageError(f"--assemble: there is no file {args.assemble}")
        try:
            return finish(gpu_report.assembled(args.assemble), args.out)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--assemble: {args.assemble} holds a line that no run writes: {error!r}"
            ) from error
    require_cuda("gpu")
    budget = Budget(args.budget)
    where = gpu_report.environment(args.commit)
    settings = report.settings(args)
    path = args.out / f"{gpu_report.stem(where)}.partial.jsonl"
    if path.exists():
        raise UsageError(f"{path} is what a killed run has left: --assemble it, or remove it")
    cases, refused = accepted(args.variants, args.backend, DEVICE, max(LENGTHS))
    timer = CudaEvents()
    peak = matrix_peak(timer, args.dtype, DEVICE)
    header = {"environment": where, "settings": settings, "peak_tflops": peak / 1e12}
    partial = gpu_report.Partial(path, header)
    print(f"{where['device']}, driver {where['driver']}, CUDA {where['cuda']}, "
          f"torch {where['torch']}, commit {where['commit']}; matrices {peak / 1e12:.0f} TFLOP/s",
          flush=True)  # fmt: skip
    for text in filter(None, (GATE, *refused, unlisted(competitors.NAMES))):
        partial.add("note", {"text": text})
        print(text, flush=True)
    if not args.skip_tests:
        tests = pytest_gpu(TESTS * budget.left)
        partial.add("tests", tests)
        print(f"tests: {tests['summary']}", flush=True)
    common = dict(heads=HEADS, dtype=args.dtype, device=DEVICE, seed=args.seed)
    left_out: list[str] = []
    for names, chosen in plan(common):
        bench = Bench(cases, timer, args.backend, names=names, budget=budget, peak=peak)
        for rows in bench.rows(chosen):
            for row in rows:
                partial.add("row", row.record())
            show(rows)
            for text in targets(rows):
                partial.add("note", {"text": f"{gpu_report.title(rows[0].record())}: {text}"})
        left_out += bench.left_out
    partial.add("left_out", {"cells": left_out})
    status = finish(gpu_report.assembled(path), args.out)
    path.unlink()
    return status


def plan(common: dict[str, Any]) -> list[tuple[tuple[str, ...], list[Setting]]]:
    """The reduced grid, most wanted first: (competitors, settings) in turn."""
    first, *others = LENGTHS
    without_flex = tuple(name for name in competitors.NAMES if name != "flex")
    return [
        (competitors.NAMES, grid([first], HEAD_DIMS, ["causal"], ["iid"], **common)),
        (competitors.NAMES, grid([first], HEAD_DIMS, ["full"], ["iid"], **common)),
        (without_flex, grid([first], HEAD_DIMS, ["causal"], ["clustered"], **common)),
        (without_flex, grid(others, HEAD_DIMS, ["causal"], ["iid"], **common)),
        (without_flex, grid(others, HEAD_DIMS, ["full"], ["iid"], **common)),
    ]


def finish(document: dict[str, Any], folder: Path) -> int:
    """Writes the files, and says what was wrong."""
    if not document["environment"]:
        raise UsageError("the file has no header: nothing was measured")
    paths = gpu_report.write_all(document, folder)
    for text in (*document["notes"], *(f"left out: {cell}" for cell in document["left_out"])):
        print(text)
    print("wrote " + ", ".join(map(str, paths)))
    rows, tests = document["rows"], document["tests"]
    wrong = [r for r in rows if r["check"] is not None and not r["check"]["ok"]]
    for row in wrong:
        print(f"WRONG: {row['name']} {gpu_report.title(row)}", file=sys.stderr)
    return 1 if wrong or (tests is not None and tests["status"] != 0) else 0


def pytest_gpu(seconds: float, arguments: Sequence[str] = ("-m", "gpu")) -> dict[str, Any]:
    """Runs pytest in a process of its own, several workers where xdist is there: they compile."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
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
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the workers, and nobody else
        output, _ = process.communicate()
        summary, status = f"stopped after {seconds:.0f} s", -1
    failed = [t for t in output.splitlines() if t.startswith(("FAILED", "ERROR"))]
    took = time.monotonic() - start
    return {"summary": summary, "status": status, "seconds": round(took, 1), "failed": failed}


def summary_line(output: str) -> str:
    """pytest's last line, without its rulers."""
    lines = [text.strip("= \n") for text in output.splitlines() if text.strip("= \n")]
    return lines[-1] if lines else "pytest said nothing"
