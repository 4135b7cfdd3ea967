"""Time calls so small that they are almost only overhead: a query (1, 8, 1, 64), 64 keys, fp32.

Compares torch's scaled_dot_product_attention with every variant through `attnzoo.attention` and
through the module `attnzoo.nn.Attention`, on one thread without gradients. The columns are the
median time of a call, its quartiles, and the median minus that of SDPA, all in microseconds.

With --kernels: the host's time per call of the Triton kernels, causal bf16 attention over 128
tokens. A stand-in replaces the GPU driver, so nothing runs on a GPU: the time covers validation,
planning, allocation and Triton's binding, but not the driver's own launch.
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
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case
from benchmarks.harness.options import positive
from benchmarks.harness.report import check_target, environment, headline, write_json
from benchmarks.harness.timing import Spread, interleave
from benchmarks.kernels.compile import require_compiler
from benchmarks.kernels.stand_in import install
from commandline.arguments import add_plugin
from commandline.errors import UsageError

HEADS, HEAD_DIM, KEYS = 8, 64, 64
SDPA = "sdpa"
TOKENS = 128  # of kernel calls
CALLS = 50  # calls per measurement, because one call is near the clock's resolution


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "overhead", help="Time the overhead of small calls", description=__doc__
    )
    add = parser.add_argument
    add_plugin(parser)
    add(
        "--repeats", type=positive(int), default=15, metavar="N", help="Time N rounds (default: 15)"
    )
    add(
        "--kernels", action="store_true",
        help="Time the host's part of kernel calls instead, with a stand-in for the GPU driver",
    )  # fmt: skip
    add("--json", metavar="FILE", help="Write results to a JSON file")
    add(
        "--against", type=Path, metavar="FILE",
        help="Add a column with the medians of an earlier --json FILE",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_target("--json", args.json)
    before = {} if args.against is None else medians(args.against)
    torch.set_num_threads(1)
    where = environment()
    made = kernel_calls() if args.kernels else calls()
    width = 2 + max(map(len, made))
    header = f"{'call':<{width}}{'µs':>8}{'quartiles':>16}{'− sdpa' if SDPA in made else '':>9}"
    print(f"{headline(where)}\n{header}{'earlier' if before else '':>9}".rstrip())
    with torch.no_grad():
        seconds = interleave({n: repeated(call) for n, call in made.items()}, args.repeats, 0.0)
    found = {n: Spread.of([s / CALLS * 1e6 for s in spent]) for n, spent in seconds.items()}
    for name, x in found.items():
        old = f"{before[name]:.1f}" if name in before else ""
        spread = f"{x.lower:.1f}–{x.upper:.1f}"
        difference = f"{x.median - found[SDPA].median:.1f}" if SDPA in found else ""
        print(f"{name:<{width}}{x.median:>8.1f}{spread:>16}{difference:>9}{old:>9}".rstrip())
    if args.json:
        times = {name: asdict(spread) for name, spread in found.items()}
        write_json(args.json, {"environment": where, "microseconds": times})
    return 0


def medians(path: Path) -> dict[str, float]:
    """The median time of each call in microseconds, by name, from an earlier run's JSON file.

    Raises:
        UsageError: the file is not from this command.
    """
    try:
        found = json.loads(path.read_text())["microseconds"]
        return {name: float(spread["median"]) for name, spread in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--against must be a file written by --json, got {path}") from error


def calls() -> dict[str, Callable[[], object]]:
    q = torch.randn(1, HEADS, 1, HEAD_DIM)
    k, v = torch.randn(2, 1, HEADS, KEYS, HEAD_DIM)
    made: dict[str, Callable[[], object]] = {SDPA: partial(F.scaled_dot_product_attention, q, k, v)}
    cases = [Case.parse(name, KEYS) for name in attnzoo.list_variants()]
    made |= {c.spec: partial(attnzoo.attention, q, k, v, c.variant, **c.params) for c in cases}
    modules = {c.spec: attnzoo.nn.Attention(c.variant, HEADS, **c.params) for c in cases}
    return made | {f"nn.Attention {name}": partial(m, q, k, v) for name, m in modules.items()}


def kernel_calls() -> dict[str, Callable[[], object]]:
    require_compiler("overhead --kernels")
    install()
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, HEAD_DIM).bfloat16()
    made: dict[str, Callable[[], object]] = {}
    for case in (Case.parse(name, TOKENS) for name in attnzoo.list_variants()):
        plan = attnzoo.explain(q, k, v, case.variant, is_causal=True, **case.params)
        if any(x.backend == "flash" and x.reason is None for x in plan.candidates):
            options = dict(is_causal=True, backend="flash", **case.params)
            made[case.spec] = partial(attnzoo.attention, q, k, v, case.variant, **options)
            made[f"{case.spec}, forward and backward"] = partial(_train, q, k, v, case)
    return made


def _train(q: Tensor, k: Tensor, v: Tensor, case: Case) -> None:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = dict(is_causal=True, backend="flash", **case.params)
        attnzoo.attention(*leaves, case.variant, **options).backward(v)


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(CALLS):
            call()

    return several
