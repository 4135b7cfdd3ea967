"""The next token: microseconds of a call, and the share of a copy's bandwidth that it reads at.

One query for each head against N keys and values, heads in groups as `--heads` and `--kv-heads`
say. A pairwise variant has to read all of k and v once: on a GPU, where nothing of them is left in
a cache, their bytes over the time, in the rate at which the device copies (bytes read and written),
is the share; reading alone may be faster than a copy. Linear variants read a state of one size,
whatever N is: theirs is a call of `linear_attention` on one token, after a state that says N.
Each pairwise result is compared with fp64 first, in the first and last batch, with some keys (the
first, the last, one between) that no result may leave out unnoticed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnzoo
from benchmarks.harness import report
from benchmarks.harness.cases import Case
from benchmarks.harness.correctness import Check, compare, slack_of
from benchmarks.harness.timing import LEAD_BYTES, CudaEvents, Spread, Timer, WallClock, ratio
from benchmarks.suites import gpu_report
from benchmarks.suites.attention import JSON, ROUNDS, SECONDS, SEED, lengths, positive, seed
from benchmarks.suites.gpu_attention import require_cuda
from benchmarks.suites.gpu_cells import first_line
from commandline.errors import UsageError
from commandline.variants import split_list

SOFTMAX = "sdpa softmax"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 4096, 16384], "batches": [1], "dtype": "float32",
        "heads": 8, "kv_heads": 8, "head_dim": 64, "copy_bytes": 2**28, "backend": None,
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 19)], "batches": [1, 32], "dtype": "bfloat16",
        "heads": 32, "kv_heads": 8, "head_dim": 128, "copy_bytes": 2**32, "backend": "decode",
    },
}  # fmt: skip
# torch's fused CPU kernel takes an exp that is good to so many units in the last place; in one row
# of small weights nothing else is as large.
SDPA_EXP = 20
COLUMNS = ("B", "N", "who", "error (of budget)", "µs", "quartiles", "of copy", "x softmax")
WIDTHS = (3, 7, 28, 20, 9, 17, 8, 9)


@dataclass
class Row:
    """One call. What was not measured is None; `note` says what went wrong."""

    name: str
    batch: int
    length: int
    backend: str | None = None
    error: str = ""
    seconds: Spread | None = None
    of_copy: float | None = None  # of its bandwidth; None where no keys are read
    of_softmax: Spread | None = None  # of the times, in the same rounds
    note: str = ""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "decode", help="check and time one token against N keys", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    device = "default: depends on the device"
    add("--device", choices=list(DEFAULTS), help="default: cuda where torch sees one")
    add("--variants", metavar="a,b(x=1)", help="variants with their parameters; default: every one")
    report.add_plugin(parser)
    add("--lengths", type=lengths, metavar="N,N,…", help="numbers of keys; " + device)
    add("--batches", type=lengths, metavar="B,B,…", help="sizes of the batch; " + device)
    add(
        "--backend",
        help="backend of pairwise variants; default: what attnzoo chooses on a CPU, decode on a "
        "GPU",
    )
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=device)
    add("--heads", type=size, metavar="H", help="number of query heads; " + device)
    add("--kv-heads", type=size, metavar="H", help="number of key and value heads; " + device)
    add("--head-dim", type=size, metavar="D", help="head dimension; " + device)
    add("--feature-dim", type=size, default=16, metavar="D",
        help="dimension of the queries and keys of Taylor's state (default: 16)")  # fmt: skip
    add("--repeats", type=size, default=20, metavar="N", help=ROUNDS)
    add("--min-seconds", type=positive(float), default=0.2, metavar="S", help=SECONDS)
    add("--threads", type=size, default=2, metavar="N", help="torch's threads on a CPU")
    add("--seed", type=seed, default=0, help=SEED)
    add("--json", metavar="FILE", help=JSON)
    parser.set_defaults(run=run, copy_bytes=None)


def run(args: argparse.Namespace) -> int:
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        require_cuda("--device cuda")
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.heads % args.kv_heads:
        raise UsageError(
            f"--heads must be a multiple of --kv-heads, got {args.heads}, {args.kv_heads}"
        )
    report.check_target("--json", args.json)
    specs = split_list(args.variants) if args.variants else attnzoo.list_variants()
    cases = [Case.parse(spec, max(args.lengths)) for spec in specs]
    for case in cases:
        try:
            case.plan(args.backend)
        except (ValueError, TypeError) as error:  # misspelt or out of range: before all else
            raise UsageError(str(error)) from error
    torch.set_num_threads(args.threads)
    timer: Timer = CudaEvents(lead=long_lead()) if args.device == "cuda" else WallClock()
    where, rate = gpu_report.environment(), copy_rate(timer, args.device, args.copy_bytes)
    print(
        f"{where['device'] or where['cpu']}, torch {where['torch']}, commit {where['commit']}; "
        f"H={args.heads} Hkv={args.kv_heads} D={args.head_dim} {args.dtype}; "
        f"a copy of {args.copy_bytes / 2**20:.0f} MiB moves {rate / 1e9:.0f} GB/s"
    )
    print(line(COLUMNS), flush=True)
    rows: list[Row] = []
    for batch in args.batches:
        for length in args.lengths:
            for row in measure(cases, args, batch, length, timer, rate):
                rows.append(row)
                print(shown(row), flush=True)
    for text in constancy(rows):
        print(text)
    if args.json:
        settings = report.settings(args)
        document = {"settings": settings, "environment": where, "copy_gb_per_s": rate / 1e9}
        report.write_json(args.json, {**document, "rows": [asdict(row) for row in rows]})
    if not any(row.error or row.backend == "state" for row in rows):
        print("nothing could be measured", file=sys.stderr)
        return 2
    wrong = sorted({row.name for row in rows if row.note.startswith("WRONG")})
    if wrong:
        print(f"outside the error budget, and not timed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def long_lead() -> Callable[[], object]:
    """Some 2.5 ms of work on an H200: the host takes up to 1 ms for a token of these."""
    x = torch.empty(LEAD_BYTES, dtype=torch.int8, device="cuda")
    return lambda: [x.zero_() for _ in range(8)]


def copy_rate(timer: Timer, device: str, size: int) -> float:
    """Bytes per second, read and written, of one large copy."""
    x = torch.ones(size, dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    seconds = timer.rounds({"copy": lambda: y.copy_(x)}, 10, 0.05)["copy"]
    return 2 * size / Spread.of(seconds).median


# ---- who takes part ---------------------------------------------------------------------------


def measure(
    cases: list[Case], args: argparse.Namespace, batch: int, length: int, timer: Timer, rate: float
) -> list[Row]:
    generator = torch.Generator(args.device).manual_seed(args.seed * 1_000_003 + length)

    def random(heads: int, n: int, dim: int) -> Tensor:
        x = torch.randn(batch, heads, n, dim, generator=generator, device=args.device)
        return x.to(getattr(torch, args.dtype))

    try:
        q = random(args.heads, 1, args.head_dim)
        k, v = (random(args.kv_heads, length, args.head_dim) for _ in range(2))
        plant(q, k)
    except torch.OutOfMemoryError as error:
        return [Row("all", batch, length, note=first_line(error))]
    gqa = args.heads != args.kv_heads
    rows = {SOFTMAX: Row(SOFTMAX, batch, length, "torch")}
    calls: dict[str, Callable[[], object]] = {}
    try:
        softmax = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=gqa)
        softmax()
        calls[SOFTMAX] = softmax
    except Exception as error:
        rows[SOFTMAX].note = first_line(error)
    for case in cases:
        row = rows[case.spec] = Row(case.spec, batch, length)
        try:
            if has_state(case):
                row.backend = "state"
                calls[case.spec] = state_call(case, args, random, length)
            else:
                call = partial(
                    attnzoo.attention, q, k, v, case.variant, backend=args.backend, enable_gqa=gqa,
                    **case.params,
                )  # fmt: skip
                row.backend = attnzoo.explain(
                    q, k, v, case.variant, backend=args.backend, enable_gqa=gqa, **case.params
                ).chosen
                found = checked(case, q, k, v, call(), gqa, row.backend)
                row.error = found.shown
                if found.ok:
                    calls[case.spec] = call
                else:
                    row.note = "WRONG, not timed"
        except Exception as error:  # a refusal, or it does not fit: the others go on
            row.note = first_line(error)
    seconds: dict[str, list[float]] = {}
    try:
        with torch.no_grad():
            seconds = timer.rounds(calls, args.repeats, args.min_seconds, 20.0) if calls else {}
    except Exception as error:
        for name in calls:
            rows[name].note = f"not timed: {first_line(error)}"
    size = (k.numel() + v.numel()) * k.element_size()
    for name, samples in seconds.items():
        row = rows[name]
        row.seconds = Spread.of(samples)
        if row.backend != "state" and args.device == "cuda":
            row.of_copy = size / row.seconds.median / rate
        if name != SOFTMAX and SOFTMAX in seconds:
            row.of_softmax = ratio(samples, seconds[SOFTMAX])
    timer.release()
    return list(rows.values())


def plant(q: Tensor, k: Tensor) -> None:
    """Makes three keys weigh about as much as all others together, for the first head of a group:
    of thousands of equal ones a kernel could lose the last unseen."""
    first, length = q[:, :: q.shape[1] // k.shape[1], 0].float(), k.shape[2]
    along = first / first.square().sum(-1, keepdim=True) * q.shape[-1] ** 0.5
    for at in {0, length // 2, length - 1}:
        k[:, :, at] = (along * (log(length) + 0.5)).to(k.dtype)


def has_state(case: Case) -> bool:
    """Whether it has a linear form with these parameters."""
    return case.has_form(attnzoo.Linear)


def state_call(
    case: Case, args: argparse.Namespace, random: Callable[..., Tensor], length: int
) -> Callable[[], object]:
    """One token more, on the state that few tokens have left at this place of the sequence."""
    dim = args.feature_dim if case.variant == "taylor" else args.head_dim
    few = min(length, 64)
    options = {"enable_gqa": args.heads != args.kv_heads, **case.params}
    if case.variant == "cosformer":
        options["max_length"] = case.params["max_length"] + 1
    tokens = random(args.heads, few, dim), random(args.kv_heads, few, dim)
    values = random(args.kv_heads, few, args.head_dim)
    _, state = attnzoo.linear_attention(*tokens, values, case.variant, **options)
    state = replace(state, length=length)
    last = (*(x[:, :, -1:] for x in tokens), values[:, :, -1:])
    return partial(attnzoo.linear_attention, *last, case.variant, state=state, **options)


def checked(
    case: Case, q: Tensor, k: Tensor, v: Tensor, out: Tensor, gqa: bool, backend: str | None
) -> Check:
    ends = sorted({0, q.shape[0] - 1})

    def eager(dtype: torch.dtype) -> Tensor:
        q_part, k_part, v_part = (x[ends].to(dtype) for x in (q, k, v))
        return attnzoo.attention(
            q_part, k_part, v_part, case.variant, enable_gqa=gqa, backend="eager", **case.params
        )

    exact, plain = eager(torch.float64), eager(q.dtype)
    found = out[ends] if bool(out.isfinite().all()) else torch.full_like(out[ends], torch.nan)
    slack = slack_of(case, q.dtype)
    if backend == "sdpa" and q.device.type == "cpu":
        slack += SDPA_EXP * torch.finfo(torch.float32).eps
    return Check(1, compare({"out": found}, {"out": exact}, {"out": plain}, slack), len(ends))


# ---- what is said -----------------------------------------------------------------------------


def line(texts: tuple[str, ...]) -> str:
    return report.aligned(texts, WIDTHS, left=(2,))


def shown(row: Row) -> str:
    times = ("", "")
    if row.seconds is not None:
        t = row.seconds
        times = (f"{t.median * 1e6:.1f}", f"{t.lower * 1e6:.1f}–{t.upper * 1e6:.1f}")
    share = f"{100 * row.of_copy:.0f} %" if row.of_copy is not None else ""
    softmax = f"{row.of_softmax.median:.2f}" if row.of_softmax else ""
    text = line((str(row.batch), str(row.length), row.name, row.error, *times, share, softmax))
    return f"{text}  {row.note}".rstrip()


def constancy(rows: list[Row]) -> list[str]:
    """What a linear variant's token costs at the longest, in its cost at the shortest."""
    said = []
    for name, batch in dict.fromkeys((r.name, r.batch) for r in rows if r.backend == "state"):
        cost = {
            r.length: r.seconds.median
            for r in rows
            if (r.name, r.batch) == (name, batch) and r.seconds is not None
        }
        if len(cost) > 1:
            share = cost[max(cost)] / cost[min(cost)]
            ends = f"at N = {max(cost)} of what it does at {min(cost)}"
            said.append(f"{name}, B={batch}: a token costs {share:.2f} {ends}")
    return said
