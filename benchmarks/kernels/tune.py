"""Try block sizes, numbers of warps and numbers of stages for one kernel.

Compiles the kernel with each combination. Prints those within the limits of `compile`, as entries
for the table in attnzoo/backends/triton/common/configurations.py. On a GPU it also times the whole
forward or backward pass with each configuration, in turn with the configuration that the table
contains now. It prints the fastest first. Configurations with a different result are reported and
not ranked. Without a GPU, the largest tiles come first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.bench import first_line
from benchmarks.harness.grid import TOKENS
from benchmarks.harness.journal import append
from benchmarks.harness.options import positive
from benchmarks.harness.timing import CudaEvents, Spread, Timer, ratio
from benchmarks.kernels.activations import VariantForm, activations, variant_forms
from benchmarks.kernels.compile import Compiled, compile_kernel, processes, require_compiler
from benchmarks.kernels.launches import arch_of, extras_of, few_queries
from benchmarks.kernels.specializations import (
    ARCHITECTURES,
    DTYPES,
    EXTRAS,
    KERNELS,
    Specialization,
)
from commandline.arguments import add_plugin
from commandline.errors import UsageError

HEADS = 16
CURRENT = "current"
# Largest difference, relative to the largest value, that is attributed to rounding to 16 bits.
TOLERANCE = 2e-2


class Tile(NamedTuple):
    """A configuration to try.

    map: for threshold variants, the tile size of the map of blocks with nonzero weights.
    """

    config: Any  # attnzoo.backends.triton.common.configurations.Config
    map: tuple[int, int] | None

    def __str__(self) -> str:
        c = self.config
        part = "" if c.part is None else f", part={c.part}"
        maker = "turned" if c.turned else "Config"
        shown = f"{maker}({c.block_m}, {c.block_n}, {c.warps}, {c.stages}{part})"
        return shown if self.map is None else f"{shown} map {self.map[0]}x{self.map[1]}"


class Timed(NamedTuple):
    milliseconds: Spread
    ratio: Spread  # time divided by that of the current configuration
    difference: float  # largest difference between results, relative to the largest value


def numbers(least: int, powers: bool = True) -> Callable[[str], list[int]]:
    """The type of an argument that lists ints >= ``least``; only powers of two if ``powers``."""

    def convert(text: str) -> list[int]:
        found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
        if any(n < least or (powers and n & (n - 1)) for n in found):
            what = "powers of two" if powers else "ints"
            raise argparse.ArgumentTypeError(f"must be {what} >= {least}, got {text!r}")
        return found

    return convert


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("tune", help="Try block sizes for a kernel", description=__doc__)
    add = parser.add_argument
    kernels = [name for name in KERNELS if name not in ("segments", "linear", "rows")]
    add("--kernel", choices=kernels, required=True, help="Tune this kernel")
    add("--activation", default="exp", metavar="NAME",
        help="Compile with this activation (default: exp)")  # fmt: skip
    add_plugin(parser)
    add("--extra", choices=("", *EXTRAS, "all"), default="",
        help="Add a window, ALiBi, segments, a key mask, a dense mask or all to the call",
    )  # fmt: skip
    add("--head-dim", type=positive(int), default=128, metavar="D",
        help="Use head dimension D (default: 128)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bf16", help="Use inputs of this dtype (default: bf16)")
    add("--arch", choices=ARCHITECTURES,
        help="Compile for this architecture (default: the GPU's; without a GPU, sm_90)",
    )  # fmt: skip
    lists = (
        ("--blocks", numbers(16), [32, 64, 128], "Try these tile sizes (default: 32,64,128)"),
        ("--warps", numbers(1), [4, 8], "Try these numbers of warps (default: 4,8)"),
        ("--stages", numbers(1, False), [1, 2, 3], "Try these numbers of stages (default: 1,2,3)"),
        ("--parts", numbers(16), [], "Also try to process the head dimension N columns at a time"),
    )
    for option, kind, default, words in lists:
        add(option, type=kind, default=default, metavar="N,N,…", help=words)
    single = (
        ("--length", 16384, "Time sequences of length N (default: 16384)"),
        ("--most", 16, "Time and print at most N configurations (default: 16)"),
        ("--jobs", os.cpu_count() or 1, "Compile in N processes (default: one per CPU)"),
    )
    for option, default, words in single:
        add(option, type=positive(int), default=default, metavar="N", help=words)
    add("--journal", type=Path, metavar="FILE",
        help="Append the time of each configuration to a file of JSON lines")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    spec = selected(args)
    require_compiler("tune")
    gpu = torch.cuda.is_available()
    if gpu:
        spec = spec._replace(arch=device_arch())
    given = candidates(args, spec)
    print(f"{spec.kernel}, {spec.config}, {spec.arch}: {len(given)} configurations", flush=True)
    clean = compile_tiles(spec, given, args.jobs, args.plugin)[: args.most]
    timed = timings(spec, [tile for tile, _ in clean], args.length, CudaEvents()) if gpu else {}
    if args.journal is not None:
        for tile, row in timed.items():
            append(args.journal, {"tile": record(spec, tile, row)})
    for text in table(clean, timed):
        print(text)
    if not clean:
        print("no configuration is within the limits")
        return 1
    if not gpu:
        print("not timed: torch sees no CUDA device")
    return 0


def record(spec: Specialization, tile: Tile, timed: Timed) -> dict[str, Any]:
    """The time of a configuration, for JSON."""
    ms, share = timed.milliseconds, timed.ratio
    return {
        "kernel": spec.kernel, "activation": spec.activation, "head_dim": spec.head_dim,
        "dtype": spec.dtype, "config": str(tile), "ms": [ms.lower, ms.median, ms.upper],
        "time / current": [share.lower, share.median, share.upper],
        "same_result": timed.difference <= TOLERANCE,
    }  # fmt: skip


def selected(args: argparse.Namespace) -> Specialization:
    """The specialization that the options select.

    Raises:
        UsageError: an option is invalid.
    """
    known, name = activations(), args.activation
    if name not in known:
        raise UsageError(f"--activation must be one of {', '.join(known)}, got {name!r}")
    if args.head_dim > 256:
        raise UsageError(f"--head-dim must be an int from 1 to 256, got {args.head_dim}")
    if args.kernel == "threshold" and known[name].form.normalize != "threshold":
        raise UsageError(
            f"--activation must belong to a threshold variant for --kernel threshold, got {name!r}"
        )
    if args.kernel == "stats" and known[name].kind != "online":
        raise UsageError(f"--activation must be exp for --kernel stats, got {name!r}")
    if args.kernel == "decode" and max(args.blocks) > 128:
        raise UsageError(f"--blocks must be <= 128 for --kernel decode, got {max(args.blocks)}")
    if torch.cuda.is_available() and args.arch is not None:
        raise UsageError("--arch cannot be given on a machine with a GPU")
    arch = args.arch or "sm_90"
    return Specialization(args.kernel, arch, args.dtype, args.head_dim, name, args.extra)


def device_arch() -> str:
    """The architecture whose configurations this GPU uses."""
    from attnzoo.backends.triton.common.configurations import SHARED
    from attnzoo.backends.triton.common.launch import architecture

    found = architecture(torch.device("cuda")) // 10 * 10
    return f"sm_{found if found in SHARED else 80}"


def candidates(args: argparse.Namespace, spec: Specialization) -> list[Tile]:
    from attnzoo.backends.triton.common.configurations import Config

    few = spec.kernel == "decode"  # one tile holds all query rows of a key/value head
    mapped = not few and activations()[spec.activation].form.normalize == "threshold"
    heights = [max(16, 8 * few_queries(spec))] if few else args.blocks
    sizes = product(heights, args.blocks, args.warps, args.stages)
    orientations = (False, True) if spec.kernel == "dkdv" else (False,)
    return [
        Tile(Config(m, n, *rest, part=part, turned=turned), (m, n) if mapped else None)
        for m, n, *rest in sizes
        for part in (None, *args.parts)
        for turned in orientations
    ]


@contextmanager
def with_tile(kernel: str, tile: Tile) -> Iterator[None]:
    """Makes every launch of this kernel use the tile's configuration, if it has one."""
    from attnzoo.backends.triton.decode import launch as launch_decode
    from attnzoo.backends.triton.flash import launch

    own, own_map, own_decode = launch.pick, launch.map_tile, launch_decode.decode_config

    def pick(name: str, *rest: Any) -> Any:
        return tile.config if tile.config and name == kernel else own(name, *rest)

    def map_tile(*call: Any) -> tuple[int, int]:
        return tile.map or own_map(*call)

    def decode_config(*call: Any) -> Any:
        return tile.config if tile.config and kernel == "decode" else own_decode(*call)

    with (
        mock.patch.object(launch, "pick", pick),
        mock.patch.object(launch, "map_tile", map_tile),
        mock.patch.object(launch_decode, "decode_config", decode_config),
    ):
        yield


def compile_tile(spec: Specialization, tile: Tile) -> Compiled | str:
    with with_tile(spec.kernel, tile):
        return compile_kernel(spec)


def compile_tiles(
    spec: Specialization, tiles: list[Tile], jobs: int, plugin: Path | None = None
) -> list[tuple[Tile, Compiled]]:
    """The tiles that satisfy all limits, by size (largest first), then registers (fewest first)."""
    from attnzoo.backends.triton.common.configurations import SHARED

    limit, found = SHARED[arch_of(spec)], []
    with processes(jobs, plugin) as pool:
        for tile, row in zip(tiles, pool.map(partial(compile_tile, spec), tiles), strict=True):
            if isinstance(row, str):
                print(f"{tile} does not compile: {row}")
            elif row.violation(spec.dtype != "fp32", limit) is None:
                found.append((tile, row))
    size = {tile: tile.config.block_m * tile.config.block_n for tile, _ in found}
    return sorted(found, key=lambda pair: (-size[pair[0]], pair[1].registers))


def call_of(spec: Specialization, length: int, device: str) -> Callable[[], tuple[Tensor, tuple]]:
    """A function that calls attention through the kernel and returns (output, (q, k, v))."""
    kind: dict[str, Any] = {"dtype": DTYPES[spec.dtype], "device": device}
    few = spec.kernel == "decode"  # eight query heads per key/value head, see `describe_decode`
    batch, dim = max(1, TOKENS // length), spec.head_dim
    heads, queries = (max(1, HEADS // 8), few_queries(spec)) if few else (HEADS, length)
    q = torch.randn(batch, HEADS, queries, dim, **kind).requires_grad_()
    k, v = (torch.randn(batch, heads, length, dim, **kind).requires_grad_() for _ in range(2))
    use, chosen = form_of(spec), extras_of(spec)
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


def form_of(spec: Specialization) -> VariantForm:
    """A form that uses the activation in ``spec``; for "stats", a form with `FromStatistics`."""
    if spec.kernel != "stats":
        return activations()[spec.activation]
    every = variant_forms(attnzoo.list_variants())
    return next(use for use in every if isinstance(use.form.gain, attnzoo.FromStatistics))


def timings(
    spec: Specialization, tiles: list[Tile], length: int, timer: Timer, device: str = "cuda"
) -> dict[Tile, Timed]:
    """The time of the whole pass with each tile: backward for dq and dkdv, otherwise forward.

    Tiles that fail are printed and left out.
    """
    call, calls, results = call_of(spec, length, device), {}, {}
    current = Tile(None, None)
    for tile in (current, *tiles):
        timed = timed_call(spec, tile, call)
        try:
            results[tile] = timed()
            timer.synchronize()
        except Exception as error:
            if tile is current:
                raise
            print(f"{tile} fails: {first_line(error)}", flush=True)
            continue
        calls[CURRENT if tile is current else str(tile)] = timed
    seconds = timer.rounds(calls, 10, 0.05)
    found = {}
    for tile in (tile for tile in tiles if tile in results):
        samples, base = seconds[str(tile)], seconds[CURRENT]
        gaps = [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(results[tile], results[current], strict=True)
        ]
        spread = Spread.of([1e3 * s for s in samples])
        found[tile] = Timed(spread, ratio(samples, base), max(gaps))
    return found


def timed_call(
    spec: Specialization, tile: Tile, call: Callable[[], tuple[Tensor, tuple]]
) -> Callable[[], tuple[Tensor, ...]]:
    from attnzoo.backends.triton.common import prepared

    # Prepared calls have the configuration of their first run, so each tile needs its own.
    calls, seen = {}, set()

    @contextmanager
    def patched() -> Iterator[None]:
        with (
            mock.patch.object(prepared, "_prepared", calls),
            mock.patch.object(prepared, "_seen", seen),
            with_tile(spec.kernel, tile),
        ):
            yield

    if spec.kernel not in ("dq", "dkdv"):

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
        ranked = [pair for pair in clean if pair[0] in timed and pair[0] not in wrong]
        clean = sorted(ranked, key=lambda pair: timed[pair[0]].milliseconds.median)
    for tile, row in clean:
        text = f"{tile!s:<44} {row.registers:>3} registers {row.shared_bytes:>6} B shared"
        text += f" {row.tensor_core or '–':<8}"
        if tile in timed:
            ms, share, _ = timed[tile]
            text += f" {ms.median:.3f} ms ({ms.lower:.3f}–{ms.upper:.3f})"
            text += f"  {share.median:.3f} × {CURRENT}"
        yield text.rstrip()
    for tile in wrong:
        yield f"{tile} DIFFERS from the {CURRENT} result by {timed[tile].difference:.1e}"
