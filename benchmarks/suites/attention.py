"""Check `attnzoo.attention` against fp64, then measure time and memory.

Columns: the error that uses the largest share of its budget, and this share; the median time and
its quartiles; TFLOP/s by the usual count (4·B·H·N²·D forward, 2.5 times that backward, half of both
if causal); the time divided by that of each softmax baseline in the same rounds (below 1 is
faster); and the peak memory without the inputs.

For variants with a threshold, ``empty blocks`` is the share of 64 × 64 blocks whose weights are all
0, estimated from one head.

Directions: forward, backward (gradients only) and both (output and gradients).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import memory
from benchmarks.harness.baselines import NAMES
from benchmarks.harness.bench import DIRECTIONS, Groups, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting, call
from benchmarks.harness.grid import INPUTS, MASKS, flops, grid
from benchmarks.harness.options import (
    add_options,
    apply_defaults,
    bench_of,
    by_device,
    cases_of,
    command,
    positive,
    require_cuda,
    subset_of,
    timer_of,
)
from benchmarks.harness.presets import PRESETS
from benchmarks.harness.report import Report, Row
from benchmarks.harness.sparsity import empty_blocks
from benchmarks.harness.timing import WallClock
from commandline.arguments import numbers
from commandline.errors import UsageError

# The share of empty blocks by setting and spec of a variant.
Shares = dict[tuple[Setting, str], float]

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 2048, 4096], "direction": ["forward"], "dtype": "float32", "batch": 1,
        "heads": 8, "head_dim": [64], "repeats": 11, "min_seconds": 0.5, "mask": ["causal"],
        "inputs": ["iid"], "baselines": ["sdpa", "entmax"], "backend": None, "input_scale": 1.0,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 16)], "direction": ["forward", "backward"],
        "dtype": "bfloat16", "batch": None, "heads": 16, "head_dim": [64, 128], "repeats": 10,
        "min_seconds": 0.05, "mask": list(MASKS), "inputs": list(INPUTS),
        "baselines": ["flash", "cudnn", "flex", "adasplash"], "backend": "flash",
        "input_scale": 1.0,
    },
}  # fmt: skip


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("attention", help="Check and time variants", description=__doc__)
    yes_no, default = argparse.BooleanOptionalAction, partial(by_device, DEFAULTS)
    add_options(parser, DEFAULTS, "cpu", "all")
    add = parser.add_argument
    add("--preset", choices=PRESETS,
        help="Repeat the settings of a paper on a GPU (implies --device cuda), and show its "
        "figures beside those of this run; other options change these settings")  # fmt: skip
    add("--direction", type=subset_of(DIRECTIONS), metavar=",".join(DIRECTIONS),
        help=f"Measure these directions {default('direction')}",
    )  # fmt: skip
    add("--batch", type=positive(int), metavar="B",
        help="Use B sequences (default: 1 on a CPU, 65536 / N on a GPU)")  # fmt: skip
    add("--head-dim", type=numbers, metavar="D,D,…",
        help=f"Use these head dimensions {default('head_dim')}")  # fmt: skip
    add("--mask", type=subset_of(MASKS), metavar=",".join(MASKS),
        help=f"Measure calls with these masks {default('mask')}")  # fmt: skip
    add("--inputs", type=subset_of(INPUTS), metavar=",".join(INPUTS),
        help="Draw inputs of these kinds; with block-sparse inputs most 64 × 64 blocks of weights "
        f"are 0, and only variants with a threshold are measured {default('inputs')}")  # fmt: skip
    add("--input-scale", type=positive(float), metavar="X",
        help="Multiply q, k and v by X (default: 1)")  # fmt: skip
    add("--learned", action="store_true",
        help="Include gradients of the parameters that attnzoo.nn.Attention learns")  # fmt: skip
    add("--baselines", type=subset_of(NAMES), metavar="NAME,…",
        help=f"Compare with some of {','.join(NAMES)}, or '' for none {default('baselines')}",
    )  # fmt: skip
    add("--cpu-time", action="store_true",
        help="Time with the CPU time of the process, which other programs change less than the "
        "time of the clock on the wall; only with --device cpu")  # fmt: skip
    add("--check-only", action="store_true", help="Check results only")
    add("--time", action=yes_no, default=True, help="Measure time (default)")
    add("--memory", action=yes_no, default=True,
        help="Measure memory (default), on a CPU in a new process for each table row")  # fmt: skip
    parser.set_defaults(run=command(prepare, measure), device=None)


def prepare(args: argparse.Namespace) -> list[Case]:
    defaults = DEFAULTS
    if args.preset is not None:
        if args.device == "cpu":
            raise UsageError(f"--preset {args.preset} requires --device cuda, got cpu")
        require_cuda(f"--preset {args.preset}")
        args.device = "cuda"
        defaults = {"cuda": {**DEFAULTS["cuda"], **PRESETS[args.preset].options}}
    args.device = args.device or "cpu"
    if args.cpu_time and args.device == "cuda":
        raise UsageError("--cpu-time requires --device cpu, got cuda")
    apply_defaults(args, defaults)
    if not (args.direction and args.mask and args.inputs):
        raise UsageError("--direction, --mask and --inputs must not be empty")
    if args.learned and args.direction == ["forward"]:
        raise UsageError("--learned requires --direction backward or both, got forward")
    return cases_of(args, max(args.lengths))


def measure(args: argparse.Namespace, cases: list[Case], report: Report) -> None:
    timer = WallClock(clock=time.process_time) if args.cpu_time else timer_of(args)
    timed = args.time and not args.check_only
    shares: Shares = {}

    def peak_bytes(e: Implementation, row: Row) -> int | None:
        if args.device == "cuda":
            direction = "forward" if row.direction == "forward" else "both"
            return timer.peak_bytes(call(e.attend, e.inputs, direction))
        return memory.measure(
            e, row.setting, row.direction, names=args.baselines, learned=args.learned,
            threads=args.threads, plugin=args.plugin,
        )  # fmt: skip

    def rate(row: Row) -> dict[str, float]:
        assert row.seconds is not None
        figures = {"tflops": flops(row.setting, row.direction) / row.seconds.median / 1e12}
        share = shares.get((row.setting, row.case.spec))
        return figures if share is None else {**figures, "empty_blocks": share}

    bench = bench_of(args, "attention", timer, directions=args.direction, time=timed, rate=rate)
    if args.memory and not args.check_only:
        bench.memory = peak_bytes
    bench.measure(groups(args, cases, shares), report)
    if args.preset is not None:
        device = report.environment["device"]
        report.table(PRESETS[args.preset].table(report.rows, device))


def groups(args: argparse.Namespace, cases: list[Case], shares: Shares) -> Groups:
    settings = grid(
        args.lengths, args.head_dim, args.mask, args.inputs, batch=args.batch, heads=args.heads,
        dtype=args.dtype, input_scale=args.input_scale, seed=args.seed, device=args.device,
    )  # fmt: skip
    for setting in settings:
        # Only threshold variants have zero weights to skip on block-sparse inputs.
        suited = [case for case in cases if case.has_threshold or not setting.block_sparse]
        if suited:
            yield setting, partial(group, args, suited, setting, shares)


def group(
    args: argparse.Namespace, cases: list[Case], setting: Setting, shares: Shares
) -> list[Implementation]:
    """The implementations of a setting. Adds to ``shares`` if times are measured."""
    members = list(implementations(args, cases, setting))
    if args.time and not args.check_only:
        for e in members:
            if e.kind == "variant" and e.case.has_threshold:
                shares[setting, e.case.spec] = empty_blocks(e.case, e.inputs)
    return members


def implementations(
    args: argparse.Namespace, cases: list[Case], setting: Setting
) -> Iterator[Implementation]:
    gradients = args.direction != ["forward"]
    names = [] if args.check_only else args.baselines
    plain = Inputs.make(setting, gradients=gradients)
    yield from Implementation.baselines(SOFTMAX, plain, setting, names)
    for case in cases:
        inputs = replace(plain, params=case.params)
        if case.selects or args.learned:
            inputs = Inputs.make(setting, case, gradients, args.learned)
        yield Implementation.of(case, inputs, args.backend)
        if case != SOFTMAX:
            yield from Implementation.baselines(case, plain, setting, names)
