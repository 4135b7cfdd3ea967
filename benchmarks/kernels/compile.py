"""Compile the Triton kernels to machine code, without a GPU, and check the result.

A configuration is an activation, head dimension, dtype and masks. The table shows registers per
thread, spilled bytes, shared memory in bytes, and the tensor-core instruction found in the machine
code. The exit status is 1 if a kernel

- does not compile;
- spills registers at all with a plain tile (see `launch.is_safe`) in bf16 with head dimension 64 or
  128, or more than 64 bytes otherwise, or 128 with Triton before 3.9. Calls with all masks and
  terms at once are rare: they may spill 512 bytes;
- needs more registers or shared memory than the architecture has; or
- multiplies 16-bit matrices without tensor cores, or with such a plain tile without those of the
  architecture's generation.

``python -m benchmarks profile --check`` checks that no work is done twice.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import report
from benchmarks.kernels import activations, sass
from benchmarks.kernels.launches import arch_of, describe, is_plain
from benchmarks.kernels.specializations import (
    ARCHITECTURES,
    DTYPES,
    FLASH,
    HEAD_DIMS,
    KERNELS,
    QUICK_DIMS,
    SHARES_KERNELS,
    Specialization,
    quick_specializations,
    specializations,
)
from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.variants import load_plugin

# Registers of a multiprocessor. A warp gets them for its 32 threads in units of 8 per thread.
REGISTERS = 65_536

# Bytes of registers that kernels may spill, apart from those in which none may be
SPILLED, SPILLED_RARELY = 64, 512
# Before this version, Triton spills more with the same tiles.
SPARING, SPILLED_BEFORE = (3, 9), 128

# The kernels that are compiled for the activations of a plugin.
OF_ACTIVATIONS = ("forward", "dq", "dkdv", "decode")


@dataclass(frozen=True)
class Compiled:
    kernel: str
    config: str
    arch: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core: str | None

    def violation(self, limit: int, most_spilled: int, tensor_core: str | None) -> str | None:
        """The limit that the kernel violates, if any.

        limit: bytes of shared memory. tensor_core: the instruction that it must have, "" for any.
        """
        if self.spill_bytes > most_spilled:
            return f"spills {self.spill_bytes} bytes of registers, limit {most_spilled}"
        if (needed := -(-self.registers // 8) * 8 * 32 * self.warps) > REGISTERS:
            return f"needs {needed} registers for {self.warps} warps, limit {REGISTERS}"
        if self.shared_bytes > limit:
            return f"uses {self.shared_bytes} bytes of shared memory, limit {limit}"
        if tensor_core is not None and self.tensor_core is None:
            return "no tensor-core instruction"
        if tensor_core and self.tensor_core != tensor_core:
            return f"{self.tensor_core} instead of {tensor_core}"
        return None


def is_common(spec: Specialization) -> bool:
    """Whether the limits are strict: plain tiles in bf16 with common head dimensions."""
    return spec.dtype == "bf16" and spec.head_dim in QUICK_DIMS and is_plain(spec)


def most_spilled(spec: Specialization) -> int:
    """The bytes of registers that a kernel may spill; see the module docstring."""
    import triton

    if spec.extra.startswith("all"):
        return SPILLED_RARELY
    if tuple(map(int, triton.__version__.split(".")[:2])) < SPARING:
        return SPILLED_BEFORE
    return 0 if is_common(spec) else SPILLED


def problem(spec: Specialization, row: Compiled) -> str | None:
    """The limit that a compiled kernel violates, if any; see the module docstring."""
    from attnzoo.backends.triton.common.tiles import SHARED

    tensor_core = None
    if spec.dtype != "fp32" and spec.family != "rows":
        strict = is_common(spec) and spec.kernel in (*FLASH, "dbias", "selection", *SHARES_KERNELS)
        tensor_core = sass.TENSOR_CORE[spec.arch] if strict else ""
    return row.violation(SHARED[arch_of(spec)], most_spilled(spec), tensor_core)


_DIMS = ",".join(map(str, HEAD_DIMS))


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compile", help="Compile the kernels and check limits", description=__doc__
    )
    archs, kernels = ",".join(ARCHITECTURES), ",".join(KERNELS)
    parser.add_argument(
        "--arch", default=archs, metavar="sm_80,…",
        help=f"Compile for these architectures (default: {archs})",
    )  # fmt: skip
    parser.add_argument(
        "--head-dims", metavar="D,D,…", help=f"Use these head dimensions (default: {_DIMS})"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Compile only the kernels of most calls: bf16, head dimensions 64 and 128, causal or "
        "full, no window, ALiBi, segments or mask",
    )
    parser.add_argument(
        "--kernels", default=kernels, metavar="NAME,…",
        help=f"Compile these kernels (default: {kernels})",
    )  # fmt: skip
    add_plugin(parser, "; only the kernels of its activations are compiled")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
        help="Compile in N processes (default: one per CPU)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="Write results to a JSON file at the end")
    parser.set_defaults(run=compile_selected)


def compile_selected(args: argparse.Namespace) -> int:
    jobs = selected(args)
    require_compiler("compile")
    import triton

    print(f"triton {triton.__version__}")
    header = (
        "kernel", "configuration", "arch", "registers", "spilled B", "shared B", "tensor core",
        "problem",
    )  # fmt: skip
    print(_line(header), flush=True)
    rows, wrong = [], 0
    with processes(args.jobs, args.plugin) as pool:
        for spec, row in zip(jobs, pool.map(compile_kernel, jobs), strict=True):
            if isinstance(row, str):
                wrong += 1
                print(f"{spec.kernel}, {spec.config}, {spec.arch} does not compile: {row}")
                continue
            violated = problem(spec, row)
            wrong += violated is not None
            rows.append(row)
            figures = (row.registers, row.spill_bytes, row.shared_bytes, row.tensor_core or "–")
            print(_line((row.kernel, row.config, row.arch, *figures, violated or "")), flush=True)
    if args.json:
        document = {"triton": triton.__version__, "environment": report.environment()}
        report.write_json(args.json, {**document, "rows": [asdict(row) for row in rows]})
    print(f"{len(jobs)} kernels, {wrong} with problems")
    return 1 if wrong else 0


def processes(number: int, plugin: Path | None) -> ProcessPoolExecutor:
    """A pool of spawned processes that load the plugin. torch's threads do not survive a fork."""
    known: dict[str, Any] = {}
    if plugin is not None:
        known = {"initializer": load_plugin, "initargs": (plugin,)}
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), **known)


def selected(args: argparse.Namespace) -> list[Specialization]:
    """The specializations that the options select.

    Raises:
        UsageError: an option is invalid.
    """
    archs, kernels = common_options(args, KERNELS)
    if args.quick and args.head_dims is not None:
        raise UsageError("--head-dims cannot be combined with --quick, which sets 64 and 128")
    if args.quick and args.plugin is not None:
        raise UsageError("--quick cannot be combined with --plugin; use --head-dims or --kernels")
    texts = _DIMS if args.head_dims is None else args.head_dims
    dims = [int(text) if text.isdecimal() else 0 for text in texts.split(",")]
    if not all(d in range(8, 257, 8) for d in dims):
        raise UsageError(f"--head-dims must be multiples of 8 from 8 to 256, got {texts!r}")
    if args.plugin is not None:
        combinations = product(
            archs, dims, activations.plugin_activations(args.plugin), OF_ACTIVATIONS
        )
        return [
            Specialization(k, arch, "bf16", d, name)
            for arch, d, name, k in combinations
            if k in kernels
        ]
    table = quick_specializations(archs) if args.quick else specializations(archs, dims)
    return [spec for spec in table if spec.family in kernels]


def common_options(args: argparse.Namespace, known: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The architectures and kernels that the options select. Also checks --jobs and --json.

    Raises:
        UsageError: an option is invalid.
    """
    if args.jobs < 1:
        raise UsageError(f"--jobs must be an int >= 1, got {args.jobs}")
    report.check_target("--json", args.json)
    archs = chosen("--arch", args.arch, ARCHITECTURES)
    return archs, chosen("--kernels", args.kernels, known)


def chosen(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(known):
        raise UsageError(f"{option} must list some of {', '.join(known)}, got {text!r}")
    return names


def require_compiler(what: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"{what} requires Triton. Install it with: pip install -e '.[gpu]'")
    from attnzoo.backends.triton.common.tile import INTERPRETED

    if INTERPRETED.value:
        raise UsageError(f"{what} cannot run in Triton's interpreter. Unset TRITON_INTERPRET.")


def _line(cells: tuple[Any, ...]) -> str:
    widths = (18, 28, 7, 9, 9, 8, 11, 0)
    return "  ".join(str(c).ljust(w) for c, w in zip(cells, widths)).rstrip()


POINTERS = {dtype: f"*{name}" for name, dtype in DTYPES.items()}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}


def compile_kernel(spec: Specialization) -> Compiled | str:
    """The compiled kernel, or the reason why it does not compile."""
    try:
        return compile_launch(spec, describe(spec))
    except Exception as error:  # compilers raise many types
        return reason(error)


def reason(error: BaseException) -> str:
    """What a compiler says is wrong, in one line.

    Triton wraps the error of an inlined function, and begins with a position in it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]


def compile_launch(spec: Specialization, launch: Any) -> Compiled:
    done = build(spec, launch)
    usage, code = sass.disassembled(done.asm["cubin"])
    figures = (done.metadata.num_warps, *sass.resources(usage), done.metadata.shared)
    return Compiled(spec.kernel, spec.config, spec.arch, *figures, sass.tensor_core(code))


def build(spec: Specialization, launch: Any) -> Any:
    """The kernel that Triton compiles for a launch; its ``asm`` holds the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import constexpr

    from attnzoo.backends.triton.common.groups import mapped

    constants, aligned = {}, {}

    def kind_of(value: Any, path: tuple[int, ...]) -> str:
        if value is None or callable(value) or isinstance(value, constexpr):
            constants[path] = getattr(value, "value", value)
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16 == 0:
                aligned[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, str):  # the type of a TMA descriptor
            return value
        return "fp32" if isinstance(value, float) else "i32"

    signature = {}
    for n, param in enumerate(launch.kernel.params):
        value = launch.args[param.name]
        wrapped = constexpr(value) if param.is_constexpr else value
        signature[param.name] = mapped(kind_of, wrapped, n)
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", arch_of(spec), 32)
    return triton.compile(source, target=target, options=launch.options)
