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
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.harness.cases import SDPA, Case, Inputs, Setting, call, sdpa_call
from commandline.variants import load_plugin

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parent.parent


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("memory", help="what `attention` runs to measure memory")
    parser.add_argument("request", help="JSON: case, setting, plugin")
    parser.set_defaults(run=run)


def measure(case: Case | None, setting: Setting, plugin: Path | None = None) -> int:
    """Bytes that a call takes beyond its inputs; None as the case stands for torch's SDPA."""
    request = {
        "case": case and asdict(case),
        "setting": asdict(setting),
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
        raise RuntimeError(f"the memory of {case.spec if case else SDPA}: {reason[-1]}")
    return int(done.stdout)


def run(args: argparse.Namespace) -> int:
    request = json.loads(args.request)
    setting = Setting(**request["setting"])
    torch.set_num_threads(setting.threads)
    if request["plugin"] is not None:
        load_plugin(Path(request["plugin"]))
    yardstick = request["case"] is None
    case = Case("softmax", "softmax") if yardstick else Case(**request["case"])

    def prepare(setting: Setting):
        inputs = Inputs.make(case, setting)
        return sdpa_call(inputs) if yardstick else call(case, inputs, setting.backend)

    # A small call first: libraries and threads are loaded once, and are no memory of a call.
    prepare(replace(setting, length=min(64, setting.length)))()
    attend = prepare(setting)
    print(peak_beyond(attend))
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
