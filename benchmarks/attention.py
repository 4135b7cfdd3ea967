"""Times of `attnzoo.attention`, each result checked against fp64 before it is timed.

A row: the deviation that came closest to its budget, the median time with its quartiles, its
multiple of torch's scaled_dot_product_attention (softmax, in the same rounds), and the peak memory
beyond the inputs. Where the package `entmax` is installed, eager attention with it is timed too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

import attnzoo
from benchmarks import memory, report
from benchmarks.cases import SDPA, Case, Inputs, Setting, call, package_call, sdpa_call
from benchmarks.correctness import check
from benchmarks.report import Row
from benchmarks.timing import Spread, interleave, ratio
from evals.cells import Refused, split_list
from evals.jobs import load_plugin

# Its whole score matrix is held several times over, and one call takes seconds.
PACKAGE_ROUNDS = 3


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


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("attention", help="check and time variants", description=__doc__)
    size, yes_no = positive(int), argparse.BooleanOptionalAction
    default = Setting(length=1)
    add = parser.add_argument
    add("--device", choices=["cpu"], default="cpu", help="timers for a GPU are not written yet")
    add("--variants", help="a,b(parameter=value); default: every registered variant")
    add("--plugin", type=Path, metavar="FILE.py", help="registers further variants")
    add("--lengths", type=lengths, default=[1024, 2048, 4096], metavar="N,N,…")
    add("--direction", choices=["forward", "both"], default="forward",
        help="both: forward and backward, timed as one")  # fmt: skip
    add("--backend", help="default: what attnzoo chooses")
    add("--learned", action="store_true",
        help="with --direction both: learn what attnzoo.nn.Attention would")  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16", "float16"], default=default.dtype)
    add("--batch", type=size, default=default.batch)
    add("--heads", type=size, default=default.heads)
    add("--head-dim", type=size, default=default.head_dim)
    add("--input-scale", type=positive(float), default=default.input_scale,
        help="q, k and v are N(0, 1) times this; small values flatten the scores")  # fmt: skip
    add("--seed", type=int, default=default.seed)
    add("--threads", type=size, default=default.threads)
    add("--repeats", type=size, default=11, help="rounds at least")
    add("--min-seconds", type=positive(float), default=0.5, help="spent on the rounds at least")
    add("--check-only", action="store_true", help="neither time nor memory")
    add("--time", action=yes_no, default=True)
    add("--memory", action=yes_no, default=True, help="one fresh process per row")
    add("--sdpa", action=yes_no, default=True, help="the yardstick; it takes O(N²) time")
    add("--package-max-length", type=int, default=2048,
        help="longest sequence on which the package entmax is timed; 0: never")  # fmt: skip
    add("--json", metavar="FILE", help="written when all is measured")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.learned and args.direction != "both":
        raise Refused("--learned needs --direction both")
    if args.plugin is not None:
        load_plugin(args.plugin)
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
    fields = Setting.__dataclass_fields__.keys() - {"length"}
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
        settings = {n: v for n, v in vars(args).items() if n not in ("run", "plugin")}
        settings["plugin"] = args.plugin and str(args.plugin)
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
