"""Count what the kernels' inner loops cost, from their machine code, without a GPU.

For each loop over tiles of scores: instructions of a thread per score element, by class; how often
the tensor cores and the threads do the same work (1.00 is once); and the speed that documented
rates allow for these counts. Speeds are predicted, not measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.kernels import criteria
from benchmarks.kernels.anchors import Anchor, check_tutorial, count, tasks
from benchmarks.kernels.compile import common_options, processes, require_compiler
from benchmarks.kernels.counts import LoopCount, Profile, profile
from benchmarks.kernels.rates import RATES
from benchmarks.kernels.specializations import (
    ARCHITECTURES,
    BARE,
    EXTRAS,
    FLASH,
    PADDED,
    PASSES,
    POWERS,
    SPLIT,
    Group,
    Specialization,
    of_groups,
    quick_specializations,
)
from commandline.errors import UsageError
from commandline.table import aligned

# Decoding is left out: it takes as long as reading the keys, whatever the threads compute.
KERNELS = ("forward", "dq", "dkdv", "dbias", "threshold", "stats", "linear")
# Causality and gain change the loops of all activations alike: only softmax has all four pairs.
CELLS = (
    Group(PASSES, "online", "bf16", POWERS, ("", *BARE, *EXTRAS, *PADDED)),
    Group(FLASH, "online none threshold family", "bf16", POWERS, ("", "full no gain")),
    Group(("dbias",), "online", "bf16", POWERS, ("", "full no gain")),
)
COLUMNS = (
    "loop", "total", "fp32", "mufu", "conv", "mask", "max", "int", "uniform", "shared", "global",
    "sync", "tensor x", "element x", "barriers", "bound", "TFLOP/s", "overlap",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "profile", help="Count what the kernels' loops cost", description=__doc__
    )
    archs, kernels = ",".join(ARCHITECTURES), ",".join(KERNELS)
    add = parser.add_argument
    add("--arch", default=archs, metavar="sm_80,…",
        help=f"Compile for these architectures (default: {archs})")  # fmt: skip
    add("--kernels", default=kernels, metavar="NAME,…",
        help=f"Profile these kernels (default: {kernels})")  # fmt: skip
    add("--quick", action="store_true",
        help="Profile only the kernels that compile --quick compiles")  # fmt: skip
    add("--json", metavar="FILE", help="Write the counts to a JSON file at the end")
    add("--cubins", metavar="DIR", help="Write the machine code to this folder, one file a kernel")
    add("--check", action="store_true",
        help="Exit with status 1 and a list if a kernel exceeds a limit")  # fmt: skip
    add("--flex", action="store_true",
        help="Compare with FlexAttention, as the installed torch compiles it")  # fmt: skip
    add("--tutorial", metavar="FILE",
        help="Compare with the kernels of Triton's tutorial 06 in this file")  # fmt: skip
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
        help="Compile in N processes (default: one per CPU)")  # fmt: skip
    parser.set_defaults(run=profile_selected)


def profile_selected(args: argparse.Namespace) -> int:
    cells = selected(args)
    require_compiler("profile")
    import triton

    print(f"triton {triton.__version__}")
    for arch in dict.fromkeys(spec.arch for spec in cells):
        print(f"{arch} stands for {RATES[arch].device}")
    print("Instructions of a thread per score element; TFLOP/s are predicted, not measured.")
    print(line(COLUMNS), flush=True)
    rows: list[Profile] = []
    failed: list[str] = []
    with processes(args.jobs, None) as pool:
        for spec, row in zip(cells, pool.map(profile, cells), strict=True):
            if isinstance(row, str):
                failed.append(f"{spec.kernel}, {spec.config}, {spec.arch} does not compile: {row}")
                print(failed[-1], flush=True)
                continue
            rows.append(row)
            print("\n".join((heading(row), *map(line, map(cells_of, row.loops)))), flush=True)
            if args.cubins:
                (Path(args.cubins) / cubin_name(spec)).write_bytes(row.cubin)
        archs = list(dict.fromkeys(spec.arch for spec in cells))
        beside = list(tasks(args.tutorial, args.flex, archs, {spec.kernel for spec in cells}))
        others: list[Anchor] = []
        for task, counted in zip(beside, pool.map(count, beside), strict=True):
            if isinstance(counted, str):
                print(f"{task.name}, D={task.head_dim}, {task.arch} does not compile: {counted}")
            else:
                others += counted
    for text in comparison(rows, others):
        print(text)
    if args.json:
        document = {"triton": triton.__version__, "environment": report.environment()}
        document["rates"] = {arch: rates._asdict() for arch, rates in RATES.items()}
        document["rows"] = [row.record() for row in rows]
        document["others"] = [other.record() for other in others]
        report.write_json(args.json, rounded(document))
    print(f"{len(cells)} kernels, {len(failed)} do not compile")
    wrong = checked(rows, triton.__version__) if args.check else []
    return 1 if failed or wrong else 0


def checked(rows: list[Profile], version: str) -> list[str]:
    counted = version == criteria.COUNTED_WITH
    if not counted:
        print(f"limits of counts hold for Triton {criteria.COUNTED_WITH} and are not checked")
    wrong = criteria.violations(rows, counted)
    for text in wrong:
        print(f"VIOLATED {text}")
    print(f"{len(wrong)} violations" if wrong else "all criteria hold")
    return wrong


def selected(args: argparse.Namespace) -> list[Specialization]:
    """The kernels that the options select.

    Raises:
        UsageError: an option is invalid.
    """
    archs, kernels = common_options(args, KERNELS)
    if args.tutorial is not None:
        check_tutorial(args.tutorial)
    if args.cubins:
        try:
            Path(args.cubins).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--cubins {args.cubins}: {error.strerror or error}") from None
    quick = [
        spec
        for spec in quick_specializations(archs)
        # Calls with SPLIT have the loops of other calls.
        if spec.dtype == "bf16" and spec.extra != SPLIT and spec.family in kernels
    ]
    more = [] if args.quick else of_groups(CELLS, archs, list(POWERS))
    return list(dict.fromkeys([*quick, *(spec for spec in more if spec.family in kernels)]))


def cubin_name(spec: Specialization) -> str:
    """Such as forward-exp-D128-causal-bf16-sm_90.cubin."""
    extra = spec.extra
    causality = "full" if extra.startswith("full") else "causal"
    feature = extra.removeprefix("full").strip() or ("" if spec.family == "linear" else "gain")
    parts = [spec.kernel, spec.activation, f"D{spec.head_dim}", causality]
    if feature != "no gain":
        parts.append(feature)
    text = "-".join(filter(None, [*parts, spec.dtype, spec.arch]))
    return text.replace(" ", "_") + ".cubin"


def rounded(value: Any) -> Any:
    """The same with three digits after the point in all floats."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(x) for x in value]
    return round(value, 3) if isinstance(value, float) else value


# ---- the table --------------------------------------------------------------------------------


def heading(row: Profile) -> str:
    spec, tile = row.spec, f"{row.tile[0]} x {row.tile[1]}"
    return (
        f"\n{spec.kernel}  {spec.config}  {spec.arch}: {tile}, {row.warps} warps, {row.stages} "
        f"stages, {row.registers} registers, {row.stack_bytes} B stack, {row.shared_bytes} B "
        f"shared, blocks per SM: {row.blocks_per_sm}, {row.tensor_core or 'no tensor cores'}, "
        f"{row.copies}"
    )


def cells_of(loop: LoopCount) -> tuple[str, ...]:
    kinds = [kind for kind in loop.classes if kind not in ("tensor", "other")]
    factors = (loop.tensor_factor, loop.element_factor)
    speed = ("–", "–", "–")
    if loop.prediction is not None:
        prediction = loop.prediction
        speed = (prediction.bound, f"{prediction.tflops:.0f}", f"{prediction.tflops_overlap:.0f}")
    return (
        loop.name, f"{loop.total:.2f}", *(f"{loop.classes[kind]:.2f}" for kind in kinds),
        *("–" if factor is None else f"{factor:.2f}" for factor in factors),
        str(loop.barriers), *speed,
    )  # fmt: skip


def line(cells: tuple[str, ...]) -> str:
    return aligned(cells, [13, *(max(6, len(name)) for name in COLUMNS[1:])])


def comparison(rows: list[Profile], others: list[Anchor]) -> Iterator[str]:
    """Lines that compare the loops over full blocks with those of others."""
    if others:
        yield f"\nfull blocks: {'ours':>24}  {'others':>24}  ratio of instructions"
    known = {(row.spec.kernel, row.spec.arch, row.spec.head_dim): row for row in rows
             if (row.spec.activation, row.spec.extra) == ("exp", "no gain")}  # fmt: skip
    for other in others:
        row = known.get((other.kernel, other.arch, other.head_dim))
        if row is not None and row.main is not None:
            main, loop = row.main, other.loop
            yield (
                f"{other.kernel} D={other.head_dim} {other.arch}: {figures(main, row.stack_bytes)} "
                f"{other.name}: {figures(loop, other.stack_bytes)}  {main.total / loop.total:.2f}"
            )


def figures(loop: LoopCount, stack: int) -> str:
    speed = "" if loop.prediction is None else f", {loop.prediction.tflops:.0f} TFLOP/s"
    return f"{loop.total:.2f}{speed}" + (f" ({stack} B stack)" if stack else "")
