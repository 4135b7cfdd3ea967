"""`python -m benchmarks attention --device cuda`: the table of a GPU, as large as one asks for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import torch

import attnzoo
from benchmarks.harness import report
from benchmarks.harness.cases import Case
from benchmarks.harness.grid import DIRECTIONS, grid
from benchmarks.harness.timing import CudaEvents
from benchmarks.suites import gpu_report
from benchmarks.suites.gpu_cells import GATE, Bench, GpuRow, matrix_peak, targets, unlisted
from commandline.errors import UsageError
from commandline.variants import split_list

# A name, so that a test can have the whole run on a CPU.
DEVICE = "cuda"


def run(args: argparse.Namespace) -> int:
    require_cuda("--device cuda")
    report.check_target("--json", args.json)
    cases, refused = accepted(args.variants, args.backend, DEVICE, max(args.lengths))
    settings = grid(
        args.lengths, args.head_dim, args.mask, args.inputs, batch=args.batch, heads=args.heads,
        dtype=args.dtype, input_scale=args.input_scale, seed=args.seed, device=DEVICE,
    )  # fmt: skip
    where = gpu_report.environment()
    timer = CudaEvents()
    timed = args.time and not args.check_only
    peak = matrix_peak(timer, args.dtype, DEVICE) if timed else None
    bench = Bench(
        cases, timer, args.backend, peak=peak, names=tuple(args.competitors),
        directions=DIRECTIONS if args.direction == "both" else (args.direction,),
        repeats=args.repeats, min_seconds=args.min_seconds, time=timed, memory=args.memory,
    )  # fmt: skip
    print(
        f"{where['device']}, driver {where['driver']}, CUDA {where['cuda']}, torch "
        f"{where['torch']}, Triton {where['packages']['triton']}, commit {where['commit']}"
    )
    print(GATE)
    if peak is not None:
        print(f"a large product of random {args.dtype} matrices: {peak / 1e12:.0f} TFLOP/s")
    for text in (*refused, unlisted(bench.names) if timed else ""):
        if text:
            print(text)
    rows: list[GpuRow] = []
    for group in bench.rows(settings):
        rows += group
        show(group)
        for text in targets(group):
            print(text, flush=True)
    if args.json:
        report.write_json(args.json, {
            "settings": report.settings(args), "environment": where,
            "peak_tflops": peak and peak / 1e12,
            "rows": [row.record() for row in rows], "left_out": bench.left_out,
        })  # fmt: skip
    for text in bench.left_out:
        print(f"left out: {text}", file=sys.stderr)
    wrong = {row.name for row in rows if row.check is not None and not row.check.ok}
    if wrong:
        print(f"outside the error budget, and not timed: {', '.join(wrong)}", file=sys.stderr)
        return 1
    if all(row.check is None for row in rows if row.kind == "variant"):
        print("nothing could be measured", file=sys.stderr)
        return 2
    return 0


def require_cuda(what: str) -> None:
    if not torch.cuda.is_available():
        raise UsageError(f"{what} needs a CUDA device, and torch sees none")


def accepted(
    variants: str | None, backend: str | None, device: str, longest: int
) -> tuple[list[Case], list[str]]:
    """The cases that the backend takes, and in words why it does not take the others."""
    specs = split_list(variants) if variants else attnzoo.list_variants()
    if len(set(specs)) < len(specs):
        raise UsageError("a variant is listed twice")
    cases, refused = [], []
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    for case in (Case.parse(spec, longest) for spec in specs):
        try:
            found = attnzoo.explain(
                x, x, x, case.variant, backend=backend, is_causal=True, **case.params
            )
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        if found.chosen is not None:
            cases.append(case)
            continue
        why = [c.objection for c in found.candidates if c.backend == backend and c.objection]
        reason = "; ".join(dict.fromkeys(why)) or found.refusal or "no form of it is taken"
        refused.append(f"{case.spec} is not measured: {backend} says: {reason}")
    if not cases:
        raise UsageError("; ".join(refused))
    return cases, refused


def show(rows: Iterable[GpuRow]) -> None:
    records = [row.record() for row in rows]
    print(f"\n{gpu_report.title(records[0])}\n{gpu_report.line(gpu_report.COLUMNS)}")
    for record in records:
        print(gpu_report.row_line(record), flush=True)
