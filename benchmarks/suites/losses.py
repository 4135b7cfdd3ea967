"""Check losses of output layers against fp64, then measure time and memory, forward + backward.

The first tables, one for each number of tokens, have a row for each variant with
`attnzoo.losses.linear_loss` and one for each function for cross entropy in torch. Another table has
the losses that need only the mean and the Gram matrix of the classes (taylor, `z_loss` and
`spherical_loss`), on a layer with many classes and few dimensions. The next table has the losses of
the package entmax, on at most 1024 tokens because they hold several tokens × classes matrices. The
last table has `attnzoo.topk_probabilities` beside softmax and topk.

Columns: the error on a small layer that uses the largest share of its budget, and this share; the
median time and its quartiles; the time divided by that of each loss of softmax in the same rounds
(below 1 is faster); the peak memory beyond inputs and gradients; and this memory divided by the
memory of all tokens × classes scores in fp32.

The last lines give the ratios for which attnzoo has targets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import memory
from benchmarks.harness.baselines import entmax_loss, installed
from benchmarks.harness.bench import Bench, Groups, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Setting, call
from benchmarks.harness.options import (
    DEVICES,
    DTYPES,
    add_files,
    apply_defaults,
    by_device,
    cases_of,
    command,
    positive,
    timer_of,
)
from benchmarks.harness.output_layers import (
    FUSED,
    MOMENT_LOSSES,
    OutputSetting,
    check_loss,
    check_top,
    error_of_loss,
    loss_of,
    losses_of_torch,
    output_inputs,
    softmax_then_topk,
    top_inputs,
    top_probabilities,
)
from benchmarks.harness.report import Report, Row
from benchmarks.harness.timing import Timer, WallClock
from commandline.arguments import add_plugin, numbers, seed
from commandline.errors import UsageError
from commandline.variants import load_plugin

VARIANTS = "softmax,sparsemax,entmax,entmax(alpha=1.3),sigmoid,topk(top_k=50),sink,ssmax,taylor"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "tokens": [2048, 8192], "classes": 32000, "dims": [512, 256], "many_classes": 100_000,
        "dtype": "float32", "repeats": 5, "min_seconds": 0.5, "variants": VARIANTS,
    },
    "cuda": {
        "tokens": [8192], "classes": 128256, "dims": [2048], "many_classes": 262_144,
        "dtype": "bfloat16", "repeats": 10, "min_seconds": 0.5, "variants": VARIANTS,
    },
}  # fmt: skip
QUICK: dict[str, Any] = {
    "tokens": [256], "classes": 4000, "dims": [64], "many_classes": 10_000, "repeats": 3,
    "min_seconds": 0.01,
}  # fmt: skip
MANY_DIM = 128  # dimension of the layer with many classes
PACKAGE_TOKENS = 1024
TOP, TOP_TOKENS, TOP_CLASSES = 50, 64, 128_000
TOP_ROW, PACKAGE = "topk_probabilities", "package entmax"
LONGEST = 300.0  # seconds after which no further round of a table starts


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "losses", help="Check and time losses of output layers", description=__doc__
    )
    add, size, default = parser.add_argument, positive(int), partial(by_device, DEFAULTS)
    words = "cuda if torch sees a CUDA device, otherwise cpu"
    add("--device", choices=DEVICES, help=f"Run on this device (default: {words})")
    add("--variants", metavar="a,b(x=1)", help=f"Measure these variants {default('variants')}")
    add_plugin(parser)
    add("--tokens", type=numbers, metavar="N,N,…",
        help=f"Use these numbers of tokens {default('tokens')}")  # fmt: skip
    add("--dims", type=numbers, metavar="D,D,…",
        help=f"Use these dimensions, one for each number of tokens {default('dims')}")  # fmt: skip
    add("--classes", type=size, metavar="V", help=f"Use V classes {default('classes')}")
    add("--many-classes", type=size, metavar="V",
        help=f"Use V classes and D = {MANY_DIM} for taylor {default('many_classes')}")  # fmt: skip
    add("--score-scale", type=positive(float), default=1.0, metavar="X",
        help="Draw scores with standard deviation X (default: 1)")  # fmt: skip
    add("--quick", action="store_true", help="Use small layers, if no sizes are given")
    add("--dtype", choices=DTYPES, help=f"Use inputs of this dtype {default('dtype')}")
    add("--repeats", type=size, metavar="N", help=f"Time at least N rounds {default('repeats')}")
    add("--min-seconds", type=positive(float), metavar="S",
        help=f"Time the rounds of a table for at least S seconds {default('min_seconds')}",
    )  # fmt: skip
    add("--threads", type=size, default=2, metavar="N",
        help="Use N CPU threads in torch (default: 2)")  # fmt: skip
    add("--seed", type=seed, default=0, help="Draw the inputs with this seed (default: 0)")
    add("--memory", action=argparse.BooleanOptionalAction, default=True,
        help="Measure memory (default), on a CPU in a new process for each table row")  # fmt: skip
    add("--peak-of", metavar="ROW",
        help="Only print the peak memory of this row in bytes; used by --memory")  # fmt: skip
    add_files(parser, "table")
    timed = command(prepare, measure, conclude)
    parser.set_defaults(run=lambda args: print_peak(args) if args.peak_of else timed(args))


def prepare(args: argparse.Namespace) -> list[Case]:
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    apply_defaults(args, DEFAULTS)
    if len(args.dims) != len(args.tokens):
        raise UsageError(
            f"--dims must list one dimension for each of the {len(args.tokens)} numbers of "
            f"--tokens, got {len(args.dims)}"
        )
    args.backend = None  # losses have no choice of backends
    return cases_of(args, args.classes)


def measure(args: argparse.Namespace, cases: list[Case], report: Report) -> None:
    # `Bench` calls each function once before its rounds. A call takes seconds on a CPU, so that no
    # further warm-up is needed.
    timer = WallClock(warmup=0) if args.device == "cpu" else timer_of(args)
    if not installed("entmax"):
        report.note("the package entmax is not installed and therefore not measured")
    for direction, groups in (("both", layers(args, cases)), ("forward", top(args))):
        bench = LossBench(
            "losses",
            timer,
            (direction,),
            args.repeats,
            args.min_seconds,
            LONGEST,
            in_parts=args.device == "cuda",
        )
        if args.memory:
            bench.memory = partial(peak_bytes, args, timer)
        bench.measure(groups, report)


class LossBench(Bench):
    """A `Bench` for output layers. Losses are checked on a small layer, the same for all tables."""

    def check(self, e: Implementation, setting: Setting) -> None:
        assert isinstance(setting, OutputSetting)
        for row in e.rows.values():
            if setting.top:
                row.check = check_top(e.attend, setting)
            elif e.kind == "baseline":
                row.error = error_of_loss(e.attend, e.case, setting)
            else:
                row.check = check_loss(e.attend, e.name, e.case, setting)


# ---- the rows -----------------------------------------------------------------------------------


def layers(args: argparse.Namespace, cases: list[Case]) -> Groups:
    settings = [setting_of(args, n, d) for n, d in zip(args.tokens, args.dims, strict=True)]
    for setting in settings:
        chosen = [case for case in cases if not uses_moments(case)]
        yield setting, partial(list, implementations(chosen, setting))
    chosen = [case for case in cases if uses_moments(case)]
    if chosen:
        many = replace(settings[-1], classes=args.many_classes, head_dim=MANY_DIM, moments=True)
        yield many, partial(list, implementations(chosen, many))
    chosen = [case for case in cases if entmax_loss(case)]
    if chosen:
        few = replace(settings[0], length=min(PACKAGE_TOKENS, args.tokens[0]), packages=True)
        yield few, partial(list, implementations(chosen, few))


def top(args: argparse.Namespace) -> Groups:
    setting = setting_of(args, TOP_TOKENS, 1)
    setting = replace(setting, classes=args.classes if args.quick else TOP_CLASSES, top=TOP)
    yield setting, partial(list, implementations([], setting))


def setting_of(args: argparse.Namespace, tokens: int, dim: int) -> OutputSetting:
    return OutputSetting(
        tokens, head_dim=dim, classes=args.classes, dtype=args.dtype, input_scale=args.score_scale,
        seed=args.seed, device=args.device, causal=False,
    )  # fmt: skip


def uses_moments(case: Case) -> bool:
    """Whether the loss can be computed without scores, because φ is a quadratic polynomial."""
    form = case.pairwise
    return form is not None and form.activation.quadratic is not None


def implementations(cases: list[Case], setting: OutputSetting) -> Iterator[Implementation]:
    """The rows of a table: baselines for softmax, then softmax, then the other cases."""
    if setting.top:
        inputs = top_inputs(setting)
        make = partial(softmax_then_topk, TOP)
        yield Implementation("softmax, topk", SOFTMAX, inputs, make, "baseline")
        yield Implementation(TOP_ROW, SOFTMAX, inputs, partial(top_probabilities, TOP))
        return
    inputs = output_inputs(setting)
    if not (setting.packages or setting.moments):
        for name, make in losses_of_torch().items():
            yield Implementation(name, SOFTMAX, inputs, make, "baseline")
    for case in [SOFTMAX, *(case for case in cases if case != SOFTMAX)]:
        yield Implementation(case.spec, case, inputs, partial(loss_of, case))
        if setting.packages:
            for name, make in entmax_loss(case).items():
                yield Implementation(name, case, inputs, make, "baseline")
    if setting.moments:
        for name, loss in MOMENT_LOSSES.items():
            yield Implementation(name, SOFTMAX, inputs, partial(lambda x: x, loss))


# ---- memory -------------------------------------------------------------------------------------


def peak_bytes(args: argparse.Namespace, timer: Timer, e: Implementation, row: Row) -> int | None:
    """The peak memory beyond inputs and gradients.

    Except for top-k probabilities, the row gets the ratio of this memory to that of all scores.
    """
    setting = row.setting
    assert isinstance(setting, OutputSetting)
    if args.device == "cuda":
        peak = timer.peak_bytes(call(e.attend, e.inputs, row.direction))
    else:
        request = {"name": e.name, "case": asdict(e.case), "setting": asdict(setting),
            "direction": row.direction, "threads": args.threads,
            "plugin": args.plugin and str(args.plugin.resolve())}  # fmt: skip
        peak = memory.in_new_process(["losses", "--peak-of", json.dumps(request)], e.name)
    if peak is None or setting.top:
        return peak
    peak -= setting.gradient_bytes
    row.figures["of_scores"] = peak / setting.score_bytes
    return peak


def print_peak(args: argparse.Namespace) -> int:
    """Measures and prints the peak memory that `peak_bytes` requested from this process."""
    request = json.loads(args.peak_of)
    torch.set_num_threads(request["threads"])
    if request["plugin"] is not None:
        load_plugin(Path(request["plugin"]))
    case, setting = Case(**request["case"]), OutputSetting(**request["setting"])

    def prepare(setting: OutputSetting) -> Callable[[], object]:
        members = implementations([case], setting)
        e = next(e for e in members if e.name == request["name"])
        return call(e.make(), e.inputs, request["direction"])

    # The small call allocates the memory of libraries and threads, which should not be counted.
    prepare(setting.small)()
    print(memory.peak_beyond(prepare(setting)))
    return 0


# ---- the ratios for which attnzoo has targets ---------------------------------------------------


def conclude(rows: Iterable[Row], cases: Iterable[Case]) -> Iterator[str]:
    """One sentence for each target whose rows were measured."""
    for row in rows:
        ratios = {name: spread.median for name, spread in row.ratios.items()}
        where = f"at {row.setting.title}, N={row.setting.length}"
        if row.kind == "baseline":
            continue
        if row.name == TOP_ROW and ratios:
            yield f"{row.name}: {1 / ratios['softmax, topk']:.2f} × faster than softmax and topk"
        elif row.case == SOFTMAX and (fused := [ratios[n] for n in FUSED if n in ratios]):
            yield f"softmax: {max(fused):.2f} × the time of the faster linear_cross_entropy {where}"
        elif SOFTMAX.spec in ratios:
            share = ratios[SOFTMAX.spec]
            if uses_moments(row.case) or row.name in MOMENT_LOSSES:
                yield f"{row.name}: {1 / share:.1f} × faster than softmax {where}"
            else:
                yield f"{row.name}: {share:.2f} × the time of softmax {where}"
        for name, share in ratios.items():
            if PACKAGE in name and row.kind == "variant" and row.case != SOFTMAX:
                yield f"{row.name}: {1 / share:.1f} × faster than the package entmax {where}"
    shares = [row.figures["of_scores"] for row in rows
              if row.kind == "variant" and "of_scores" in row.figures]  # fmt: skip
    if shares:
        yield f"peak memory of attnzoo: at most {max(shares):.3f} of tokens × classes × 4 bytes"
