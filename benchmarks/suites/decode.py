"""Check and time decoding: one query per head against N keys.

Pairwise variants read all keys and values once. On a GPU the table shows the bytes read per second,
divided by the bytes per second that a large copy reads and writes; reading alone may be faster than
a copy. The GPU's cache is flushed before each call. Linear variants process one token with
`attnzoo.linear_attention` and a state whose size does not depend on N. Before timing, results of
pairwise variants are compared with fp64. In this check the first, the middle and the last key get
large weights, so that the check detects a missing key.
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
from benchmarks.harness.bench import Groups, Implementation
from benchmarks.harness.cases import SOFTMAX, Attend, Case, Inputs, Setting
from benchmarks.harness.options import (
    add_feature_dim,
    add_options,
    apply_defaults,
    bench_of,
    by_device,
    cases_of,
    command,
    positive,
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
# Number of buffer writes before each timed call. An H200 needs about 2.5 ms for all of them
# (estimated from its bandwidth). The host should queue the call in at most 1 ms.
FLUSHES = 8
# A state is made from at most this many tokens. Its size does not depend on their number.
STATE_TOKENS = 64


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "decode", help="Check and time one token against N keys", description=__doc__
    )
    add, size, default = parser.add_argument, positive(int), partial(by_device, DEFAULTS)
    add_options(parser, DEFAULTS, None, "all")
    add("--batches", type=numbers, metavar="B,B,…",
        help=f"Use these batch sizes {default('batches')}")  # fmt: skip
    add("--kv-heads", type=size, metavar="H",
        help=f"Use H key and value heads {default('kv_heads')}")  # fmt: skip
    add("--head-dim", type=size, metavar="D", help=f"Use head dimension D {default('head_dim')}")
    add_feature_dim(parser)
    parser.set_defaults(run=command(prepare, measure))


def prepare(args: argparse.Namespace) -> list[Case]:
    apply_defaults(args, DEFAULTS)
    if args.heads % args.kv_heads:
        raise UsageError(
            f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}"
        )
    return cases_of(args, max(args.lengths) + 1)  # N tokens in the state, and the next one


def measure(args: argparse.Namespace, cases: list[Case], report: Report) -> None:
    timer = timer_of(args, FLUSHES)
    copied = copy_rate(timer, args.device, COPY_BYTES[args.device])
    report.more["copy_gb_per_s"] = copied / 1e9
    report.note(f"copy bandwidth (read + write): {copied / 1e9:.0f} GB/s")

    def rate(row: Row) -> dict[str, float]:
        s = row.setting
        if row.kind == "state" or s.device == "cpu" or row.seconds is None:
            return {}  # a CPU may read k and v from its own cache instead of from memory
        size = 2 * s.batch * args.kv_heads * s.length * s.head_dim
        size *= getattr(torch, s.dtype).itemsize
        return {"of_copy": size / row.seconds.median / copied}

    bench = bench_of(args, "decode", timer, rate=rate)
    bench.measure(groups(args, cases), report)


def copy_rate(timer: Timer, device: str, size: int) -> float:
    """Bytes read and written per second by a large copy."""
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
            yield setting, partial(list, implementations(args, cases, setting))


def implementations(
    args: argparse.Namespace, cases: list[Case], setting: Setting
) -> Iterator[Implementation]:
    plain = Inputs.make(setting)
    add_heavy_keys(plain.q, plain.k)
    yield from Implementation.baselines(SOFTMAX, plain, setting, ["sdpa"])
    for case in cases:
        if case.linear is not None:
            make = partial(next_token, case, args.feature_dim, setting)
            yield Implementation(case.spec, case, plain, make, "state")
            continue
        case_inputs = plain
        if case.selects:
            try:
                case_inputs = Inputs.make(setting, case)
            except torch.OutOfMemoryError as error:
                # The frames of the traceback hold the tensors made so far.
                yield without_inputs(case, plain, error.with_traceback(None))
                continue
            add_heavy_keys(case_inputs.q, case_inputs.k)
        yield Implementation.of(case, replace(case_inputs, params=case.params), args.backend)


def without_inputs(case: Case, inputs: Inputs, error: Exception) -> Implementation:
    """An implementation that is not measured, with the error as its note.

    The other implementations of the group use ``inputs``, which fit into memory.
    """

    def make() -> Attend:
        raise error

    return Implementation(case.spec, case, inputs, make)


def add_heavy_keys(q: Tensor, k: Tensor) -> None:
    """Gives three keys most of the softmax weight in the first query head of each KV group.

    Without these keys, the error from one missing key among thousands would be within the budget.
    """
    first, length = q[:, :: q.shape[1] // k.shape[1], 0].float(), k.shape[2]
    along = first / first.square().sum(-1, keepdim=True) * q.shape[-1] ** 0.5
    for position in {0, length // 2, length - 1}:
        k[:, :, position] = (along * (log(length) + 0.5)).to(k.dtype)


def next_token(case: Case, feature_dim: int, setting: Setting) -> Attend:
    """A function that processes one token. The token count of its state is ``setting.length``."""
    tokens = min(setting.length, STATE_TOKENS)
    key_dim = case.key_dim(setting.head_dim, feature_dim)
    i = Inputs.make(replace(setting, length=tokens, queries=tokens, key_dim=key_dim), case)
    options = {"enable_gqa": i.options["enable_gqa"], **case.params}
    _, state = attnzoo.linear_attention(i.q, i.k, i.v, case.variant, **options)
    state = replace(state, length=setting.length)
    q_last, k_last, v_last = (x[:, :, -1:] for x in (i.q, i.k, i.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        token = q_last, k_last, v_last
        return attnzoo.linear_attention(*token, case.variant, state=state, **options)[0]

    return attend
