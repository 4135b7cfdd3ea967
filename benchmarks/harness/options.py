"""Options shared by several commands, and the types of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
Defaults = Mapping[str, Mapping[str, Any]]  # device -> option -> value


def positive(kind: type):
    """The type of an argument that is a positive int or float."""
    words = f"an int from 1 to {MOST - 1}" if kind is int else "a finite number > 0"

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < (MOST if kind is int else float("inf")):
            raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}")
        return value

    return convert


def subset_of(names: Sequence[str]):
    """The type of an argument that lists some of these names; the empty string lists none."""

    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        if text and not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(
                f"must be a comma-separated list of {', '.join(names)}, got {text!r}"
            )
        return chosen if text else []

    return convert


def by_device(defaults: Defaults, name: str) -> str:
    """The help text that states an option's default on each device."""

    def shown(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value or "automatic")

    texts = [f"{shown(values[name])} on {device}" for device, values in defaults.items()]
    return f"(default: {'; '.join(texts)})"


def add_options(
    parser: argparse.ArgumentParser, defaults: Defaults, device: str | None, variants: str
) -> None:
    """Adds the options that attention, linear and decode share; see `apply_defaults`."""
    add, size, default = parser.add_argument, positive(int), partial(by_device, defaults)
    words = device or "cuda if torch sees a CUDA device, otherwise cpu"
    add("--device", choices=DEVICES, default=device, help=f"Run on this device (default: {words})")
    add("--variants", metavar="a,b(x=1)",
        help=f"Measure these variants (default: {variants})")  # fmt: skip
    add_plugin(parser)
    add("--lengths", type=numbers, metavar="N,N,…",
        help=f"Use these numbers of keys {default('lengths')}")  # fmt: skip
    add("--backend", help=f"Compute the variants with this backend {default('backend')}")
    add("--dtype", choices=DTYPES, help=f"Use inputs of this dtype {default('dtype')}")
    add("--heads", type=size, metavar="H", help=f"Use H query heads {default('heads')}")
    add("--repeats", type=size, metavar="N", help=f"Time at least N rounds {default('repeats')}")
    add("--min-seconds", type=positive(float), metavar="S",
        help=f"Time the rounds of a group for at least S seconds {default('min_seconds')}",
    )  # fmt: skip
    add("--threads", type=size, default=2, metavar="N",
        help="Use N CPU threads in torch (default: 2)")  # fmt: skip
    add("--seed", type=seed, default=0, help="Draw the inputs with this seed (default: 0)")
    add_files(parser, "group")


def add_files(parser: argparse.ArgumentParser, group: str) -> None:
    """Adds the options that name the files of a `Report`. ``group``: the word for a group."""
    add = parser.add_argument
    add("--json", metavar="FILE", help=f"Write results to a JSON file after each {group}")
    add("--markdown", metavar="FILE", help=f"Write tables to a Markdown file after each {group}")
    add("--journal", metavar="FILE", help="Append each row to a file of JSON lines at once")


def add_feature_dim(parser: argparse.ArgumentParser) -> None:
    words = (
        "Use q and k of dimension D for variants whose number of features grows faster than the "
        "dimension (default: 16)"
    )
    parser.add_argument("--feature-dim", type=positive(int), default=16, metavar="D", help=words)


def command(
    prepare: Callable[[argparse.Namespace], list[Case]],
    measure: Callable[[argparse.Namespace, list[Case], Report], None],
    conclude: Callable[[list[Row], list[Case]], Iterable[str]] = lambda rows, cases: (),
) -> Callable[[argparse.Namespace], int]:
    """The function that runs a suite's command and returns its exit status.

    prepare: checks the options and returns the cases. measure: adds rows to the report. conclude:
    returns the report's last notes, from all rows.
    """

    def run(args: argparse.Namespace) -> int:
        cases = prepare(args)
        report = Report.of(args)
        measure(args, cases, report)
        for text in conclude(report.rows, cases):
            report.note(text)
        return report.finish()

    return run


def apply_defaults(args: argparse.Namespace, defaults: Defaults) -> None:
    """Fills in the device, and the device's defaults for options that were not given.

    Raises:
        UsageError: the device is not available.
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
        raise UsageError(f"{what} requires a CUDA device, but torch sees none")


def cases_of(args: argparse.Namespace, longest: int) -> list[Case]:
    """The cases that ``--variants`` lists, or one for each registered variant.

    Raises:
        UsageError: a variant is listed twice or invalid, or the backend is unknown.
    """
    specs = split_list(args.variants) if args.variants else attnzoo.list_variants()
    if len(set(specs)) < len(specs):
        raise UsageError(f"--variants must not list a variant twice, got {args.variants!r}")
    cases = [Case.parse(spec, longest) for spec in specs]
    try:
        cases[0].plan(args.backend)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return cases


def timer_of(args: argparse.Namespace, flushes: int = 1) -> Timer:
    return CudaEvents(flushes=flushes) if args.device == "cuda" else WallClock()


def bench_of(args: argparse.Namespace, suite: str, timer: Timer, **more: Any) -> Bench:
    return Bench(
        suite, timer, repeats=args.repeats, min_seconds=args.min_seconds,
        in_parts=args.device == "cuda", **more,
    )  # fmt: skip
