"""Compiles every kernel configuration to machine code, without a GPU, and reads what came out.

A row: registers per thread, spilled bytes, shared memory, and the tensor-core instruction found in
the machine code. Exit status 1 where registers spill, shared memory exceeds the architecture's, or
a kernel on 16-bit matrices has no tensor-core instruction.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import report
from benchmarks.kernels import activations
from benchmarks.kernels.cells import (
    ARCHITECTURES,
    DTYPES,
    HEAD_DIMS,
    KERNELS,
    Cell,
    cells,
    quick_cells,
)
from benchmarks.kernels.launches import arch_of, describe
from commandline.arguments import add_plugin
from commandline.errors import UsageError
from commandline.variants import load_plugin

# The kernels that an activation is part of.
OF_ACTIVATIONS = ("forward", "dq", "dkdv", "decode")
# In the machine code: wgmma of Hopper, tcgen05 of Blackwell, mma of all others.
TENSOR_CORES = ("HGMMA", "UTCHMMA", "HMMA")


@dataclass(frozen=True)
class Compiled:
    kernel: str
    config: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core: str | None

    def unsound(self, sixteen_bit: bool, limit: int) -> str | None:
        """What is wrong with it, if anything."""
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes of registers"
        if self.shared_bytes > limit:
            return f"takes {self.shared_bytes} bytes of shared memory of {limit}"
        if sixteen_bit and self.tensor_core is None:
            return "has no tensor-core instruction"
        return None


_DIMS = ",".join(map(str, HEAD_DIMS))


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("compile", help="compile all kernels", description=__doc__)
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), metavar="sm_80,…")
    parser.add_argument("--head-dims", metavar="D,D,…", help=f"default: {_DIMS}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only what most calls use: bf16, D = 64 and 128, causal or full, with or without a "
        "gain, forward, backward, decode and linear",
    )
    parser.add_argument("--kernels", default=",".join(KERNELS), metavar="NAME,…")
    add_plugin(parser, "; the kernels of its activations alone are compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", metavar="FILE", help="written when all is compiled")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    jobs = wanted(args)
    require_compiler("compile")
    import triton

    from attnzoo.backends.triton.common.configurations import SHARED

    print(f"triton {triton.__version__}")
    header = ("kernel", "config", "arch", "registers", "spill", "shared", "tensor core", "")
    print(_line(header), flush=True)
    rows, wrong = [], 0
    with processes(args.jobs, args.plugin) as pool:
        for cell, row in zip(jobs, pool.map(compile_cell, jobs), strict=True):
            if isinstance(row, str):
                wrong += 1
                print(f"{cell.kernel}, {cell.config}, {cell.arch} does not compile: {row}")
                continue
            said = row.unsound(cell.dtype != "fp32", SHARED[arch_of(cell)])
            wrong += said is not None
            rows.append(row)
            figures = (row.registers, row.spill_bytes, row.shared_bytes, row.tensor_core or "–")
            print(_line((row.kernel, row.config, row.arch, *figures, said or "")), flush=True)
    if args.json:
        document = {"triton": triton.__version__, "environment": report.environment()}
        report.write_json(args.json, {**document, "rows": [asdict(row) for row in rows]})
    print(f"{len(jobs)} compiled, {wrong} of them outside the limits")
    return 1 if wrong else 0


def processes(number: int, plugin: Path | None) -> ProcessPoolExecutor:
    """Fresh ones that know the plugin: torch's threads do not survive a fork."""
    known: dict[str, Any] = {}
    if plugin is not None:
        known = {"initializer": load_plugin, "initargs": (plugin,)}
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"), **known)


def wanted(args: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for; an option that is wrong is refused here."""
    if args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {args.jobs}")
    report.check_target("--json", args.json)
    archs = chosen("--arch", args.arch, ARCHITECTURES)
    kernels = chosen("--kernels", args.kernels, KERNELS)
    if args.quick and args.head_dims is not None:
        raise UsageError("--quick has its own head dimensions: leave --head-dims out")
    texts = _DIMS if args.head_dims is None else args.head_dims
    dims = [int(text) if text.isdecimal() else 0 for text in texts.split(",")]
    if not all(1 <= d <= 256 for d in dims):
        raise UsageError(f"--head-dims must be numbers from 1 to 256, got {texts!r}")
    if args.plugin is not None:
        own = product(archs, dims, activations.of_plugin(args.plugin), OF_ACTIVATIONS)
        return [Cell(k, arch, "bf16", d, name) for arch, d, name, k in own if k in kernels]
    table = quick_cells(archs) if args.quick else cells(archs, dims)
    return [cell for cell in table if cell.family in kernels]


def chosen(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(known):
        raise UsageError(f"{option} must be of {', '.join(known)}, got {text!r}")
    return found


def require_compiler(what: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"{what} needs Triton: pip install 'attnzoo[gpu]'")
    from attnzoo.backends.triton.common.launch import interpreted

    if interpreted():
        raise UsageError(f"{what} cannot run under Triton's interpreter: unset TRITON_INTERPRET")


def _line(cells: tuple[Any, ...]) -> str:
    widths = (18, 28, 7, 9, 6, 7, 11, 0)
    return "  ".join(str(c).ljust(w) for c, w in zip(cells, widths)).rstrip()


POINTERS = {dtype: f"*{name}" for name, dtype in DTYPES.items()}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}


def compile_cell(cell: Cell) -> Compiled | str:
    """What came out, or the first line of what the compiler said."""
    try:
        return compile_launch(cell, describe(cell))
    except Exception as error:  # the compiler may fail in whatever way
        return (str(error).strip().splitlines() or [type(error).__name__])[0]


def compile_launch(cell: Cell, launch: Any) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, aligned = {}, {}, {}
    for n, param in enumerate(launch.kernel.params):
        value = launch.args[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], aligned[n,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", arch_of(cell), 32)
    done = triton.compile(source, target=target, options=launch.options)
    usage, code = _disassembled(done.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    core = next((name for name in TENSOR_CORES if re.search(rf"\b{name}\b", code)), None)
    figures = (int(found[1]), int(found[2]), done.metadata.shared)
    return Compiled(cell.kernel, cell.config, cell.arch, *figures, core)


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """What cuobjdump says of the resources, and the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = []
        for flag in ("-res-usage", "--dump-sass"):
            done = subprocess.run([tool, flag, file], capture_output=True, text=True, check=True)
            said.append(done.stdout + done.stderr)
    return said[0], said[1]
