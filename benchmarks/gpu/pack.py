"""Compile the kernels of a stage and of the GPU tests for sm_90, without a GPU.

Minutes on a GPU then go into running, not into compiling. With `--out` the compiled kernels are
written to a file, together with their launchers, which gcc compiles. `python -m benchmarks gpu
--cache FILE` unpacks it. The GPU machine must have the same Triton and the same minor version of
Python. The calls are the checks and the timings of attention, decoding and linear forms; `tune` and
`profile` have none of their own.

A kernel is compiled by calling it with CPU tensors over a stand-in for the GPU driver. Kernels that
a cache already has are not compiled again, so a second pack after a small change is fast. A change
in a file of kernels changes the line numbers of what follows, and so compiles it again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import checks, stages
from benchmarks.gpu.session import Step
from benchmarks.harness.bench import first_line
from benchmarks.harness.cases import call
from benchmarks.harness.options import positive
from benchmarks.kernels import stand_in
from benchmarks.kernels.compile import require_compiler
from benchmarks.suites import attention, decode, linear
from commandline.errors import UsageError

ROOT = Path(__file__).parents[2]
CACHE = Path(tempfile.gettempdir()) / "attnzoo-triton"
KEY = "KEY"  # file of the cache that names the versions and sources it was made from
# Sources of the kernels, and of the calls that compile them.
SOURCES = (
    "attnzoo/backends/triton", "tests/gpu", "benchmarks/gpu/checks.py", "benchmarks/gpu/stages.py",
)  # fmt: skip
PACKED = (".json", ".cubin", ".so")  # what a launch reads
SUITES: dict[str, Any] = {"attention": attention, "decode": decode, "linear": linear}
# Lengths that select the same kernels as the long ones.
LENGTHS = {"attention": [256], "linear": [256], "decode": [4096]}
RUNS = 3  # a call is described, recorded, and then prepared


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "pack", help="Compile the kernels of a stage without a GPU", description=__doc__
    )
    add = parser.add_argument
    add("--stage", choices=[*stages.STAGES], default="contact",
        help="Compile the kernels of this stage (default: contact)")  # fmt: skip
    add("--out", type=Path, metavar="FILE.tar.xz", help="Write the compiled kernels to FILE")
    add("--skip-tests", action="store_true", help="Do not compile the kernels of the GPU tests")
    add("--jobs", type=positive(int), default=os.cpu_count() or 1, metavar="N",
        help="Compile in N processes (default: one per CPU)")  # fmt: skip
    add("--worker", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_compiler("pack")
    if args.worker is not None:
        return compile_calls(args.stage, args.worker, args.jobs)
    if args.out is not None and args.out.is_dir():
        raise UsageError(f"--out must be a file, got the folder {args.out}")
    if args.out is None and fits(args.stage, args.skip_tests):
        print("the compiled kernels fit these versions and sources")
        return 0
    with contextlib.ExitStack() as stack:
        env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
        if args.out is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                stand_in.build(folder)
            except (OSError, RuntimeError) as error:
                raise UsageError(f"pack --out needs gcc for launchers: {error}") from error
            env |= stand_in.with_libcuda(folder)
        failed = compile_all(args, env)
    if not failed:
        (CACHE / KEY).write_text(key(args.stage, args.skip_tests))
    if args.out is not None:
        write(args.out)
    return failed


def environment() -> dict[str, str]:
    """The environment of processes that use the cache.

    Triton runs the program `file` to name the platform in the key of a launcher. A machine without
    this program would not find the launchers of a machine with it, so it gets a substitute.
    """
    env = {**os.environ, "TRITON_CACHE_DIR": str(CACHE)}
    if shutil.which("file") is None:
        folder = CACHE / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "file"
        program.write_text("#!/bin/sh\necho ELF 64-bit LSB executable\n")
        program.chmod(0o755)
        env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', '')}"
    return env


def compile_all(args: argparse.Namespace, env: dict[str, str]) -> int:
    """Compile in several processes. Returns 1 if one of them failed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks", "pack", "--stage", args.stage]
    command += ["--jobs", str(args.jobs), "--worker"]
    workers = [subprocess.Popen([*command, str(n)], cwd=ROOT, env=env) for n in range(args.jobs)]
    statuses = [worker.wait() for worker in workers]
    if args.stage == "contact" and not args.skip_tests:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--rehearse",
                 "-p", "no:cacheprovider", "-n", str(args.jobs)]  # fmt: skip
        statuses.append(subprocess.run(tests, cwd=ROOT, env=env).returncode)
    return int(any(statuses))


def write(out: Path) -> None:
    files = [file for file in sorted(CACHE.rglob("*")) if file.suffix in PACKED or file.name == KEY]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=6) as tar:
        for file in files:
            tar.add(file, arcname=str(file.relative_to(CACHE)))
    kernels = sum(file.suffix == ".cubin" for file in files)
    print(f"wrote {out}: {kernels} kernels, {out.stat().st_size / 2**20:.1f} MiB")


def unpack(file: Path) -> None:
    """Unpack a file that `write` made.

    Raises:
        UsageError: it is no archive.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file) as tar:
            tar.extractall(CACHE, filter="data")
    except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise UsageError(
            f"--cache must be a file of `benchmarks pack`, got {file}: {error}"
        ) from error
    # Triton lists the files of a kernel by absolute paths, which may differ on this machine.
    for listing in CACHE.glob("*/__grp__*.json"):
        names = json.loads(listing.read_text())["child_paths"]
        paths = {name: str(listing.parent / name) for name in names}
        listing.write_text(json.dumps({"child_paths": paths}))


def fits(stage: str, skip_tests: bool) -> bool:
    """Whether the cache has these kernels: made from these sources, with these versions."""
    key_file = CACHE / KEY
    keys = {key(stage, skip) for skip in {False, skip_tests}}
    return key_file.exists() and key_file.read_text() in keys


def key(stage: str, skip_tests: bool) -> str:
    from triton.runtime.cache import triton_key

    python = "{}.{}".format(*sys.version_info)
    parts = [stage, str(skip_tests), python, triton_key()]
    for name in SOURCES:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        parts += [file.read_text() for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# ---- one process --------------------------------------------------------------------------------


def compile_calls(stage: str, worker: int, jobs: int) -> int:
    """Run every ``jobs``-th call over the stand-in. Returns 1 if one of them failed."""
    torch.set_num_threads(1)
    stand_in.install()
    failed = done = 0
    for n, (name, attend) in enumerate(calls(stage)):
        if n % jobs != worker:
            continue
        try:
            for _ in range(RUNS):
                attend()
            done += 1
        except Exception as error:
            if "cannot run" in str(error) and not name.startswith("check "):
                continue  # a variant without a kernel: its row gets a note
            failed += 1
            print(f"FAILED {name}: {first_line(error)}", flush=True)
    print(f"worker {worker}: {done} calls, {failed} failed", flush=True)
    return int(failed > 0)


def calls(stage: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of a stage that launch kernels, with few tokens, on CPU tensors."""
    for step in stages.STAGES[stage]:
        if step is stages.SMOKE:
            for name, check in checks.AGREEMENTS.items():
                yield f"check {name}", partial(check.attend, "cpu")
        for suite, module in SUITES.items():
            if suite in step.command:
                yield from suite_calls(step, suite, module)


def suite_calls(step: Step, suite: str, module: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    words = step.command[step.command.index(suite) :]
    args = parser.parse_args([*words, *([step.option, ",".join(step.items)] if step.items else [])])
    for name, value in module.DEFAULTS["cuda"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.device, args.lengths, args.batch, args.batches = "cpu", LENGTHS[suite], 1, [1]
    args.threads, args.check_only, args.pairwise_max = 1, True, 0
    cases = module.prepare(args)
    directions = getattr(args, "direction", ["forward"])
    for case in cases:
        for _, make in module.groups(args, [case], *([{}] if suite == "attention" else [])):
            for direction in directions:
                yield f"{step.name} {case.spec}", partial(call_group, make, direction)


def call_group(make: Callable[[], list[Any]], direction: str) -> None:
    for e in make():
        if e.kind == "variant":
            call(e.make(), e.inputs, direction)()
