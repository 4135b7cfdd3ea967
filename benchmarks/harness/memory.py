"""Peak memory of one call on a CPU, without its inputs, measured in a fresh process.

In a process that ran other calls, the call would reuse memory that the allocator holds, and that
memory would not be counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.harness.bench import Implementation
from benchmarks.harness.cases import Case, Inputs, Setting, call
from commandline.variants import load_plugin

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parents[2]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("memory", help="Measure memory (used by `attention`)")
    parser.add_argument("request", help="JSON made by benchmarks.harness.memory.measure")
    parser.set_defaults(run=run)


def measure(
    implementation: Implementation,
    setting: Setting,
    direction: str = "forward",
    *,
    names: Sequence[str] = (),
    learned: bool = False,
    threads: int = 1,
    plugin: Path | None = None,
) -> int:
    """The peak memory of a call in bytes, without its inputs.

    names: the baselines that the new process creates, if the implementation is a baseline.
    """
    request = {
        "case": asdict(implementation.case),
        "setting": asdict(setting),
        "direction": direction,
        "backend": implementation.backend,
        "baseline": implementation.name if implementation.kind == "baseline" else None,
        "names": list(names),
        "learned": learned,
        "threads": threads,
        "plugin": plugin and str(plugin.resolve()),
    }
    return in_new_process(["memory", json.dumps(request)], implementation.name)


def in_new_process(command: Sequence[str], name: str) -> int:
    """The number that a command of the benchmarks prints. ``name`` is for the error message."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command], capture_output=True, text=True, cwd=ROOT
    )
    if process.returncode:
        reason = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(f"cannot measure the memory of {name}: {reason[-1]}")
    return int(process.stdout)


def run(args: argparse.Namespace) -> int:
    request = json.loads(args.request)
    torch.set_num_threads(request["threads"])
    if request["plugin"] is not None:
        load_plugin(Path(request["plugin"]))
    case, setting = Case(**request["case"]), Setting(**request["setting"])
    direction = "forward" if request["direction"] == "forward" else "both"

    def prepare(setting: Setting):
        gradients = direction == "both"
        inputs = Inputs.make(setting, case, gradients, request["learned"])
        implementation = Implementation.of(case, inputs, request["backend"])
        if request["baseline"] is not None:
            baselines = Implementation.baselines(case, inputs, setting, request["names"])
            (implementation,) = (e for e in baselines if e.name == request["baseline"])
        return call(implementation.make(), implementation.inputs, direction)

    # The small call allocates the memory of libraries and threads, which should not be counted.
    prepare(replace(setting, length=min(64, setting.length)))()
    print(peak_beyond(prepare(setting)))
    return 0


def peak_beyond(attend) -> int:
    """Peak resident memory during one call minus resident memory before it, in bytes."""
    if not STATUS.exists():  # not Linux: only the peak of the whole process is known
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    # The creation of the inputs used more memory than the process uses now. Without a reset, the
    # peak of that step would hide a part of the call's memory.
    _trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    attend()
    return _status("VmHWM") - before


def _trim() -> None:
    """Returns freed memory to the system, so that the call cannot reuse it uncounted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
