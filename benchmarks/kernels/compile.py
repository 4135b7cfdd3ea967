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
from typing import Any, NamedTuple

import torch

from benchmarks.harness import report
from benchmarks.kernels import plugin_twins
from benchmarks.kernels.cells import (
    ARCHITECTURES,
    BARE,
    DTYPES,
    EXTRAS,
    FEATURES,
    HEAD_DIMS,
    KERNELS,
    STAGES,
    TWINS,
    Cell,
    cells,
    quick_cells,
)
from commandline.arguments import add_plugin
from commandline.errors import UsageError

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

    def objection(self, sixteen_bit: bool, limit: int) -> str | None:
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
    # A fresh process each: torch's threads do not survive a fork.
    spawned: dict[str, Any] = {"initializer": enlist, "initargs": (args.plugin,)}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), **spawned) as pool:
        for cell, row in zip(jobs, pool.map(compile_cell, jobs), strict=True):
            if isinstance(row, str):
                wrong += 1
                print(f"{cell.kernel}, {cell.config}, {cell.arch} does not compile: {row}")
                continue
            said = row.objection(cell.dtype != "fp32", SHARED[int(cell.arch.removeprefix("sm_"))])
            wrong += said is not None
            rows.append(row)
            figures = (row.registers, row.spill_bytes, row.shared_bytes, row.tensor_core or "–")
            print(_line((row.kernel, row.config, row.arch, *figures, said or "")), flush=True)
    if args.json:
        document = {"triton": triton.__version__, "environment": report.environment()}
        report.write_json(args.json, {**document, "rows": [asdict(row) for row in rows]})
    print(f"{len(jobs)} compiled, {wrong} of them outside the limits")
    return 1 if wrong else 0


def enlist(plugin: Path | None) -> list[str]:
    """Make the twins of a plugin known in this process; their names."""
    return [] if plugin is None else plugin_twins.enlist(plugin, TWINS)


def wanted(args: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for; an option that is wrong is refused here."""
    if args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {args.jobs}")
    report.check_target("--json", args.json)
    archs = args.arch.split(",")
    for arch in archs:
        if arch not in ARCHITECTURES:
            raise UsageError(f"--arch must be of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if args.quick and args.head_dims is not None:
        raise UsageError("--quick has its own head dimensions: leave --head-dims out")
    try:
        dims = [int(d) for d in (_DIMS if args.head_dims is None else args.head_dims).split(",")]
    except ValueError:
        raise UsageError(f"--head-dims must be numbers, got {args.head_dims!r}") from None
    if not all(1 <= d <= 256 for d in dims):
        raise UsageError(f"--head-dims must be from 1 to 256, got {args.head_dims!r}")
    kernels = args.kernels.split(",")
    if not set(kernels) <= set(KERNELS):
        raise UsageError(f"--kernels must be of {', '.join(KERNELS)}, got {args.kernels!r}")
    if args.plugin is not None:
        own = product(archs, dims, enlist(args.plugin), plugin_twins.KERNELS)
        return [Cell(k, arch, "bf16", d, twin) for arch, d, twin, k in own if k in kernels]
    table = quick_cells(archs) if args.quick else cells(archs, dims)
    return [cell for cell in table if cell.kernel in kernels]


def require_compiler(what: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"{what} needs Triton: pip install 'attnzoo[gpu]'")
    from attnzoo.backends.triton.common.launch import interpreted

    if interpreted():
        raise UsageError(f"{what} cannot run under Triton's interpreter: unset TRITON_INTERPRET")


def _line(cells: tuple[Any, ...]) -> str:
    widths = (10, 28, 7, 9, 6, 7, 11, 0)
    return "  ".join(str(c).ljust(w) for c, w in zip(cells, widths)).rstrip()


class Described(NamedTuple):
    """What a cell says of a call, as the launches take it."""

    layout: Any
    form: Any
    vectors: Any
    lse: bool


def described(cell: Cell, twin: str, q: torch.Tensor, keys: int) -> Described:
    from attnzoo.backends.operands import Layout, Vectors
    from attnzoo.backends.triton.common.operands import Form, new_vector

    normalize, unit, vanishes = TWINS[twin]
    vector, queries, all_extras = new_vector(q), q.shape[2], cell.extra.startswith("all")
    bare = cell.extra if cell.extra in BARE else ""
    extras = EXTRAS if all_extras else (cell.extra,)
    of_q, of_k = (
        q.new_empty(1, n, dtype=torch.int64) if "segments" in extras else None
        for n in (queries, keys)
    )
    mask = q.new_empty(1, 1, 1, keys, dtype=torch.uint8) if "keys" in extras else None
    if "heads" in extras:
        mask = q.new_empty(1, q.shape[1], 1, keys, dtype=torch.uint8)
    mask = q.new_empty(1, 1, queries, keys) if "mask" in extras else mask
    left, alibi = 256 if "window" in extras else None, vector if "alibi" in extras else None
    lse = all_extras and normalize == "online"
    vectors = Vectors(
        gain=None if "no gain" in bare else vector,
        offset=vector if normalize in ("none", "threshold") else None,
        shape=vector if twin == "q_exp" else None,
        sink=vector if lse else None,
    )
    form = Form(plugin_twins.function(twin), unit, vanishes, normalize)
    right = None if "full" in bare else 0
    return Described(Layout(0.1, left, right, mask, of_q, of_k, alibi), form, vectors, lse)


def describe(cell: Cell) -> Any:
    """The launch of the call that a cell stands for, on tensors that hold nothing."""
    from attnzoo.backends.triton.common.operands import Maps, new_vector, stands_apart
    from attnzoo.backends.triton.flash import launch as kernels

    if cell.kernel == "linear":
        return describe_linear(cell)
    if cell.kernel == "decode":
        return describe_decode(cell)
    shape = (1, 2, 1024, cell.head_dim + cell.extra.endswith("odd"))
    q = torch.empty(shape, dtype=DTYPES[cell.dtype], device="meta")[..., : cell.head_dim]
    vector, arch = new_vector(q), int(cell.arch.removeprefix("sm_"))
    layout, form, vectors, lse = described(cell, cell.twin, q, 1024)
    normalize = form.normalize
    maps = Maps(*kernels.empty_maps(q, q, q, layout)) if normalize == "threshold" else Maps()
    if cell.kernel == "forward":
        return kernels.describe_forward(q, q, q, layout, form, vectors, maps, lse, arch)[0]
    if cell.kernel == "stats":
        return kernels.describe_stats(q, q, layout, arch)[0]
    if cell.kernel == "threshold":
        alpha = None if cell.twin == "q_exp" else 1.5
        return kernels.describe_threshold(q, q, q, layout, form, vectors, alpha, arch)[0]
    given = {
        "gain": vectors.gain is not None, "offset": normalize == "none", "sink": lse,
        "alibi": layout.alibi is not None,
    }  # fmt: skip
    wanted = [name for name, there in given.items() if there]
    apart = stands_apart(normalize, layout.mask)
    stat = None if normalize == "none" else new_vector(q, apart)
    launches, _ = kernels.describe_backward(
        q, vector if lse else None, q, q, q, q, stat, vector, layout, form, vectors, maps, wanted,
        arch,
    )  # fmt: skip
    return launches[0] if cell.kernel == "dq" else launches[-1]


def describe_linear(cell: Cell) -> Any:
    """The launch of a causal call over a group of two heads."""
    from attnzoo.backends.triton.linear import launch as kernels

    dtype, arch = DTYPES[cell.dtype], int(cell.arch.removeprefix("sm_"))
    x = torch.empty(1, 2, 1024, FEATURES, dtype=dtype, device="meta")
    do = x.new_empty(1, 2, 1024, cell.head_dim, dtype=dtype)
    z = x.new_empty(1, 2, 1024, dtype=torch.float32)
    y, v, rows = x[:, :1], do[:, :1], (z, z)
    launch, kept, _ = kernels.describe_states(y, v, None, None, 1, True, arch)
    if cell.twin == "states back":
        return kernels.describe_states(x, do, None, rows, 1, True, arch)[0]
    if cell.twin == "output":
        return kernels.describe_output(x, y, v, kept, cell.head_dim, dtype, arch)[0]
    if cell.twin == "dx":
        return kernels.describe_dx(x, y, v, do, kept, rows, arch)[0]
    if cell.twin in ("dy", "dv"):
        both = kernels.describe_dy_dv(x, y, v, do, kept, rows, arch)[0]
        return both[("dy", "dv").index(cell.twin)]
    return launch


def few_queries(cell: Cell) -> int:
    """Of a group of eight heads: sixteen rows in a tile, thirty-two, or as many as there can be."""
    few = {"": 1, "keys": 1, "heads": 1, "window": 4}
    return few.get(cell.extra, 4 if cell.dtype == "fp32" else 8)


def describe_decode(cell: Cell) -> Any:
    """The launch of one query, or of a few, of a group of eight heads."""
    from attnzoo.backends.triton.decode import launch as kernels

    plain, arch = not cell.extra.startswith("all"), int(cell.arch.removeprefix("sm_"))
    queries = few_queries(cell)
    dim = cell.head_dim + cell.extra.endswith("odd")
    q = torch.empty(1, 8, queries, dim, dtype=DTYPES[cell.dtype], device="meta")
    q, k = (x[..., : cell.head_dim] for x in (q, q.new_empty(1, 1, 4096, dim)))
    twin = {"solver": "entmax15" if plain else "q_exp"}.get(cell.twin, cell.twin)
    twin = "exp" if twin in STAGES else twin
    layout, form, vectors, lse = described(cell, twin, q, 4096)
    if cell.twin == "statistics" or (cell.twin == "products" and not plain):
        launches, _ = kernels.describe_statistics(q, k, layout, arch, 132)
        return launches[cell.twin == "statistics"]
    if cell.twin in ("solver", "products"):
        alpha = None if twin == "q_exp" else 1.5
        launches, _ = kernels.describe_threshold(q, k, layout, form, vectors, alpha, arch, 132)
        return launches[cell.twin == "solver"]
    left = kernels.new_products(q, k, layout) if form.normalize == "threshold" else None
    launches, _ = kernels.describe_decode(q, k, k, left, layout, form, vectors, lse, arch, 132)
    return launches[cell.twin == "merge"]


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_cell(cell: Cell) -> Compiled | str:
    """What came out, or the first line of what the compiler said."""
    try:
        return compile_launch(cell, describe(cell))
    except Exception as error:  # a pass of the compiler may fail in whatever way
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
    target = GPUTarget("cuda", int(cell.arch.removeprefix("sm_")), 32)
    done = triton.compile(source, target=target, options=launch.options)
    usage, code = _disassembled(done.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    core = next((name for name in TENSOR_CORES if re.search(rf"\b{name}\b", code)), None)
    return Compiled(
        cell.kernel,
        cell.config,
        cell.arch,
        int(found[1]),
        int(found[2]),
        done.metadata.shared,
        core,
    )


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
