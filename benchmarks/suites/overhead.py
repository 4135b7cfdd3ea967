"""Time calls so small that they are almost only overhead: a query (1, 8, 1, 64), 64 keys, fp32.

Compares torch's scaled_dot_product_attention with every variant through `attnzoo.attention` and
through the module `attnzoo.nn.Attention`, on one thread without gradients. The columns are the
median time of a call, its quartiles, and the median minus that of SDPA, all in microseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import attnzoo
from benchmarks.harness.cases import Case
from benchmarks.harness.options import positive
from benchmarks.harness.report import check_target, environment, headline, write_json
from benchmarks.harness.timing import Spread, interleave
from commandline.arguments import add_plugin
from commandline.errors import UsageError

HEADS, HEAD_DIM, KEYS = 8, 64, 64
SDPA = "sdpa"
CALLS = 50  # calls per measurement, because one call is near the clock's resolution


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "overhead", help="Time the overhead of small calls", description=__doc__
    )
    add_plugin(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--repeats", type=positive(int), default=15, metavar="N", help="Time N rounds (default: 15)"
    )
    add("--json", metavar="FILE", help="Write results to a JSON file")
    add(
        "--against", type=Path, metavar="FILE",
        help="Add a column with the medians of an earlier --json FILE",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return time_calls(args, calls())


def time_calls(args: argparse.Namespace, calls: dict[str, Callable[[], object]]) -> int:
    """Time the calls, print the table and write --json."""
    check_target("--json", args.json)
    before = {} if args.against is None else medians(args.against)
    torch.set_num_threads(1)
    where = environment()
    width = 2 + max(map(len, calls))
    header = f"{'call':<{width}}{'µs':>8}{'quartiles':>16}{'− sdpa' if SDPA in calls else '':>9}"
    print(f"{headline(where)}\n{header}{'earlier' if before else '':>9}".rstrip())
    with torch.no_grad():
        seconds = interleave({n: repeated(call) for n, call in calls.items()}, args.repeats, 0.0)
    spreads = {n: Spread.of([s / CALLS * 1e6 for s in spent]) for n, spent in seconds.items()}
    for name, x in spreads.items():
        old = f"{before[name]:.1f}" if name in before else ""
        spread = f"{x.lower:.1f}–{x.upper:.1f}"
        difference = f"{x.median - spreads[SDPA].median:.1f}" if SDPA in spreads else ""
        print(f"{name:<{width}}{x.median:>8.1f}{spread:>16}{difference:>9}{old:>9}".rstrip())
    if args.json:
        times = {name: asdict(spread) for name, spread in spreads.items()}
        write_json(args.json, {"environment": where, "microseconds": times})
    return 0


def medians(path: Path) -> dict[str, float]:
    """The median time of each call in microseconds, by name, from an earlier run's JSON file.

    Raises:
        UsageError: the file is not from this command.
    """
    try:
        spreads = json.loads(path.read_text())["microseconds"]
        return {name: float(spread["median"]) for name, spread in spreads.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--against must be a file written by --json, got {path}") from error


def calls() -> dict[str, Callable[[], object]]:
    q = torch.randn(1, HEADS, 1, HEAD_DIM)
    k, v = torch.randn(2, 1, HEADS, KEYS, HEAD_DIM)
    functions: dict[str, Callable[[], object]] = {}
    functions[SDPA] = partial(F.scaled_dot_product_attention, q, k, v)
    cases = [Case.parse(name, KEYS) for name in attnzoo.list_variants()]
    for c in cases:
        functions[c.spec] = partial(attnzoo.attention, q, k, v, c.variant, **c.params)
    modules = {
        c.spec: attnzoo.nn.Attention(c.variant, HEADS, head_dim=HEAD_DIM, **c.params) for c in cases
    }
    return functions | {f"nn.Attention {name}": partial(m, q, k, v) for name, m in modules.items()}


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(CALLS):
            call()

    return repeat
