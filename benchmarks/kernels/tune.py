"""Which block sizes a kernel could take: compiled without a GPU, and timed where there is one.

Compiles one kernel for one kind of call in every block size, number of warps and of stages that is
asked for, and prints those that stay within registers and shared memory as rows for
`configurations`. Without a GPU the largest tiles come first. With one, the whole forward or
backward that the kernel is part of is timed in each of them and with the table's own row, in the
same rounds, and the fastest come first; one whose result differs from the table's is named, not
ranked.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.grid import TOKENS
from benchmarks.harness.options import positive
from benchmarks.harness.timing import CudaEvents, Spread, Timer, ratio
from benchmarks.kernels.activations import Use, activations, uses
from benchmarks.kernels.cells import ARCHITECTURES, DTYPES, EXTRAS, KERNELS, Cell
from benchmarks.kernels.compile import Compiled, compile_cell, processes, require_compiler
from benchmarks.kernels.launches import arch_of, extras_of, few_queries
from commandline.arguments import add_plugin
from commandline.errors import UsageError

HEADS = 16
TABLE = "the table's"
# Results may differ by their rounding to 16 bits, and sums by their order.
TOLERANCE = 2e-2


class Tile(NamedTuple):
    """A row that is tried, and the tile of a threshold's map that goes with it."""

    config: Any  # attnzoo.backends.triton.common.configurations.Config
    map: tuple[int, int] | None

    def __str__(self) -> str:
        c = self.config
        part = "" if c.part is None else f", part={c.part}"
        shown = f"Config({c.block_m}, {c.block_n}, {c.warps}, {c.stages}{part})"
        return shown if self.map is None else f"{shown} map {self.map[0]}x{self.map[1]}"


class Timed(NamedTuple):
    milliseconds: Spread
    of_table: Spread
    difference: float  # of results, relative to the largest


def numbers(least: int, powers: bool = True) -> Callable[[str], list[int]]:
    """Triton's tiles are powers of two, of 16 at least; and so are numbers of warps."""

    def convert(text: str) -> list[int]:
        found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
        if any(n < least or (powers and n & (n - 1)) for n in found):
            what = f"{'powers of two' if powers else 'numbers'} from {least} on"
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected {what}, as {4 * least},{8 * least}"
            )
        return found

    return convert


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("tune", help="try block sizes of a kernel", description=__doc__)
    add = parser.add_argument
    kernels = [name for name in KERNELS if name != "linear"]
    add("--kernel", choices=kernels, required=True, help="the kernel to try block sizes of")
    add("--activation", default="exp", metavar="NAME", help="the activation (default: exp)")
    add_plugin(parser)
    add("--extra", choices=("", *EXTRAS, "all"), default="", help="what else the call has")
    add("--head-dim", type=positive(int), default=128, metavar="D", help="default: 128")
    add("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    add("--arch", choices=ARCHITECTURES, help="default: the GPU's, or sm_90")
    lists = (
        ("--blocks", numbers(16), [32, 64, 128], "rows and columns (default: 32,64,128)"),
        ("--warps", numbers(1), [4, 8], "numbers of warps (default: 4,8)"),
        ("--stages", numbers(1, powers=False), [1, 2, 3], "numbers of stages (default: 1,2,3)"),
        ("--parts", numbers(16), [], "columns to take at a time, beside all columns at once"),
    )
    for option, kind, default, words in lists:
        add(option, type=kind, default=default, metavar="N,N,…", help=words)
    single = (
        ("--length", 16384, "length of the sequences that are timed (default: 16384)"),
        ("--most", 16, "the most rows to time and print (default: 16)"),
        ("--jobs", os.cpu_count() or 1, "number of processes that compile"),
    )
    for option, default, words in single:
        add(option, type=positive(int), default=default, metavar="N", help=words)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cell = wanted(args)
    require_compiler("tune")
    gpu = torch.cuda.is_available()
    if gpu:
        cell = cell._replace(arch=device_arch())
    given = candidates(args, cell)
    print(f"{cell.kernel}, {cell.config}, {cell.arch}: {len(given)} to compile", flush=True)
    clean = compiled(cell, given, args.jobs, args.plugin)[: args.most]
    timed = timings(cell, [tile for tile, _ in clean], args.length, CudaEvents()) if gpu else {}
    for text in table(clean, timed):
        print(text)
    if not clean:
        print("none stays within the limits")
        return 1
    if not gpu:
        print("torch sees no CUDA device: nothing was timed")
    return 0


def wanted(args: argparse.Namespace) -> Cell:
    """The cell that the options ask for; an option that is wrong is refused here."""
    known, name = activations(), args.activation
    if name not in known:
        raise UsageError(f"--activation must be one of {', '.join(known)}, got {name!r}")
    if args.head_dim > 256:
        raise UsageError(f"--head-dim must be from 1 to 256, got {args.head_dim}")
    if args.kernel == "threshold" and known[name].form.normalize != "threshold":
        raise UsageError(f"--kernel threshold is for a threshold's activation, {name} is none")
    if args.kernel == "stats" and known[name].kind != "online":
        raise UsageError("--kernel stats is for --activation exp")
    if args.kernel == "decode" and max(args.blocks) > 128:
        raise UsageError(f"--blocks of decode must be at most 128, got {max(args.blocks)}")
    if torch.cuda.is_available() and args.arch is not None:
        raise UsageError("--arch is for a machine without a GPU: on this one it is the GPU's")
    arch = args.arch or "sm_90"
    return Cell(args.kernel, arch, args.dtype, args.head_dim, name, args.extra)


def device_arch() -> str:
    """The architecture whose rows the table has for this GPU."""
    from attnzoo.backends.triton.common.configurations import SHARED
    from attnzoo.backends.triton.common.launch import architecture

    found = architecture(torch.device("cuda")) // 10 * 10
    return f"sm_{found if found in SHARED else 80}"


def candidates(args: argparse.Namespace, cell: Cell) -> list[Tile]:
    from attnzoo.backends.triton.common.configurations import Config

    few = cell.kernel == "decode"  # packs its queries in one tile, which is no matter of choice
    mapped = not few and activations()[cell.activation].form.normalize == "threshold"
    heights = [max(16, 8 * few_queries(cell))] if few else args.blocks
    sizes = product(heights, args.blocks, args.warps, args.stages)
    return [
        Tile(Config(m, n, *rest, part=part), (m, n) if mapped else None)
        for m, n, *rest in sizes
        for part in (None, *args.parts)
    ]


@contextmanager
def replaced(kernel: str, tile: Tile) -> Iterator[None]:
    """Launches of this kernel take this row, wherever they are made."""
    from attnzoo.backends.triton.decode import launch as launch_decode
    from attnzoo.backends.triton.flash import launch

    own, own_map, own_decode = launch.pick, launch.map_tile, launch_decode.decode_config

    def pick(name: str, *rest: Any) -> Any:
        return tile.config if name == kernel else own(name, *rest)

    def map_tile(*call: Any) -> tuple[int, int]:
        return tile.map or own_map(*call)

    def decode_config(*call: Any) -> Any:
        return tile.config if kernel == "decode" else own_decode(*call)

    with (
        mock.patch.object(launch, "pick", pick),
        mock.patch.object(launch, "map_tile", map_tile),
        mock.patch.object(launch_decode, "decode_config", decode_config),
    ):
        yield


def compile_tile(cell: Cell, tile: Tile) -> Compiled | str:
    with replaced(cell.kernel, tile):
        return compile_cell(cell)


def compiled(
    cell: Cell, tiles: list[Tile], jobs: int, plugin: Path | None = None
) -> list[tuple[Tile, Compiled]]:
    """Those within the limits: the largest tiles first, then those with fewer registers."""
    from attnzoo.backends.triton.common.configurations import SHARED

    limit, found = SHARED[arch_of(cell)], []
    with processes(jobs, plugin) as pool:
        for tile, row in zip(tiles, pool.map(partial(compile_tile, cell), tiles), strict=True):
            if isinstance(row, str):
                print(f"{tile} does not compile: {row}")
            elif row.unsound(cell.dtype != "fp32", limit) is None:
                found.append((tile, row))
    size = {tile: tile.config.block_m * tile.config.block_n for tile, _ in found}
    return sorted(found, key=lambda pair: (-size[pair[0]], pair[1].registers))


def call_of(cell: Cell, length: int, device: str) -> Callable[[], tuple[Tensor, tuple]]:
    """The call that a cell describes, at this length: its output and its leaves."""
    kind: dict[str, Any] = {"dtype": DTYPES[cell.dtype], "device": device}
    few = cell.kernel == "decode"  # of groups of eight heads, as the gate has them
    batch, dim = max(1, TOKENS // length), cell.head_dim
    heads, queries = (max(1, HEADS // 8), few_queries(cell)) if few else (HEADS, length)
    q = torch.randn(batch, HEADS, queries, dim, **kind).requires_grad_()
    k, v = (torch.randn(batch, heads, length, dim, **kind).requires_grad_() for _ in range(2))
    use, chosen = use_of(cell), extras_of(cell)
    params = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in use.params.items()}
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": few, **params}
    if "window" in chosen:
        options["window"] = max(1, length // 4)
    if "alibi" in chosen:
        options["alibi"] = torch.linspace(0.01, 0.5, HEADS, device=device)
    if "segments" in chosen:
        ids = (torch.arange(length, device=device) // max(1, length // 4)).expand(batch, length)
        options["segment_ids"] = ids[:, -queries:], ids
    if "keys" in chosen:
        options["attn_mask"] = torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)
    if "mask" in chosen:
        options["attn_mask"] = torch.ones(1, 1, queries, length, dtype=torch.bool, device=device)

    def call() -> tuple[Tensor, tuple]:
        backend = "decode" if few else "flash"
        return attnzoo.attention(q, k, v, use.variant, backend=backend, **options), (q, k, v)

    return call


def use_of(cell: Cell) -> Use:
    """The variant that is called: one whose gain needs the kernel, or has the cell's activation."""
    if cell.kernel != "stats":
        return activations()[cell.activation]
    every = uses(attnzoo.list_variants())
    return next(use for use in every if isinstance(use.form.gain, attnzoo.FromStatistics))


def timings(
    cell: Cell, tiles: list[Tile], length: int, timer: Timer, device: str = "cuda"
) -> dict[Tile, Timed]:
    """The forward, or for dq and dkdv the backward, with each of these rows."""
    call, calls, results = call_of(cell, length, device), {}, {}
    own = Tile(None, None)
    for tile in (own, *tiles):
        calls[str(tile) if tile is not own else TABLE] = once = one_way(cell, tile, call)
        results[tile] = once()
    timer.settle()
    seconds = timer.rounds(calls, 10, 0.05)
    found = {}
    for tile in tiles:
        samples, base = seconds[str(tile)], seconds[TABLE]
        gaps = [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(results[tile], results[own], strict=True)
        ]
        spread = Spread.of([1e3 * s for s in samples])
        found[tile] = Timed(spread, ratio(samples, base), max(gaps))
    return found


def one_way(
    cell: Cell, tile: Tile, call: Callable[[], tuple[Tensor, tuple]]
) -> Callable[[], tuple[Tensor, ...]]:
    patched = partial(replaced, cell.kernel, tile) if tile.config is not None else nullcontext
    if cell.kernel not in ("dq", "dkdv"):

        def forward() -> tuple[Tensor, ...]:
            with patched(), torch.no_grad():
                return (call()[0],)

        return forward
    with patched():
        out, leaves = call()
    do = torch.ones_like(out)

    def backward() -> tuple[Tensor, ...]:
        with patched():
            return torch.autograd.grad(out, leaves, do, retain_graph=True)

    return backward


def table(clean: list[tuple[Tile, Compiled]], timed: dict[Tile, Timed]) -> Iterator[str]:
    wrong = {tile for tile, t in timed.items() if not t.difference <= TOLERANCE}
    if timed:
        ranked = [pair for pair in clean if pair[0] not in wrong]
        clean = sorted(ranked, key=lambda pair: timed[pair[0]].milliseconds.median)
    for tile, row in clean:
        text = f"{tile!s:<44} {row.registers:>3} registers {row.shared_bytes:>6} bytes"
        text += f" {row.tensor_core or '–':<8}"
        if tile in timed:
            ms, of_table, _ = timed[tile]
            text += f" {ms.median:.3f} ms ({ms.lower:.3f}–{ms.upper:.3f})"
            text += f"  {of_table.median:.3f} of {TABLE}"
        yield text.rstrip()
    for tile in wrong:
        yield f"{tile} DIFFERS from the table's result by {timed[tile].difference:.1e}"
