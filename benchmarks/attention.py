"""Times of `attnzoo.attention`, each result checked against fp64 before it is timed.

A row: the deviation that came closest to its budget, the median time with its quartiles, its
multiple of torch's scaled_dot_product_attention (softmax, in the same rounds), and the peak memory
beyond the inputs. Where the package `entmax` is installed, eager attention with it is timed too.

With `--device cuda` also without causality, forward and backward apart, at several head dimensions,
as TFLOP/s, beside SDPA's flash and cuDNN backends, FlexAttention and, where installed, AdaSplash.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import attnzoo
from benchmarks import competitors, gpu_attention, memory, report
from benchmarks.cases import SDPA, Case, Inputs, Setting, call, package_call, sdpa_call
from benchmarks.correctness import check
from benchmarks.grid import INPUTS, MASKS
from benchmarks.report import Row
from benchmarks.timing import Spread, interleave, ratio
from evals.cells import Refused, split_list

# Its whole score matrix is held several times over, and one call takes seconds.
PACKAGE_ROUNDS = 3

# What each device takes when it is not said. An option that is missing here is not for the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 2048, 4096], "direction": "forward", "dtype": "float32", "batch": 1,
        "heads": 8, "head_dim": [64], "repeats": 11, "min_seconds": 0.5, "threads": 2,
        "learned": False, "sdpa": True, "package_max_length": 2048,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 16)], "direction": "both", "dtype": "bfloat16",
        "batch": None, "heads": 16, "head_dim": [64, 128], "repeats": 10, "min_seconds": 0.05,
        "backend": "flash", "mask": list(MASKS), "inputs": list(INPUTS),
        "competitors": list(competitors.NAMES),
    },
}  # fmt: skip
BOTH = {"backend"}  # for every device, and None means something


def lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive integers, separated by commas")
    return values


def positive(kind: type):
    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r}: a positive {kind.__name__} is expected")
        return value

    return convert


def some_of(names: tuple[str, ...]):
    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        if text and not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(names)} are expected")
        return chosen if text else []

    return convert


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("attention", help="check and time variants", description=__doc__)
    size, yes_no = positive(int), argparse.BooleanOptionalAction
    default = Setting(length=1)
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cpu")
    add("--variants", help="a,b(parameter=value); default: every registered variant")
    report.add_plugin(parser)
    add("--lengths", type=lengths, metavar="N,N,…")
    add("--direction", choices=["forward", "backward", "both"],
        help="both: on a cpu forward and backward, timed as one; on a GPU each")  # fmt: skip
    add("--backend", help="default: cpu, what attnzoo chooses; cuda, flash")
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--batch", type=size, help="default: cpu, 1; cuda, 65536 tokens per head")
    add("--heads", type=size)
    add("--head-dim", type=lengths, metavar="D", help="cuda: D,D,…")
    add("--input-scale", type=positive(float), default=default.input_scale,
        help="q, k and v are N(0, 1) times this; small values flatten the scores")  # fmt: skip
    add("--seed", type=int, default=default.seed)
    add("--repeats", type=size, help="rounds at least")
    add("--min-seconds", type=positive(float), help="spent on the rounds at least")
    add("--check-only", action="store_true", help="neither time nor memory")
    add("--time", action=yes_no, default=True)
    add("--memory", action=yes_no, default=True, help="cpu: one fresh process per row")
    add("--json", metavar="FILE", help="written when all is measured")
    add = parser.add_argument_group("of a cpu alone").add_argument
    add("--threads", type=size)
    add("--learned", action="store_true", default=None,
        help="with --direction both: learn what attnzoo.nn.Attention would")  # fmt: skip
    add("--sdpa", action=yes_no, help="the yardstick; it takes O(N²) time")
    add("--package-max-length", type=int,
        help="longest sequence on which the package entmax is timed; 0: never")  # fmt: skip
    add = parser.add_argument_group("of --device cuda alone").add_argument
    add("--mask", type=some_of(MASKS), metavar=",".join(MASKS))
    add("--inputs", type=some_of(INPUTS), metavar=",".join(INPUTS),
        help="clustered: most 64 × 64 blocks are empty; variants with a threshold")  # fmt: skip
    add("--competitors", type=some_of(competitors.NAMES), metavar="NAME,…",
        help=f"some of {','.join(competitors.NAMES)}; '' for none")  # fmt: skip
    parser.set_defaults(run=run)


def settle(args: argparse.Namespace) -> None:
    """Fills in the device's defaults; refuses what only another device takes."""
    own = DEFAULTS[args.device]
    for name in {name for options in DEFAULTS.values() for name in options}:
        if getattr(args, name) is None:
            setattr(args, name, own.get(name))
        elif name not in own and name not in BOTH:
            option = name.replace("_", "-")
            raise Refused(f"--{option} is not for --device {args.device}")


def run(args: argparse.Namespace) -> int:
    settle(args)
    if args.device == "cuda":
        return gpu_attention.run(args)
    if args.direction == "backward":
        raise Refused("--direction backward is timed apart with --device cuda only")
    if len(args.head_dim) != 1:
        raise Refused("--head-dim takes several with --device cuda only")
    (args.head_dim,) = args.head_dim
    if args.learned and args.direction != "both":
        raise Refused("--learned needs --direction both")
    torch.set_num_threads(args.threads)
    specs = split_list(args.variants) if args.variants else attnzoo.list_variants()
    cases = [Case.parse(spec, max(args.lengths)) for spec in specs]
    for case in cases:
        try:
            case.plan(args.backend)
        except (
            ValueError,
            TypeError,
        ) as error:  # misspelt or out of range: refused before all else
            raise Refused(str(error)) from error
    fields = Setting.__dataclass_fields__.keys() - {"length", "causal", "clustered"}
    setting = Setting(length=1, **{name: getattr(args, name) for name in fields})
    where = report.environment()
    print(
        f"B={args.batch} H={args.heads} D={args.head_dim} {args.dtype} causal, {args.direction}, "
        f"inputs N(0,1) × {args.input_scale:g}, {args.threads} threads\n"
        f"{where['cpu']}, {where['cores']} cores, load {where['load'] or 0:.1f} at the start; "
        f"torch {torch.__version__}, commit {where['commit']}"
    )
    print(report.line(report.COLUMNS), flush=True)

    rows: list[Row] = []
    for length in args.lengths:
        at_length = replace(setting, length=length)
        for row in measure_length(cases, at_length, args):
            rows.append(row)
            print(report.row_line(row), flush=True)
    if args.json:
        settings = report.settings(args)
        records = [row.record() for row in rows]
        report.write_json(args.json, {"settings": settings, "environment": where, "rows": records})
    wrong = [r for r in rows if r.check is not None and not r.check.ok]
    if wrong:
        names = ", ".join(f"{r.spec} at {r.length}" for r in wrong)
        print(f"outside the error budget, and not timed: {names}", file=sys.stderr)
        return 1
    if all(r.note and r.check is None for r in rows):
        print("nothing could be measured", file=sys.stderr)
        return 2
    return 0


def measure_length(cases: list[Case], setting: Setting, args: argparse.Namespace):
    """Yields the rows of one length: the yardstick first, then each variant."""
    if args.sdpa and not args.check_only:
        yield measure_sdpa(setting, args)
    for case in cases:
        yield from measure_case(case, setting, args)


def measure_sdpa(setting: Setting, args: argparse.Namespace) -> Row:
    inputs = Inputs.make(Case("softmax", "softmax"), setting)
    row = Row(SDPA, setting.length, setting.direction, backend="torch")
    if args.time:
        times = interleave({"sdpa": sdpa_call(inputs)}, args.repeats, args.min_seconds)
        row.seconds = Spread.of(times["sdpa"])
    if args.memory:
        measure_memory(row, None, setting, args.plugin)
    return row


def measure_case(case: Case, setting: Setting, args: argparse.Namespace):
    row = Row(case.spec, setting.length, setting.direction)
    inputs = Inputs.make(case, setting)
    try:
        chosen = attnzoo.explain(
            inputs.q, inputs.k, inputs.v, case.variant, is_causal=True, backend=setting.backend,
            **inputs.params,
        )  # fmt: skip
        row.backend = chosen.chosen
        row.check = check(case, inputs, setting.backend, setting.seed)
    except ValueError as refusal:
        row.note = f"refused: {refusal}"
    if row.check is not None and not row.check.ok:
        row.note = "WRONG, not timed"
    if row.note or args.check_only:
        yield row
        return
    if args.time:
        calls = {"ours": call(case, inputs, setting.backend)}
        if args.sdpa:
            calls["sdpa"] = sdpa_call(inputs)
        times = interleave(calls, args.repeats, args.min_seconds)
        row.seconds = Spread.of(times["ours"])
        row.ratio = ratio(times["ours"], times["sdpa"]) if args.sdpa else None
    if args.memory:
        measure_memory(row, case, setting, args.plugin)
    yield row
    theirs = package_call(case, inputs) if setting.length <= args.package_max_length else None
    if args.time and theirs is not None:
        yield measure_package(case, inputs, theirs, setting)


def measure_memory(row: Row, case: Case | None, setting: Setting, plugin: Path | None) -> None:
    try:
        row.peak_bytes = memory.measure(case, setting, plugin)
    except RuntimeError as error:  # the process was killed, say: this row says so, others go on
        row.note = str(error)


def measure_package(case: Case, inputs: Inputs, theirs, setting: Setting) -> Row:
    """The package and ours in turn, so that the speed-up is one of the same rounds."""
    calls = {"ours": call(case, inputs, setting.backend), "theirs": theirs}
    times = interleave(calls, PACKAGE_ROUNDS, 0.0, warmup=1)
    return Row(
        f"  package entmax: {case.variant}",
        setting.length,
        setting.direction,
        backend="eager",
        seconds=Spread.of(times["theirs"]),
        speedup=ratio(times["theirs"], times["ours"]).median,
    )
