"""The next token: the time of a call, and the share of a copy's bandwidth that it reads at.

One query for each head against N keys and values, heads in groups as `--heads` and `--kv-heads`
say. A pairwise variant has to read all of k and v once: on a GPU, where nothing of them is left in
a cache, their bytes over the time, in the rate at which the device copies (bytes read and written),
is the share; reading alone may be faster than a copy. Linear variants read a state of one size,
whatever N is: theirs is a call of `linear_attention` on one token, after a state that says N.
Each pairwise result is compared with fp64 first, with some keys (the first, the last, one between)
that no result may leave out unnoticed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.bench import Entrant, Groups
from benchmarks.harness.cases import SOFTMAX, Attend, Case, Inputs, Setting
from benchmarks.harness.options import (
    add_feature_dim,
    add_options,
    bench_of,
    cases_of,
    command,
    positive,
    settle,
    timer_of,
)
from benchmarks.harness.report import Report, Row
from benchmarks.harness.timing import Spread, Timer
from commandline.arguments import numbers
from commandline.errors import UsageError

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 4096, 16384], "batches": [1], "dtype": "float32", "heads": 8,
        "kv_heads": 8, "head_dim": 64, "backend": None, "repeats": 20, "min_seconds": 0.2,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 19)], "batches": [1, 32], "dtype": "bfloat16",
        "heads": 32, "kv_heads": 8, "head_dim": 128, "backend": "decode", "repeats": 20,
        "min_seconds": 0.2,
    },
}  # fmt: skip
COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
# Of a GPU's timer: some 2.5 ms of work on an H200. The host takes up to 1 ms for a token.
LEADS = 8
# A linear variant's state is made of so many tokens at most: its size is the same for any number.
STATE_TOKENS = 64


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "decode", help="check and time one token against N keys", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    device = "default: depends on the device"
    add_options(parser, None, "every one")
    add("--batches", type=numbers, metavar="B,B,…", help=f"sizes of the batch; {device}")
    add("--kv-heads", type=size, metavar="H", help=f"number of key and value heads; {device}")
    add("--head-dim", type=size, metavar="D", help=f"head dimension; {device}")
    add_feature_dim(parser)
    parser.set_defaults(run=command(prepare, measure))


def prepare(args: argparse.Namespace) -> list[Case]:
    settle(args, DEFAULTS)
    if args.heads % args.kv_heads:
        raise UsageError(
            f"--heads must be a multiple of --kv-heads, got {args.heads}, {args.kv_heads}"
        )

    return cases_of(args, max(args.lengths) + 1)  # a state's next token is the N + 1st


def measure(args: argparse.Namespace, cases: list[Case], report: Report, **more: Any) -> None:
    timer = timer_of(args, LEADS)
    copied = copy_rate(timer, args.device, COPY_BYTES[args.device])
    report.more["copy_gb_per_s"] = copied / 1e9
    report.note(f"a large copy moves {copied / 1e9:.0f} GB/s")

    def rate(row: Row) -> dict[str, float]:
        s = row.setting
        if row.kind == "state" or s.device == "cpu" or row.seconds is None:
            return {}  # a CPU's caches know nothing of bandwidth
        size = 2 * s.batch * args.kv_heads * s.length * s.head_dim
        size *= getattr(torch, s.dtype).itemsize
        return {"of_copy": size / row.seconds.median / copied}

    bench = bench_of(args, "decode", timer, rate=rate, **more)
    bench.run(groups(args, cases), report)


def copy_rate(timer: Timer, device: str, size: int) -> float:
    """Bytes per second, read and written, of one large copy."""
    x = torch.ones(size, dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    seconds = timer.rounds({"copy": lambda: y.copy_(x)}, 10, 0.05)["copy"]
    return 2 * size / Spread.of(seconds).median


def groups(args: argparse.Namespace, cases: list[Case]) -> Groups:
    for batch in args.batches:
        for length in args.lengths:
            setting = Setting(
                length, queries=1, batch=batch, heads=args.heads, kv_heads=args.kv_heads,
                head_dim=args.head_dim, dtype=args.dtype, causal=False, seed=args.seed,
                device=args.device,
            )  # fmt: skip
            yield setting, partial(list, entrants(args, cases, setting))


def entrants(args: argparse.Namespace, cases: list[Case], setting: Setting) -> Iterator[Entrant]:
    plain = Inputs.make(setting)
    plant(plain.q, plain.k)
    yield from Entrant.baselines(SOFTMAX, plain, setting, ["sdpa"])
    for case in cases:
        if case.linear is not None:
            make = partial(next_token, case, args.feature_dim, setting)
            yield Entrant(case.spec, case, plain, make, "state")
            continue
        own = plain
        if case.selects:
            own = Inputs.make(setting, case)
            plant(own.q, own.k)
        yield Entrant.of(case, replace(own, params=case.params), args.backend)


def plant(q: Tensor, k: Tensor) -> None:
    """Makes three keys weigh about as much as all others together, for the first head of a group:
    of thousands of equal ones a kernel could lose the last unseen."""
    first, length = q[:, :: q.shape[1] // k.shape[1], 0].float(), k.shape[2]
    along = first / first.square().sum(-1, keepdim=True) * q.shape[-1] ** 0.5
    for at in {0, length // 2, length - 1}:
        k[:, :, at] = (along * (log(length) + 0.5)).to(k.dtype)


def next_token(case: Case, feature_dim: int, setting: Setting) -> Attend:
    """One token more, on the state that few tokens have left at this place of the sequence."""
    few = min(setting.length, STATE_TOKENS)
    key_dim = case.key_dim(setting.head_dim, feature_dim)
    i = Inputs.make(replace(setting, length=few, queries=few, key_dim=key_dim), case)
    options = {"enable_gqa": i.options["enable_gqa"], **case.params}
    _, state = attnzoo.linear_attention(i.q, i.k, i.v, case.variant, **options)
    state = replace(state, length=setting.length)
    one, of_k, of_v = (x[:, :, -1:] for x in (i.q, i.k, i.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.linear_attention(one, of_k, of_v, case.variant, state=state, **options)[0]

    return attend
