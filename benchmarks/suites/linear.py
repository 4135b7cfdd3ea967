"""Linear forms against softmax, against their own pairwise forms, and against fla's kernels.

Variants are called at the head dimension; those whose features grow faster than it with queries and
keys of `--feature-dim`, as Based has it, and values of the head dimension. Causal; each result is
compared with fp64 before it is timed. All of one length and direction are timed in turn, round by
round. In the end: from which length on a linear form is faster than softmax and than its own
pairwise form.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.harness.baselines import installed
from benchmarks.harness.bench import DIRECTIONS, Entrant, Groups
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting
from benchmarks.harness.options import (
    add_feature_dim,
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
from commandline.errors import UsageError

BASELINE = "sdpa"
PAIRWISE = ", pairwise"  # after a variant's name
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 2048, 4096, 8192, 16384], "dtype": "float32", "heads": 8, "batch": 1,
        "pairwise_max": 4096, "backend": "linear", "repeats": 5, "min_seconds": 0.2,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 18)], "dtype": "bfloat16", "heads": 16, "batch": None,
        "pairwise_max": 32768, "backend": "flash_linear", "repeats": 5, "min_seconds": 0.2,
    },
}  # fmt: skip
# What computes pairwise forms. Without one the pairs are made by definition, in blocks.
OF_PAIRS = {"cpu": "tiled", "cuda": "flash"}
# At the longest length there is one sequence; at others as many tokens.
TOKENS = 2**17


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "linear", help="check and time linear forms beside softmax", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    add_options(parser, None, "every one with a linear form")
    add("--direction", type=some_of(DIRECTIONS), default=["forward", "both"],
        metavar=",".join(DIRECTIONS),
        help="default: forward, and forward and backward together")  # fmt: skip
    add("--batch", type=size, metavar="B",
        help="sequences of a batch; default: as many as make 131072 tokens per head on a GPU, 1 on "
        "a CPU")  # fmt: skip
    add("--head-dim", type=size, default=64, metavar="D", help="head dimension (default: 64)")
    add_feature_dim(parser)
    add("--pairwise-max", type=int, metavar="N",
        help="longest sequence for the pairwise forms; 0: never")  # fmt: skip
    parser.set_defaults(run=command(prepare, measure, crossovers))


def prepare(args: argparse.Namespace) -> list[Case]:
    """What `--variants` names, each of them with a linear form; or all that have one."""
    settle(args, DEFAULTS)
    if not args.direction:
        raise UsageError(f"--direction must name one of {', '.join(DIRECTIONS)}")

    cases = cases_of(args, max(args.lengths))
    for case in cases:
        if args.variants and case.linear is None:
            raise UsageError(f"{case.spec} has no linear form")
    return [case for case in cases if case.linear is not None]


def measure(args: argparse.Namespace, cases: list[Case], report: Report, **more: Any) -> None:
    def rate(row: Row) -> dict[str, float]:
        assert row.seconds is not None
        tokens = row.setting.batch * row.setting.length  # of all heads
        return {"ns_per_token": row.seconds.median / tokens * 1e9}

    if not installed("fla") and args.device == "cuda":
        report.note("fla is not installed: nothing is compared with it")
    bench = bench_of(args, "linear", timer_of(args), directions=args.direction, rate=rate, **more)
    bench.run(groups(args, cases), report)


def groups(args: argparse.Namespace, cases: list[Case]) -> Groups:
    for length in args.lengths:
        setting = Setting(
            length, batch=args.batch or max(1, TOKENS // length), heads=args.heads,
            head_dim=args.head_dim, dtype=args.dtype, seed=args.seed, device=args.device,
        )  # fmt: skip
        yield setting, partial(list, entrants(args, cases, setting))


def entrants(args: argparse.Namespace, cases: list[Case], setting: Setting) -> Iterator[Entrant]:
    gradients = args.direction != ["forward"]
    plain = Inputs.make(setting, gradients=gradients)
    yield from Entrant.baselines(SOFTMAX, plain, setting, [BASELINE])
    for case in cases:
        own = replace(setting, key_dim=case.key_dim(args.head_dim, args.feature_dim))
        inputs = Inputs.make(own, case, gradients)
        yield Entrant.of(case, inputs, args.backend)
        if setting.length <= args.pairwise_max:
            backend = OF_PAIRS[args.device] if case.pairwise else "tiled"
            yield Entrant.of(case, inputs, backend, case.spec + PAIRWISE)
        if args.device == "cuda":
            yield from Entrant.baselines(case, in_rows(inputs), own, ["fla"])


def in_rows(inputs: Inputs) -> Inputs:
    """The same with heads inside of rows, (B, N, H, D), which is fla's own layout."""
    made = {
        name: x.detach()
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        .requires_grad_(x.requires_grad)
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    return replace(inputs, **made)


def crossovers(rows: Iterable[Row], cases: Iterable[Case]) -> Iterator[str]:
    """From which length on a linear form was faster, at all of them where both should have run."""
    of = {(row.direction, row.name, row.setting.length): row for row in rows}
    for direction, variant in product(DIRECTIONS, (case.spec for case in cases)):
        for other in (BASELINE, variant + PAIRWISE):
            both = sorted(
                n for d, name, n in of
                if (d, name) == (direction, variant) and (d, other, n) in of
            )  # fmt: skip
            faster: list[int] = []
            for n in both:
                share = of[direction, variant, n].ratios.get(other)
                # What could not be timed is no proof.
                faster = [*faster, n] if share is not None and share.median < 1 else []
            if both:
                since = f"from N = {faster[0]} on" if faster else "up to the longest here"
                verb = "faster" if faster else "not faster"
                yield f"{variant}, {direction}: {verb} than {other} {since}"
