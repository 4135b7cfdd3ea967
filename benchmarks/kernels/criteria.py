"""Limits that `python -m benchmarks profile --check` holds, and what violates them.

The limits of counts are for the loop over full blocks, bf16 and calls without a per-query gain.
They were set beside the counts of Triton's tutorial and FlexAttention (docs/benchmarks.md), with
the version of Triton in COUNTED_WITH: another one schedules other instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.kernels.compile import most_spilled
from benchmarks.kernels.counts import LoopCount, Profile
from benchmarks.kernels.sass import TENSOR_CORE

COUNTED_WITH = "3.9.0"
# Counts are rounded to this share of a unit before they are compared.
ROUNDING = 0.005


# Attributes of a loop that a limit may name, and their units
UNITS = {"total": " per element", "per_64_tokens": " instructions of a warp", "narrow_copies": ""}


class Limit(NamedTuple):
    """The largest value of a figure in the full-block loops of these kernels.

    figure: one of UNITS, the name of an instruction class, or names of opcodes joined by "+".
    Classes and opcodes are per score element.
    part: the pass of a threshold kernel; otherwise empty.
    """

    kernel: str
    activation: str
    head_dim: int
    figure: str
    most: float
    part: str = ""
    arch: str = "sm_90"
    causal: bool = False  # only for causal calls


LIMITS = (
    Limit("forward", "exp", 128, "total", 8.3),
    Limit("forward", "exp", 64, "total", 7.4),
    *(Limit("forward", "exp", dim, "fp32", 3.2) for dim in (64, 128)),
    # If the call is not causal, the loop's control takes one more comparison per iteration (0.11).
    *(Limit("forward", "exp", dim, "mask", 0.1, causal=True) for dim in (64, 128)),
    Limit("forward", "sigmoid", 128, "total", 6.9),
    Limit("forward", "sigmoid", 128, "FSETP+FSEL", 0.0),
    Limit("forward", "entmax15", 128, "total", 13.7),
    Limit("dq", "exp", 128, "total", 10.7),
    Limit("dkdv", "exp", 128, "total", 12.7),
    Limit("dkdv", "exp", 64, "total", 11.0),
    Limit("dkdv", "sigmoid", 128, "total", 16.5),
    Limit("dkdv", "entmax15", 128, "total", 27.5),
    Limit("threshold", "entmax15", 128, "total", 9.5, "maximum"),
    Limit("threshold", "entmax15", 128, "total", 15.0, "step"),
    # The loops of fla's kernels have 128 and 177 instructions and take 64 tokens per iteration.
    Limit("linear output", "", 128, "per_64_tokens", 1.2 * 128),
    Limit("linear states", "", 128, "per_64_tokens", 1.2 * 177),
    *(
        Limit(kernel, "", dim, "narrow_copies", 0)
        for kernel in ("linear output", "linear states") for dim in (64, 128)
    ),
)  # fmt: skip
# Instructions that the edge loop of a causal forward may have more than the full loop, per element.
# Where tiles are loaded by pointers instead of TMA, each copy of 16 bytes has a comparison as well.
EDGE_MORE = {"ISETP": 1.2, "FSEL": 1.2}
EDGE_ARCHS = ("sm_90", "sm_100")
# Cycles per score element of forward, dQ and dK/dV together, without overlap
STEP = ("forward", "dq", "dkdv")
STEP_CYCLES = {("sm_90", "exp", 128): 0.83}
# Least speed of calls with masks, and of head dimension 256, relative to plain calls
LEAST_SPEED = 0.5
BARE = ("no gain", "full no gain")


def violations(profiles: Sequence[Profile], counted: bool = True) -> list[str]:
    """What the kernels violate, as lines. Without ``counted``, limits of counts are left out."""
    lines = [line for row in profiles for line in structural(row)]
    if counted:
        lines += [line for row in profiles for line in exceeded(row)]
        lines += [*steps(profiles), *slow(profiles)]
    return lines


def title(row: Profile) -> str:
    return f"{row.spec.kernel}, {row.spec.config}, {row.spec.arch}"


def structural(row: Profile) -> Iterator[str]:
    """Violations that do not depend on the compiler's schedule."""
    if row.stack_bytes > (most := most_spilled(row.spec)):
        yield f"{title(row)}: {row.stack_bytes} bytes of stack (spilled registers), at most {most}"
    wanted = TENSOR_CORE[row.spec.arch]
    if row.tensor_core != wanted:
        yield f"{title(row)}: {row.tensor_core or 'no tensor cores'} instead of {wanted}"
    # A kernel of a linear form may have one block of features, and then no loop.
    if not row.loops and row.spec.family != "linear":
        yield f"{title(row)}: no tile loop found in the machine code"
    for loop in row.loops:
        factors = {"tensor": loop.tensor_factor, "element-wise": loop.element_factor}
        for what, factor in factors.items():
            if factor is not None and factor > 1 + ROUNDING:
                yield (
                    f"{title(row)}, loop {loop.name}: {what} work is done {factor:.2f} times, "
                    "must be 1.00"
                )


def figure(loop: LoopCount, name: str) -> float:
    if name in UNITS:
        return float(getattr(loop, name))
    return loop.classes[name] if name in loop.classes else loop.share(*name.split("+"))


def exceeded(row: Profile) -> Iterator[str]:
    spec, linear = row.spec, row.spec.family == "linear"
    full = [loop for loop in row.loops if loop.name.split()[-1] in ("full", "all")]
    for limit in LIMITS:
        here = (spec.kernel, spec.activation, spec.head_dim, spec.arch)
        if here != (limit.kernel, limit.activation, limit.head_dim, limit.arch):
            continue
        if spec.dtype != "bf16" or not (linear or spec.extra in BARE):
            continue
        if limit.causal and spec.extra.startswith("full"):
            continue
        loops = [loop for loop in full if loop.name.startswith(limit.part)]
        if not loops:
            yield f"{title(row)}: no loop {limit.part} over full blocks found".replace("  ", " ")
        for loop in loops:
            value = figure(loop, limit.figure)
            if value > limit.most + ROUNDING:
                unit = UNITS.get(limit.figure, UNITS["total"])
                yield (
                    f"{title(row)}, loop {loop.name}: {limit.figure} {value:.2f}{unit}, "
                    f"at most {limit.most:g}"
                )
    causal = spec.extra in ("", "no gain") and spec.arch in EDGE_ARCHS
    if spec.kernel == "forward" and spec.activation == "exp" and causal:
        edges = [loop for loop in row.loops if loop.name == "edge"]
        for (opcode, most), edge in ((x, e) for x in EDGE_MORE.items() for e in edges):
            more = edge.share(opcode) - min(loop.share(opcode) for loop in full)
            if more > most + ROUNDING:
                yield f"{title(row)}, loop edge: {more:.2f} {opcode} more than full, at most {most}"


def steps(profiles: Sequence[Profile]) -> Iterator[str]:
    """Forward and backward together are too slow."""
    for (arch, activation, dim), most in STEP_CYCLES.items():
        for extra in BARE:
            rows = {
                row.spec.kernel: row.main
                for row in profiles
                if (row.spec.arch, row.spec.activation, row.spec.head_dim)
                == (arch, activation, dim)
                and row.spec.extra == extra
            }
            loops = [rows.get(kernel) for kernel in STEP]
            serial = [x.prediction.serial for x in loops if x is not None and x.prediction]
            if len(serial) == len(STEP) and sum(serial) > most + ROUNDING:
                yield (
                    f"forward, dq and dkdv together, {activation} D={dim} {extra}, {arch}: "
                    f"{sum(serial):.2f} cycles per element without overlap, at most {most}"
                )


def slow(profiles: Sequence[Profile]) -> Iterator[str]:
    """Calls with a mask are compared with plain ones, and D = 256 with D = 128."""
    known = {row.spec: row for row in profiles}
    for spec, row in known.items():
        dim = spec.head_dim if spec.extra else min(spec.head_dim, 128)
        plain = known.get(spec._replace(extra="", head_dim=dim))
        if spec.family == "linear" or plain is None or plain is row:
            continue
        if not (row.main and plain.main and row.main.prediction and plain.main.prediction):
            continue
        share = row.main.prediction.tflops / plain.main.prediction.tflops
        if share < LEAST_SPEED - ROUNDING:
            yield (
                f"{title(row)}: predicted at {share:.2f} of the speed of {plain.spec.config}, "
                f"at least {LEAST_SPEED}"
            )
