"""Linear forms against softmax, against their own pairwise forms, and against fla's kernels.

Variants are called at the head dimension; Taylor with queries and keys of `--feature-dim`, as Based
has it, and values of the head dimension. Causal; each result is compared with fp64 before it is
timed. All of one length and direction are timed in turn, round by round. In the end: from which
length on a linear form is faster than softmax and than its own pairwise form, and how much a token
costs more or less at other lengths than at 8192.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch

import attnzoo
from benchmarks.harness import report
from benchmarks.harness.cases import Case, Inputs, Setting
from benchmarks.harness.correctness import Pairs, check, relative_error
from benchmarks.harness.timing import CudaEvents, Spread, Timer, WallClock, ratio
from benchmarks.suites import competitors, gpu_report
from benchmarks.suites.attention import (
    JSON,
    ROUNDS,
    SECONDS,
    SEED,
    lengths,
    positive,
    seed,
    some_of,
)
from benchmarks.suites.competitors import Attend
from benchmarks.suites.gpu_attention import require_cuda
from benchmarks.suites.gpu_cells import Entrant, first_line, ours
from commandline.errors import UsageError
from commandline.variants import split_list

SOFTMAX = "sdpa softmax"
VARIANTS = ("cosformer", "taylor")
PAIRWISE = ", pairwise"  # after a variant's name
DIRECTIONS = ("forward", "both")
# A token's cost at other lengths is given in its cost at this one.
FLAT_FROM = 8192
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "lengths": [1024, 2048, 4096, 8192, 16384], "dtype": "float32", "heads": 8, "batch": 1,
        "pairwise_max": 4096, "backend": "linear", "pairwise": "tiled",
    },
    "cuda": {
        "lengths": [2**i for i in range(10, 18)], "dtype": "bfloat16", "heads": 16, "batch": None,
        "pairwise_max": 32768, "backend": "flash_linear", "pairwise": "flash",
    },
}  # fmt: skip
# At the longest length there is one sequence; at others as many tokens.
TOKENS = 2**17
COLUMNS = ("N", "direction", "who", "error (of budget)", "ms", "quartiles", "ns/token", "x softmax")
WIDTHS = (6, 9, 26, 20, 9, 15, 8, 9)


@dataclass
class Row:
    """One call. What was not measured is None; `note` says what went wrong."""

    name: str
    direction: str
    length: int
    batch: int
    error: str = ""
    seconds: Spread | None = None
    per_token: float | None = None  # seconds for a token of all heads
    ratios: dict[str, Spread] = field(default_factory=dict)
    note: str = ""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "linear", help="check and time linear forms beside softmax", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    device = "default: depends on the device"
    add("--device", choices=list(DEFAULTS), help="default: cuda where torch sees one")
    add("--variants", metavar="a,b(x=1)", help="variants with a linear form and their parameters; "
        f"default: {','.join(VARIANTS)} and the plugin's")  # fmt: skip
    report.add_plugin(parser)
    add("--lengths", type=lengths, metavar="N,N,…", help="sequence lengths; " + device)
    add("--direction", type=some_of(DIRECTIONS), default=list(DIRECTIONS), metavar="forward,both",
        help="default: forward, and forward and backward together")  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16", "float16"], help=device)
    add("--batch", type=size, metavar="B",
        help="sequences of a batch; default: as many as make 131072 tokens per head on a GPU, 1 on "
        "a CPU")  # fmt: skip
    add("--heads", type=size, metavar="H", help="number of heads; " + device)
    add("--head-dim", type=size, default=64, metavar="D", help="head dimension (default: 64)")
    add("--feature-dim", type=size, default=16, metavar="D",
        help="dimension of Taylor's queries and keys (default: 16)")  # fmt: skip
    add("--pairwise-max", type=int, metavar="N",
        help="longest sequence for the pairwise forms; 0: never; " + device)  # fmt: skip
    add("--repeats", type=size, default=5, metavar="N", help=ROUNDS)
    add("--min-seconds", type=positive(float), default=0.2, metavar="S", help=SECONDS)
    add("--threads", type=size, default=2, metavar="N", help="torch's threads on a CPU")
    add("--seed", type=seed, default=0, help=SEED)
    add("--json", metavar="FILE", help=JSON)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        require_cuda("--device cuda")
    if not args.direction:
        raise UsageError(f"--direction must name one of {', '.join(DIRECTIONS)}")
    report.check_target("--json", args.json)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    cases = linear_cases(args)
    torch.set_num_threads(args.threads)
    timer: Timer = CudaEvents() if args.device == "cuda" else WallClock()
    where = gpu_report.environment()
    print(
        f"{where['device'] or where['cpu']}, torch {where['torch']}, commit {where['commit']}; "
        f"H={args.heads} D={args.head_dim} {args.dtype}, Taylor's D={args.feature_dim}"
    )
    for text in fla_is_missing():
        print(text)
    print(line(COLUMNS), flush=True)
    rows: list[Row] = []
    for length in args.lengths:
        for row in measure(cases, args, length, timer):
            rows.append(row)
            print(shown(row), flush=True)
    names = [case.spec for case in cases]
    for text in (*crossovers(rows, names), *flatness(rows, names)):
        print(text)
    if args.json:
        settings = report.settings(args)
        records = [asdict(row) for row in rows]
        report.write_json(args.json, {"settings": settings, "environment": where, "rows": records})
    wrong = sorted({row.name for row in rows if row.note.startswith("WRONG")})
    if wrong:
        print(f"outside the error budget, and not timed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def linear_cases(args: argparse.Namespace) -> list[Case]:
    """What `--variants` names, each of them with a linear form."""
    specs = split_list(args.variants) if args.variants else [*VARIANTS]
    if not args.variants and args.plugin is not None:
        own = attnzoo.load_plugin(args.plugin).variants
        longest = max(args.lengths)
        specs += [n for n in own if Case.parse(n, longest).has_form(attnzoo.Linear)]
    cases = [Case.parse(spec, max(args.lengths)) for spec in specs]
    for case in cases:
        try:
            found = case.has_form(attnzoo.Linear)
        except (ValueError, TypeError) as error:  # a parameter out of range
            raise UsageError(str(error)) from error
        if not found:
            raise UsageError(f"{case.spec} has no linear form")
    return cases


def fla_is_missing() -> list[str]:
    if importlib.util.find_spec("fla") is None:
        return ["fla is not installed: nothing is compared with it"]
    return []


# ---- who takes part ---------------------------------------------------------------------------


class Entry(NamedTuple):
    """Who takes part, or why not."""

    entrant: Entrant | None
    error: str = ""
    note: str = ""


def measure(cases: list[Case], args: argparse.Namespace, length: int, timer: Timer) -> list[Row]:
    batch = args.batch or max(1, TOKENS // length)
    setting = Setting(
        length, "both", batch=batch, heads=args.heads, head_dim=args.head_dim, dtype=args.dtype,
        device=args.device, seed=args.seed, threads=args.threads,
    )  # fmt: skip
    entries = contest(cases, args, setting)
    rows = [
        Row(name, direction, length, batch, error=e.error, note=e.note)
        for direction in args.direction
        for name, e in entries.items()
    ]
    for direction in args.direction:
        able = {name: e.entrant for name, e in entries.items() if e.entrant is not None}
        calls = {n: e.forward if direction == "forward" else e.both for n, e in able.items()}
        seconds, note = {}, ""
        try:
            seconds = timer.rounds(calls, args.repeats, args.min_seconds, 20.0)
        except Exception as error:  # of all together there may be too little memory
            note = f"not timed: {first_line(error)}"
        for row in rows:
            if row.direction == direction and row.name in calls:
                row.note = row.note or note
            if row.direction == direction and row.name in seconds:
                row.seconds = Spread.of(seconds[row.name])
                row.per_token = row.seconds.median / (batch * length)
                others = {n: s for n, s in seconds.items() if n != row.name}
                row.ratios = {n: ratio(seconds[row.name], s) for n, s in others.items()}
    timer.release()
    return rows


def contest(cases: list[Case], args: argparse.Namespace, setting: Setting) -> dict[str, Entry]:
    """By name; softmax, which is not checked here, first."""
    whole = Inputs.make(Case("softmax", "softmax"), setting)
    narrow = Inputs.make(Case("taylor", "taylor"), replace(setting, head_dim=args.feature_dim))
    narrow = replace(narrow, v=whole.v, do=whole.do)
    entries = {SOFTMAX: tried(Entrant(competitors.sdpa("FLASH_ATTENTION", setting), whole, {}))}
    for case in cases:
        inputs = replace(narrow if case.variant == "taylor" else whole, params=case.params)
        entries[case.spec] = ours_in(case, inputs, args.backend, setting)
        if setting.length <= args.pairwise_max:
            # Without a pairwise form the pairs are made by definition, in blocks.
            backend = args.pairwise if case.has_form(attnzoo.Pairwise) else "tiled"
            entries[case.spec + PAIRWISE] = ours_in(case, inputs, backend, setting)
        if args.device == "cuda" and not fla_is_missing():
            for name, factory in competitors.linear_rivals(case, inputs).items():
                entries[name] = theirs(case, inputs, factory, setting)
    return entries


def tried(entrant: Entrant, error: str = "") -> Entry:
    """Run once, both ways."""
    try:
        entrant.both()
    except Exception as failure:  # no kernel for it, or no memory: the others go on
        return Entry(None, error, first_line(failure))
    return Entry(entrant, error)


def ours_in(case: Case, inputs: Inputs, backend: str, setting: Setting) -> Entry:
    """Takes part if its results are right, with and without gradients."""
    pairs, found = Pairs.corners(setting.batch, setting.heads), []
    try:
        for given in (inputs.detached(), inputs):
            found.append(check(case, given, backend, setting.seed, pairs))
    except Exception as error:  # it may not fit: the others go on
        return Entry(None, note=first_line(error))
    worst = max(found, key=lambda c: c.worst[1].share)
    if not worst.ok:
        return Entry(None, worst.shown, "WRONG, not timed")
    return tried(Entrant(ours(case, backend, True), inputs, {}), worst.shown)


def theirs(case: Case, inputs: Inputs, factory: Callable[[], Attend], setting: Setting) -> Entry:
    """In its own layout, heads inside of rows. Its error is told, and no matter of a budget."""
    try:
        tensors = {
            name: x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
            for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
        }
        entrant = Entrant(factory(), replace(inputs, **tensors), {})
        entrant.both()
        pairs = Pairs.corners(setting.batch, setting.heads)
        error = relative_error(case, inputs, entrant.forward(), setting.seed, pairs)
    except Exception as failure:
        return Entry(None, note=first_line(failure))
    return Entry(entrant, f"out {error:.1e} of rms")


# ---- what is said -----------------------------------------------------------------------------


def line(texts: tuple[str, ...]) -> str:
    return report.aligned(texts, WIDTHS, left=(1, 2))


def shown(row: Row) -> str:
    times = ("", "", "")
    if row.seconds is not None and row.per_token is not None:
        t = row.seconds
        spread = f"{t.lower * 1e3:.2f}–{t.upper * 1e3:.2f}"
        times = (f"{t.median * 1e3:.3f}", spread, f"{row.per_token * 1e9:.1f}")
    share = f"{row.ratios[SOFTMAX].median:.3f}" if SOFTMAX in row.ratios else ""
    text = line((str(row.length), row.direction, row.name, row.error, *times, share))
    return f"{text}  {row.note}".rstrip()


def crossovers(rows: list[Row], variants: Sequence[str] = VARIANTS) -> Iterator[str]:
    """From which length on a linear form was faster, at all of them where both should have run."""
    for direction, variant in product(DIRECTIONS, variants):
        for other in (SOFTMAX, variant + PAIRWISE):
            of = {n: {} for n in (variant, other)}
            for row in rows:
                if row.direction == direction and row.name in of:
                    of[row.name][row.length] = row
            lengths = sorted(of[variant].keys() & of[other].keys())
            faster: list[int] = []
            for length in lengths:
                share = of[variant][length].ratios.get(other)
                # What could not be timed is no proof.
                faster = [*faster, length] if share is not None and share.median < 1 else []
            if lengths:
                from_there = f"from N = {faster[0]} on" if faster else "up to the longest here"
                verb = "faster" if faster else "not faster"
                yield f"{variant}, {direction}: {verb} than {other} {from_there}"


def flatness(rows: list[Row], variants: Sequence[str] = VARIANTS) -> Iterator[str]:
    """What a token costs at the longer lengths, in its cost at `FLAT_FROM`."""
    for direction, variant in product(DIRECTIONS, variants):
        cost = {
            row.length: row.per_token
            for row in rows
            if (row.name, row.direction) == (variant, direction) and row.per_token
        }
        longer = [n for n in sorted(cost) if n > FLAT_FROM]
        if FLAT_FROM in cost and longer:
            shares = ", ".join(f"{cost[n] / cost[FLAT_FROM]:.2f} at {n}" for n in longer)
            yield f"{variant}, {direction}: a token costs {shares} of what it does at {FLAT_FROM}"
