"""Check linear forms against fp64, then time them beside softmax, their pairwise forms and fla.

All calls are causal. Variants whose number of features grows faster than the dimension, such as
taylor, use queries and keys of dimension `--feature-dim`, as in the Based paper. Values have the
head dimension. The last lines give the length from which each linear form is faster than softmax,
and the length from which it is faster than its pairwise form.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.harness.baselines import installed
from benchmarks.harness.bench import DIRECTIONS, Groups, Implementation
from benchmarks.harness.cases import SOFTMAX, Case, Inputs, Setting
from benchmarks.harness.options import (
    add_feature_dim,
    add_options,
    apply_defaults,
    bench_of,
    by_device,
    cases_of,
    command,
    positive,
    subset_of,
    timer_of,
)
from benchmarks.harness.report import Report, Row
from commandline.errors import UsageError

BASELINE = "sdpa"
PAIRWISE = ", pairwise"  # appended to a variant's name
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
# Backends for pairwise forms. Variants without a pairwise form run on `tiled`.
PAIRWISE_BACKENDS = {"cpu": "tiled", "cuda": "flash"}
# Default B·N at every length on a GPU.
TOKENS = 2**17


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("linear", help="Check and time linear forms", description=__doc__)
    add, size, default = parser.add_argument, positive(int), partial(by_device, DEFAULTS)
    add_options(parser, DEFAULTS, None, "all with a linear form")
    add("--direction", type=subset_of(DIRECTIONS), default=["forward", "both"],
        metavar=",".join(DIRECTIONS),
        help="Measure these directions (default: forward,both)")  # fmt: skip
    add("--batch", type=size, metavar="B",
        help="Use B sequences (default: 1 on a CPU, 131072 / N on a GPU)")  # fmt: skip
    add("--head-dim", type=size, default=64, metavar="D", help="Use head dimension D (default: 64)")
    add_feature_dim(parser)
    add("--pairwise-max", type=int, metavar="N",
        help=f"Time pairwise forms up to length N; 0 for never {default('pairwise_max')}",
    )  # fmt: skip
    parser.set_defaults(run=command(prepare, measure, crossovers))


def prepare(args: argparse.Namespace) -> list[Case]:
    """The cases in ``--variants``, or by default all registered variants with a linear form."""
    apply_defaults(args, DEFAULTS)
    if not args.direction:
        raise UsageError(f"--direction must list some of {', '.join(DIRECTIONS)}, got ''")
    cases = cases_of(args, max(args.lengths))
    for case in cases:
        if args.variants and case.linear is None:
            raise UsageError(f"--variants must list variants with a linear form, got {case.spec}")
    return [case for case in cases if case.linear is not None]


def measure(args: argparse.Namespace, cases: list[Case], report: Report) -> None:
    def rate(row: Row) -> dict[str, float]:
        assert row.seconds is not None
        tokens = row.setting.batch * row.setting.length
        return {"ns_per_token": row.seconds.median / tokens * 1e9}

    if not installed("fla") and args.device == "cuda":
        report.note("fla is not installed and therefore not measured")
    bench = bench_of(args, "linear", timer_of(args), directions=args.direction, rate=rate)
    bench.measure(groups(args, cases), report)


def groups(args: argparse.Namespace, cases: list[Case]) -> Groups:
    for length in args.lengths:
        setting = Setting(
            length, batch=args.batch or max(1, TOKENS // length), heads=args.heads,
            head_dim=args.head_dim, dtype=args.dtype, seed=args.seed, device=args.device,
        )  # fmt: skip
        yield setting, partial(list, implementations(args, cases, setting))


def implementations(
    args: argparse.Namespace, cases: list[Case], setting: Setting
) -> Iterator[Implementation]:
    gradients = args.direction != ["forward"]
    plain = Inputs.make(setting, gradients=gradients)
    yield from Implementation.baselines(SOFTMAX, plain, setting, [BASELINE])
    for case in cases:
        case_setting = replace(setting, key_dim=case.key_dim(args.head_dim, args.feature_dim))
        inputs = Inputs.make(case_setting, case, gradients)
        yield Implementation.of(case, inputs, args.backend)
        backend = PAIRWISE_BACKENDS[args.device] if case.pairwise else "tiled"
        # On a GPU, one call of `tiled` takes seconds at these lengths.
        timed = args.device == "cpu" or backend != "tiled"
        if timed and setting.length <= args.pairwise_max:
            yield Implementation.of(case, inputs, backend, case.spec + PAIRWISE)
        if args.device == "cuda":
            yield from Implementation.baselines(case, in_fla_layout(inputs), case_setting, ["fla"])


def in_fla_layout(inputs: Inputs) -> Inputs:
    """A copy of the inputs that is contiguous in memory as (B, N, H, D), which is fla's layout."""
    copies = {
        name: x.detach()
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        .requires_grad_(x.requires_grad)
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    return replace(inputs, **copies)


def crossovers(rows: Iterable[Row], cases: Iterable[Case]) -> Iterator[str]:
    """One sentence per linear form and baseline, with the length from which the form is faster."""
    by_point = {(row.direction, row.name, row.setting.length): row for row in rows}
    for direction, variant in product(DIRECTIONS, (case.spec for case in cases)):
        for other in (BASELINE, variant + PAIRWISE):
            lengths = sorted(
                n for d, name, n in by_point
                if (d, name) == (direction, variant) and (d, other, n) in by_point
            )  # fmt: skip
            faster: list[int] = []
            for n in lengths:
                share = by_point[direction, variant, n].ratios.get(other)
                # A length that was not timed counts as slower.
                faster = [*faster, n] if share is not None and share.median < 1 else []
            if lengths:
                text = f"not faster than {other} at N = {lengths[-1]}, the longest measured"
                if faster:
                    text = f"faster than {other} from N = {faster[0]} on"
                yield f"{variant}, {direction}: {text}"
