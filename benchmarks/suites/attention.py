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
from benchmarks.harness import memory, report
from benchmarks.harness.cases import SDPA, Case, Inputs, Setting, call, package_call, sdpa_call
from benchmarks.harness.correctness import check
from benchmarks.harness.grid import INPUTS, MASKS
from benchmarks.harness.report import Row
from benchmarks.harness.timing import Spread, interleave, ratio
from benchmarks.suites import competitors, gpu_attention
from commandline.arguments import seed
from commandline.errors import UsageError
from commandline.variants import split_list

# Its whole score matrix is held several times over, and one call takes seconds.
PACKAGE_ROUNDS = 3

MOST = 2**31  # what is beyond is a slip
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
# Help texts of options that several commands have.
SEED = "seed of the inputs (default: 0)"
ROUNDS = "the least number of rounds"
SECONDS = "the least time to spend on the rounds, in seconds"
JSON = "a JSON file to write when all is measured"


def lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not 0 < min(values) <= max(values) < MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: positive integers, separated by commas")
    return values


def positive(kind: type):
    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < (MOST if kind is int else float("inf")):
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
    device = "default: depends on the device"
    default = Setting(length=1)
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cpu", help="default: cpu")
    add("--variants", metavar="a,b(x=1)", help="variants with their parameters; default: every one")
    report.add_plugin(parser)
    add("--lengths", type=lengths, metavar="N,N,…", help=f"sequence lengths; {device}")
    add("--direction", choices=["forward", "backward", "both"],
        help="both times forward and backward together on a CPU, and each apart on a GPU; default: "
        "forward on a CPU, both on a GPU")  # fmt: skip
    add("--backend", help="default: what attnzoo chooses on a CPU, flash on a GPU")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=device)
    add("--batch", type=size, metavar="B",
        help="sequences of a batch; default: 1 on a CPU, as many as make 65536 tokens per head on "
        "a GPU")  # fmt: skip
    add("--heads", type=size, metavar="H", help=f"number of heads; {device}")
    add("--head-dim", type=lengths, metavar="D,D,…",
        help=f"head dimensions, on a CPU a single one; {device}")  # fmt: skip
    add("--input-scale", type=positive(float), default=default.input_scale, metavar="X",
        help="q, k and v are N(0, 1) times X; small values flatten the scores")  # fmt: skip
    add("--seed", type=seed, default=default.seed, help=SEED)
    add("--repeats", type=size, metavar="N", help=f"{ROUNDS}; {device}")
    add("--min-seconds", type=positive(float), metavar="S", help=f"{SECONDS}; {device}")
    add("--check-only", action="store_true", help="measure neither time nor memory")
    add("--time", action=yes_no, default=True, help="measure times")
    add("--memory", action=yes_no, default=True,
        help="measure memory, on a CPU in a fresh process per row")  # fmt: skip
    add("--json", metavar="FILE", help=JSON)
    add = parser.add_argument_group("for --device cpu only").add_argument
    add("--threads", type=size, metavar="N", help="number of torch's threads")
    add(
        "--learned",
        action="store_true",
        default=None,
        help="with --direction both: learn the parameters that attnzoo.nn.Attention learns",
    )
    add("--sdpa", action=yes_no, help="time torch's scaled_dot_product_attention, too")
    add(
        "--package-max-length",
        type=int,
        metavar="N",
        help="longest sequence on which the package entmax is timed; 0: never",
    )
    add = parser.add_argument_group("for --device cuda only").add_argument
    add("--mask", type=some_of(MASKS), metavar=",".join(MASKS), help="default: both")
    add("--inputs", type=some_of(INPUTS), metavar=",".join(INPUTS),
        help="default: both; of clustered inputs most 64 × 64 blocks are empty, and they are for "
        "variants with a threshold")  # fmt: skip
    add("--competitors", type=some_of(competitors.NAMES), metavar="NAME,…",
        help=f"some of {','.join(competitors.NAMES)}, or '' for none; default: all")  # fmt: skip
    parser.set_defaults(run=run)


def settle(args: argparse.Namespace) -> None:
    """Fills in the device's defaults; refuses what only another device takes."""
    own = DEFAULTS[args.device]
    for name in {name for options in DEFAULTS.values() for name in options}:
        if getattr(args, name) is None:
            setattr(args, name, own.get(name))
        elif name not in own and name not in BOTH:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is not for --device {args.device}")


def run(args: argparse.Namespace) -> int:
    settle(args)
    if args.device == "cuda":
        return gpu_attention.run(args)
    if args.direction == "backward":
        raise UsageError("--direction backward is timed apart with --device cuda only")
    if len(args.head_dim) != 1:
        raise UsageError("--head-dim takes several with --device cuda only")
    (args.head_dim,) = args.head_dim
    if args.learned and args.direction != "both":
        raise UsageError("--learned needs --direction both")
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
            raise UsageError(str(error)) from error
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
