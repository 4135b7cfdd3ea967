"""Options that several commands have, and the types of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import attnzoo
from benchmarks.harness.bench import Bench
from benchmarks.harness.cases import Case
from benchmarks.harness.report import Report, Row
from benchmarks.harness.timing import CudaEvents, Timer, WallClock
from commandline.arguments import MOST, add_plugin, numbers, seed
from commandline.errors import UsageError
from commandline.variants import split_list

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")


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


def some_of(names: Sequence[str]):
    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        if text and not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(names)} are expected")
        return chosen if text else []

    return convert


def add_options(parser: argparse.ArgumentParser, device: str | None, variants: str) -> None:
    """What attention, linear and decode have in common. `settle` fills in what is not given."""
    add, size = parser.add_argument, positive(int)
    default = "default: depends on the device"
    words = device or "cuda where torch sees one, else cpu"
    add("--device", choices=DEVICES, default=device, help=f"default: {words}")
    words = f"variants with their parameters; default: {variants}"
    add("--variants", metavar="a,b(x=1)", help=words)
    add_plugin(parser)
    add("--lengths", type=numbers, metavar="N,N,…", help=f"numbers of keys; {default}")
    add("--backend", help="what computes the variants; " + default)
    add("--dtype", choices=DTYPES, help=default)
    add("--heads", type=size, metavar="H", help=f"number of query heads; {default}")
    add("--repeats", type=size, metavar="N", help=f"the least number of rounds; {default}")
    add("--min-seconds", type=positive(float), metavar="S",
        help=f"the least time to spend on the rounds, in seconds; {default}")  # fmt: skip
    add("--threads", type=size, default=2, metavar="N", help="torch's threads (default: 2)")
    add("--seed", type=seed, default=0, help="seed of the inputs (default: 0)")
    add("--json", metavar="FILE", help="a JSON file, written anew after each group")
    add("--markdown", metavar="FILE", help="its tables, written at the same times")


def add_feature_dim(parser: argparse.ArgumentParser) -> None:
    words = "dimension of queries and keys where features grow faster (default: 16)"
    parser.add_argument("--feature-dim", type=positive(int), default=16, metavar="D", help=words)


def command(
    prepare: Callable[[argparse.Namespace], list[Case]],
    measure: Callable[[argparse.Namespace, list[Case], Report], None],
    conclude: Callable[[list[Row], list[Case]], Iterable[str]] = lambda rows, cases: (),
) -> Callable[[argparse.Namespace], int]:
    """What a suite's command runs: ``measure`` what ``prepare`` made of the options, then note what
    ``conclude`` says of all rows."""

    def run(args: argparse.Namespace) -> int:
        cases = prepare(args)
        report = Report.of(args)
        measure(args, cases, report)
        for text in conclude(report.rows, cases):
            report.note(text)
        return report.finish()

    return run


def settle(args: argparse.Namespace, defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills in the device and its defaults.

    Raises:
        UsageError: there is no such device.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        require_cuda("--device cuda")
    for name, value in defaults[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.set_num_threads(args.threads)


def require_cuda(what: str) -> None:
    if not torch.cuda.is_available():
        raise UsageError(f"{what} needs a CUDA device, and torch sees none")


def cases_of(args: argparse.Namespace, longest: int) -> list[Case]:
    """What `--variants` names, or every variant.

    Raises:
        UsageError: one is listed twice or cannot be run, or there is no such backend.
    """
    specs = split_list(args.variants) if args.variants else attnzoo.list_variants()
    if len(set(specs)) < len(specs):
        raise UsageError("a variant is listed twice")
    cases = [Case.parse(spec, longest) for spec in specs]
    try:
        cases[0].plan(args.backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return cases


def timer_of(args: argparse.Namespace, leads: int = 1) -> Timer:
    return CudaEvents(leads=leads) if args.device == "cuda" else WallClock()


def bench_of(args: argparse.Namespace, suite: str, timer: Timer, **more: Any) -> Bench:
    return Bench(suite, timer, repeats=args.repeats, min_seconds=args.min_seconds, **more)
