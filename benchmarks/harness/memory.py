"""Peak memory of one call beyond its inputs, in a fresh process each.

A fresh process, because an allocator that has served other calls keeps memory which the next one
then gets for nothing.
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

from benchmarks.harness.bench import Entrant
from benchmarks.harness.cases import Case, Inputs, Setting, call
from commandline.variants import load_plugin

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parents[2]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("memory", help="what `attention` runs to measure memory")
    parser.add_argument("request", help="JSON: who is called, and how")
    parser.set_defaults(run=run)


def measure(
    entrant: Entrant,
    setting: Setting,
    direction: str = "forward",
    *,
    names: Sequence[str] = (),
    learned: bool = False,
    threads: int = 1,
    plugin: Path | None = None,
) -> int:
    """Bytes that a call takes beyond its inputs; a baseline is made anew as one of ``names``."""
    request = {
        "case": asdict(entrant.case),
        "setting": asdict(setting),
        "direction": direction,
        "backend": entrant.backend,
        "baseline": entrant.name if entrant.kind == "baseline" else None,
        "names": list(names),
        "learned": learned,
        "threads": threads,
        "plugin": plugin and str(plugin.resolve()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "memory", json.dumps(request)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"the memory of {entrant.name}: {reason[-1]}")
    return int(done.stdout)


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
        entrant = Entrant.of(case, inputs, request["backend"])
        if request["baseline"] is not None:
            found = Entrant.baselines(case, inputs, setting, request["names"])
            (entrant,) = (e for e in found if e.name == request["baseline"])
        return call(entrant.make(), entrant.inputs, direction)

    # A small call first: libraries and threads are loaded once, and are no memory of a call.
    prepare(replace(setting, length=min(64, setting.length)))()
    print(peak_beyond(prepare(setting)))
    return 0


def peak_beyond(attend) -> int:
    """Bytes of resident memory at the peak of one call, beyond what is resident before it."""
    if not STATUS.exists():  # not Linux: the peak so far is all there is to compare with
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    # The peak is reset first: that of a child starts from its parent's, and making the inputs took
    # more than they take now. Either would hide the beginning of what is measured.
    _trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    attend()
    return _status("VmHWM") - before


def _trim() -> None:
    """Hands freed memory back, so that the call finds none that is resident already."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status names no {name}")
