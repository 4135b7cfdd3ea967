"""Times of `attnzoo.attention`, each result checked against fp64 before it is timed.

A row: the deviation that came closest to its budget, the median time with its quartiles, TFLOP/s by
the usual count (4·B·H·N²·D forward, 2.5 times that backward, half if causal), the time as a
multiple of each baseline's in the same rounds (below 1: faster), and the peak memory beyond the
inputs. The directions are forward, backward (the gradients alone) and both (together).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import memory
from benchmarks.harness.baselines import NAMES
from benchmarks.harness.bench import DIRECTIONS, Entrant, Groups
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting, call
from benchmarks.harness.grid import INPUTS, MASKS, flops, grid
from benchmarks.harness.options import (
    add_options,
    bench_of,
    cases_of,
    command,
    positive,
    settle,
    some_of,
    timer_of,
)
from benchmarks.harness.report import Report, Row
from commandline.arguments import numbers
from commandline.errors import UsageError

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 2048, 4096], "direction": ["forward"], "dtype": "float32", "batch": 1,
        "heads": 8, "head_dim": [64], "repeats": 11, "min_seconds": 0.5, "mask": ["causal"],
        "inputs": ["iid"], "baselines": ["sdpa", "entmax"], "backend": None,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 16)], "direction": ["forward", "backward"],
        "dtype": "bfloat16", "batch": None, "heads": 16, "head_dim": [64, 128], "repeats": 10,
        "min_seconds": 0.05, "mask": list(MASKS), "inputs": list(INPUTS),
        "baselines": ["flash", "cudnn", "flex", "adasplash"], "backend": "flash",
    },
}  # fmt: skip


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("attention", help="check and time variants", description=__doc__)
    yes_no, device = argparse.BooleanOptionalAction, "default: depends on the device"
    add_options(parser, "cpu", "every one")
    add = parser.add_argument
    add("--direction", type=some_of(DIRECTIONS), metavar=",".join(DIRECTIONS),
        help="default: forward on a CPU, forward,backward on a GPU")  # fmt: skip
    add("--batch", type=positive(int), metavar="B",
        help="sequences of a batch; default: 1 on a CPU, as many as make 65536 tokens per head on "
        "a GPU")  # fmt: skip
    add("--head-dim", type=numbers, metavar="D,D,…", help=f"head dimensions; {device}")
    add("--mask", type=some_of(MASKS), metavar=",".join(MASKS), help=device)
    add("--inputs", type=some_of(INPUTS), metavar=",".join(INPUTS),
        help="of block-sparse inputs most 64 × 64 blocks are empty, and they are for variants with "
        f"a threshold; {device}")  # fmt: skip
    add("--input-scale", type=positive(float), default=1.0, metavar="X",
        help="q, k and v are N(0, 1) times X; small values flatten the scores")  # fmt: skip
    add("--learned", action="store_true",
        help="with gradients: learn the parameters that attnzoo.nn.Attention learns")  # fmt: skip
    add("--baselines", type=some_of(NAMES), metavar="NAME,…",
        help=f"some of {','.join(NAMES)}, or '' for none; {device}")  # fmt: skip
    add("--check-only", action="store_true", help="measure neither time nor memory")
    add("--time", action=yes_no, default=True, help="measure times")
    add("--memory", action=yes_no, default=True,
        help="measure memory, on a CPU in a fresh process per row")  # fmt: skip
    parser.set_defaults(run=command(prepare, measure))


def prepare(args: argparse.Namespace) -> list[Case]:
    settle(args, DEFAULTS)
    if not (args.direction and args.mask and args.inputs):
        raise UsageError("--direction, --mask and --inputs must name something")
    if args.learned and args.direction == ["forward"]:
        raise UsageError("--learned needs --direction backward or both")
    return cases_of(args, max(args.lengths))


def measure(args: argparse.Namespace, cases: list[Case], report: Report, **more: Any) -> None:
    timer, timed = timer_of(args), args.time and not args.check_only

    def peak_bytes(e: Entrant, row: Row) -> int | None:
        if args.device == "cuda":
            whole = "forward" if row.direction == "forward" else "both"
            return timer.peak_bytes(call(e.attend, e.inputs, whole))
        return memory.measure(
            e, row.setting, row.direction, names=args.baselines, learned=args.learned,
            threads=args.threads, plugin=args.plugin,
        )  # fmt: skip

    def rate(row: Row) -> dict[str, float]:
        assert row.seconds is not None
        return {"tflops": flops(row.setting, row.direction) / row.seconds.median / 1e12}

    bench = bench_of(
        args, "attention", timer, directions=args.direction, time=timed, rate=rate, **more
    )
    if args.memory and not args.check_only:
        bench.memory = peak_bytes
    bench.run(groups(args, cases), report)


def groups(args: argparse.Namespace, cases: list[Case]) -> Groups:
    settings = grid(
        args.lengths, args.head_dim, args.mask, args.inputs, batch=args.batch, heads=args.heads,
        dtype=args.dtype, input_scale=args.input_scale, seed=args.seed, device=args.device,
    )  # fmt: skip
    for setting in settings:
        # Block-sparse inputs are for those with a threshold: the others skip nothing.
        suited = [case for case in cases if case.has_threshold or not setting.block_sparse]
        if suited:
            yield setting, partial(list, entrants(args, suited, setting))


def entrants(args: argparse.Namespace, cases: list[Case], setting: Setting) -> Iterator[Entrant]:
    gradients = args.direction != ["forward"]
    names = [] if args.check_only else args.baselines
    plain = Inputs.make(setting, gradients=gradients)
    yield from Entrant.baselines(SOFTMAX, plain, setting, names)
    for case in cases:
        inputs = replace(plain, params=case.params)
        if case.selects or args.learned:  # these have inputs of their own
            inputs = Inputs.make(setting, case, gradients, args.learned)
        yield Entrant.of(case, inputs, args.backend)
        if case != SOFTMAX:
            yield from Entrant.baselines(case, plain, setting, names)
