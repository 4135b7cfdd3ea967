"""Time packed sequences against a batch of sequences, causal, on a CPU.

The batch has sequences of one length. The same tokens in one row are passed to `attnzoo.attention`
with segment ids, and to `attnzoo.varlen_attention`. The ragged calls have as many tokens, in
sequences whose lengths are spread evenly from half to one and a half times that length. Outputs are
first compared: those of equal lengths with the batch, and the ragged ones with each other.

The table shows the median time of the batch, and the median and quartiles, over the rounds, of the
ratios to it. The exit status is 1 if a median ratio exceeds --most or an output is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Attend, Case, Inputs, Setting, call
from benchmarks.harness.options import cases_of, positive, subset_of
from benchmarks.harness.report import check_target, environment, headline, write_json
from benchmarks.harness.timing import Spread, interleave, ratio
from commandline.arguments import add_plugin, seed
from commandline.errors import UsageError

DIRECTIONS = ("forward", "both")
BATCH = "batch"
CALLS = ("segments", "varlen", "ragged segments", "ragged varlen")
# Largest difference of two outputs, relative to the largest entry. Kernels for other strides may
# sum in another order.
TOLERANCE = 1e-4


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "packed", help="Time packed sequences against a batch", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    add("--variants", metavar="a,b(x=1)",
        help="Measure these variants (default: all with a form)")  # fmt: skip
    add_plugin(parser)
    add("--direction", type=subset_of(DIRECTIONS), default=list(DIRECTIONS),
        metavar=",".join(DIRECTIONS), help="Measure these directions (default: both of them)",
    )  # fmt: skip
    add("--sequences", type=size, default=16, metavar="S", help="Pack S sequences (default: 16)")
    add("--length", type=size, default=512, metavar="N",
        help="Use sequences of N tokens (default: 512)")  # fmt: skip
    add("--heads", type=size, default=8, metavar="H", help="Use H heads (default: 8)")
    add("--head-dim", type=size, default=64, metavar="D", help="Use head dimension D (default: 64)")
    add("--backend", help="Compute the variants with this backend (default: automatic)")
    add("--repeats", type=size, default=5, metavar="N", help="Time N rounds (default: 5)")
    add("--threads", type=size, default=2, metavar="N",
        help="Use N CPU threads in torch (default: 2)")  # fmt: skip
    add("--most", type=positive(float), default=1.5, metavar="R",
        help="Fail if a call costs more than R times the batch (default: 1.5)")  # fmt: skip
    add("--seed", type=seed, default=0, help="Draw the inputs with this seed (default: 0)")
    add("--json", metavar="FILE", help="Write results to a JSON file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_target("--json", args.json)
    if not args.direction:
        raise UsageError(f"--direction must list some of {', '.join(DIRECTIONS)}, got ''")
    torch.set_num_threads(args.threads)
    tokens = args.sequences * args.length
    cases = cases_of(args, tokens)
    for case in cases:
        if args.variants and not has_form(case):
            raise UsageError(f"--variants must list variants with a form, got {case.spec}")
    lengths = ragged(args.sequences, args.length)
    more = sum(n * n for n in lengths) / (args.sequences * args.length**2)
    where = environment()
    print(headline(where))
    print(
        f"{args.sequences} × {args.length} tokens, H={args.heads} D={args.head_dim} float32, "
        f"causal, {args.threads} threads; ragged lengths have {more:.2f} × the scores"
    )
    print(f"{'variant':<22}{'direction':<10}{'batch ms':>9}" + "".join(f"{n:>19}" for n in CALLS))
    rows, problems = [], []
    for case in filter(has_form, cases):
        for direction in args.direction:
            row = measure(args, case, direction, lengths)
            rows.append(row)
            ratios = row["ratios"]
            shown = "".join(f"{text(ratios[name]):>19}" for name in CALLS)
            print(f"{case.spec:<22}{direction:<10}{row[BATCH].median * 1e3:>9.1f}{shown}")
            what = f"{case.spec}, {direction}"
            problems += [f"{what}, {name}: wrong output" for name in row["wrong"]]
            problems += [
                f"{what}, {name}: {ratios[name].median:.2f} × the batch, at most {args.most:g}"
                for name in CALLS
                if ratios[name].median > args.most
            ]
    if args.json:
        write_json(args.json, {"environment": where, "rows": [record(row) for row in rows]})
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def has_form(case: Case) -> bool:
    return any(form is not None for form in (case.pairwise, case.linear, case.shares))


def ragged(sequences: int, length: int) -> list[int]:
    """Lengths from length / 2 to 3 · length / 2, evenly spread, with the same sum."""
    if sequences == 1:
        return [length]
    return [length + round(length * (i / (sequences - 1) - 0.5)) for i in range(sequences)]


def text(x: Spread) -> str:
    return f"{x.median:.2f} ({x.lower:.2f}–{x.upper:.2f})"


def record(row: dict[str, Any]) -> dict[str, Any]:
    ratios = {name: asdict(spread) for name, spread in row["ratios"].items()}
    return {**row, BATCH: asdict(row[BATCH]), "ratios": ratios}


def measure(
    args: argparse.Namespace, case: Case, direction: str, lengths: list[int]
) -> dict[str, Any]:
    """The times and ratios of a variant in one direction, and the names of wrong outputs."""
    tokens = args.sequences * args.length
    setting = Setting(tokens, heads=args.heads, head_dim=args.head_dim, seed=args.seed)
    inputs = Inputs.make(setting, case, gradients=direction != "forward")
    implementations = implementations_of(case, inputs, args.backend, args.length, lengths)
    outputs = {}
    for name, (attend, own_inputs) in implementations.items():
        out = call(attend, own_inputs, "forward")()
        # (S, H, n, D) and (1, H, T, D) as (T, H, D)
        outputs[name] = out if out.dim() == 3 else out.transpose(1, 2).flatten(0, 1)
    expected = [outputs[BATCH], outputs[BATCH], outputs[CALLS[3]], outputs[CALLS[3]]]
    wrong = [
        name for name, want in zip(CALLS, expected, strict=True) if differs(outputs[name], want)
    ]
    calls = {name: call(*x, direction) for name, x in implementations.items()}
    seconds = interleave(calls, args.repeats, 0.0, warmup=1)
    return {
        "variant": case.spec, "direction": direction, "wrong": wrong,
        BATCH: Spread.of(seconds[BATCH]),
        "ratios": {name: ratio(seconds[name], seconds[BATCH]) for name in CALLS},
    }  # fmt: skip


def differs(have: Tensor, want: Tensor) -> bool:
    return not bool((have - want).abs().max() <= TOLERANCE * want.abs().max())


def implementations_of(
    case: Case, row: Inputs, backend: str | None, length: int, lengths: list[int]
) -> dict[str, tuple[Attend, Inputs]]:
    """The batch and the calls by name, each with its inputs; ``row`` has one row of all tokens."""
    tokens = row.q.shape[2]
    options = {"variant": case.variant, "backend": backend, **row.options, **row.params}
    batch = relaid(row, lambda x: x[0].unflatten(1, (-1, length)).transpose(0, 1))
    flat = relaid(row, lambda x: x[0].transpose(0, 1))
    implementations: dict[str, tuple[Attend, Inputs]] = {
        BATCH: (partial(attnzoo.attention, **options), batch)
    }
    even = [length] * (tokens // length)
    for prefix, sizes in (("", even), ("ragged ", lengths)):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[None]
        segments = partial(attnzoo.attention, segment_ids=ids, **options)
        implementations[f"{prefix}segments"] = segments, row
        implementations[f"{prefix}varlen"] = varlen(sizes, options), flat
    return implementations


def varlen(lengths: list[int], options: dict[str, Any]) -> Attend:
    ends, longest = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnzoo.varlen_attention(q, k, v, ends, ends, longest, longest, **options)

    return attend


def relaid(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs in another layout, contiguous in memory."""
    tensors = {}
    for name in ("q", "k", "v", "do"):
        x = getattr(inputs, name)
        tensors[name] = change(x.detach()).contiguous().requires_grad_(x.requires_grad)
    return replace(inputs, **tensors)
