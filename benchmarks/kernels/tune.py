"""Try block sizes, numbers of warps and numbers of stages for kernels.

Compiles a kernel with each combination, and prints those within the limits of `compile`, the
largest tiles first, as entries for attnzoo/backends/triton/common/tiles.py. With ``--device cuda``
it also times the whole forward or backward pass with each, in turn with the current tile, and
prints the fastest first. Tiles with a different result are reported and not ranked. If the fastest
tile of a plain call is faster than the current one, it is written to the file of measured tiles of
this GPU, which later processes read; ``python -m attnzoo`` prints its name.
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
from benchmarks.kernels.compile import (
    Compiled,
    compile_kernel,
    problem,
    processes,
    require_compiler,
)
from benchmarks.kernels.launches import extras_of, few_queries
from benchmarks.kernels.specializations import ARCHITECTURES, DTYPES, EXTRAS, Specialization
from benchmarks.kernels.stored_tiles import check_output, is_stored, store
from commandline.arguments import add_plugin
from commandline.errors import UsageError

HEADS = 16
# Kernels that are tuned unless one is named
TUNED = ("forward", "dq", "dkdv", "stats", "decode")
CURRENT = "current"
# Largest difference, relative to the largest value, that is attributed to rounding to 16 bits.
TOLERANCE = 2e-2


def shown(config: Any) -> str:
    """A tile as an entry of the tables."""
    maker = "transposed" if config.transposed else "Config"
    part = "" if config.part is None else f", part={config.part}"
    return f"{maker}({config.block_m}, {config.block_n}, {config.warps}, {config.stages}{part})"


class Timed(NamedTuple):
    milliseconds: Spread
    ratio: Spread  # time divided by that of the current tile
    difference: float  # largest difference between results, relative to the largest value


def numbers(least: int, powers: bool = True) -> Callable[[str], list[int]]:
    """The type of an argument that lists ints >= ``least``; only powers of two if ``powers``."""

    def convert(text: str) -> list[int]:
        values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
        if any(n < least or (powers and n & (n - 1)) for n in values):
            what = "powers of two" if powers else "ints"
            raise argparse.ArgumentTypeError(f"must be {what} >= {least}, got {text!r}")
        return values

    return convert


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("tune", help="Try block sizes for a kernel", description=__doc__)
    add = parser.add_argument
    add("--kernel", choices=(*TUNED, "threshold"),
        help=f"Tune this kernel (default: {', '.join(TUNED)}, one after the other)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="cpu: compile only. cuda: time on the GPU, and write measured tiles (default: cpu)",
    )  # fmt: skip
    add("--activation", default="exp", metavar="NAME",
        help="Compile with this activation (default: exp)")  # fmt: skip
    add_plugin(parser)
    add("--extra", choices=("", *EXTRAS, "all"), default="",
        help="Add a window, ALiBi, segments, a key mask, a dense mask or all to the call",
    )  # fmt: skip
    add("--head-dim", type=positive(int), metavar="D",
        help="Use head dimension D (default: 64, 128 and 256, one after the other)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bf16", help="Use inputs of this dtype (default: bf16)")
    add("--arch", choices=ARCHITECTURES,
        help="Compile for this architecture (default: the GPU's; with --device cpu, sm_90)",
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
    add("--output", type=Path, metavar="FILE",
        help="Write measured tiles to this file (default: the one that later processes read)",
    )  # fmt: skip
    parser.set_defaults(run=tune_selected)


def tune_selected(args: argparse.Namespace) -> int:
    specs = selected(args)
    require_compiler("tune")
    if args.device == "cuda":
        check_output(args.output)
    ranked = [tuned(args, spec) for spec in specs]
    if args.device == "cpu":
        print("not timed: that requires --device cuda")
    return 0 if all(ranked) else 1


def tuned(args: argparse.Namespace, spec: Specialization) -> bool:
    """Try tiles for one kernel. Returns whether one is within the limits."""
    configs = candidates(args, spec)
    print(f"{spec.kernel}, {spec.config}, {spec.arch}: {len(configs)} tiles", flush=True)
    clean = compile_tiles(spec, configs, args.jobs, args.plugin)[: args.most]
    timed: dict[Any, Timed] = {}
    if args.device == "cuda":
        timed = timings(spec, [config for config, _ in clean], args.length, CudaEvents())
    if args.journal is not None:
        for config, row in timed.items():
            append(args.journal, {"tile": record(spec, config, row)})
    for text in table(clean, timed):
        print(text)
    if not clean:
        print("no tile is within the limits")
    if is_stored(spec) and (best := faster(timed)) is not None:
        print(f"written to {store(spec, best, torch.cuda.get_device_name(), args.output)}")
    return bool(clean)


def faster(timed: dict[Any, Timed]) -> Any:
    """The fastest tile, or None if the current one is as fast within the quartiles."""
    right = {config: t for config, t in timed.items() if t.difference <= TOLERANCE}
    best = min(right, key=lambda config: right[config].milliseconds.median, default=None)
    return best if best is not None and right[best].ratio.upper < 1.0 else None


def record(spec: Specialization, config: Any, timed: Timed) -> dict[str, Any]:
    """The time of a tile, for JSON."""
    ms, share = timed.milliseconds, timed.ratio
    return {
        "kernel": spec.kernel, "activation": spec.activation, "head_dim": spec.head_dim,
        "dtype": spec.dtype, "config": shown(config), "ms": [ms.lower, ms.median, ms.upper],
        "time / current": [share.lower, share.median, share.upper],
        "same_result": timed.difference <= TOLERANCE,
    }  # fmt: skip


def selected(args: argparse.Namespace) -> list[Specialization]:
    """The specializations that the options select.

    Raises:
        UsageError: an option is invalid.
    """
    known, name = activations(), args.activation
    if name not in known:
        raise UsageError(f"--activation must be one of {', '.join(known)}, got {name!r}")
    dims = (64, 128, 256) if args.head_dim is None else (args.head_dim,)
    kernels = TUNED if args.kernel is None else (args.kernel,)
    if max(dims) > 256:
        raise UsageError(f"--head-dim must be an int from 1 to 256, got {args.head_dim}")
    if args.kernel == "threshold" and known[name].form.normalize != "threshold":
        raise UsageError(
            f"--activation must belong to a threshold variant for --kernel threshold, got {name!r}"
        )
    if "stats" in kernels and known[name].kind != "online":
        raise UsageError(f"--activation must be exp for --kernel stats, got {name!r}")
    if "decode" in kernels and max(args.blocks) > 128:
        raise UsageError(f"--blocks must be <= 128 for --kernel decode, got {max(args.blocks)}")
    arch = args.arch or "sm_90"
    if args.device == "cuda":
        if args.arch is not None:
            raise UsageError("--arch cannot be combined with --device cuda")
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA device")
        arch = device_arch()
    return [
        Specialization(kernel, arch, args.dtype, dim, name, args.extra)
        for kernel, dim in product(kernels, dims)
    ]


def device_arch() -> str:
    """The architecture whose tiles this GPU uses."""
    from attnzoo.backends.triton.common.launch import architecture
    from attnzoo.backends.triton.common.tiles import known

    return f"sm_{known(architecture(torch.device('cuda')))}"


def candidates(args: argparse.Namespace, spec: Specialization) -> list[Any]:
    from attnzoo.backends.triton.common.tiles import Config, map_tile

    blocks = list(product(args.blocks, args.blocks))
    if spec.kernel == "decode":  # one tile holds all query rows of a key/value head
        blocks = list(product([max(16, 8 * few_queries(spec))], args.blocks))
    if spec.kernel == "threshold":  # other block sizes would change the block map
        blocks = [map_tile(spec.head_dim, 8 * DTYPES[spec.dtype].itemsize)]
    return [
        Config(m, n, warps, stages, part=part, transposed=transposed)
        for m, n in blocks
        for warps, stages in product(args.warps, args.stages)
        for part in (None, *args.parts)
        for transposed in ((False, True) if spec.kernel == "dkdv" else (False,))
    ]


@contextmanager
def with_tile(kernel: str, config: Any) -> Iterator[None]:
    """Makes every launch of this kernel use the tile. None: the current one."""
    from attnzoo.backends.triton.common import measured

    current = measured.tile_of_kernel

    def tile_of_kernel(name: str, *call: Any) -> Any:
        return config if config and name == kernel else current(name, *call)

    with mock.patch.object(measured, "tile_of_kernel", tile_of_kernel):
        yield


def compile_tile(spec: Specialization, config: Any) -> tuple[Compiled | str, str | None]:
    """What is compiled with a tile, or the compiler's error, and the limit that it violates."""
    with with_tile(spec.kernel, config):
        row = compile_kernel(spec)
    return row, None if isinstance(row, str) else problem(spec, row)


def compile_tiles(
    spec: Specialization, configs: list[Any], jobs: int, plugin: Path | None = None
) -> list[tuple[Any, Compiled]]:
    """The tiles that satisfy all limits, by size (largest first), then registers (fewest first)."""
    clean = []
    with processes(jobs, plugin) as pool:
        compiled = pool.map(partial(compile_tile, spec), configs)
        for config, (row, violated) in zip(configs, compiled, strict=True):
            if isinstance(row, str):
                print(f"{shown(config)} does not compile: {row}")
            elif violated is None:
                clean.append((config, row))
    return sorted(clean, key=lambda pair: (-pair[0].block_m * pair[0].block_n, pair[1].registers))


def call_of(
    spec: Specialization, length: int, device: str, sign: float = 1.0
) -> Callable[[], tuple[Tensor, tuple]]:
    """A function that calls attention through the kernel and returns (output, (q, k, v)).

    ``sign``: of the scale.
    """
    kind: dict[str, Any] = {"dtype": DTYPES[spec.dtype], "device": device}
    few = spec.kernel == "decode"  # eight query heads per key/value head, see `describe_decode`
    batch, dim = max(1, TOKENS // length), spec.head_dim
    heads, queries = (max(1, HEADS // 8), few_queries(spec)) if few else (HEADS, length)
    q = torch.randn(batch, HEADS, queries, dim, **kind).requires_grad_()
    k, v = (torch.randn(batch, heads, length, dim, **kind).requires_grad_() for _ in range(2))
    use, chosen = form_of(spec), extras_of(spec)
    params = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in use.params.items()}
    scale = sign * dim**-0.5
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": few, "scale": scale, **params}
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
    spec: Specialization, configs: list[Any], length: int, timer: Timer, device: str = "cuda"
) -> dict[Any, Timed]:
    """The time of the whole pass with each tile: backward for dq and dkdv, otherwise forward.

    Tiles that fail are printed and left out. Results are also compared for a negative scale, which
    some kernels apply in another way.
    """
    call, negated = (call_of(spec, length, device, sign) for sign in (1.0, -1.0))
    calls, results = {}, {}
    for config in (None, *configs):
        timed = timed_call(spec, config, call)
        try:
            results[config] = *timed(), *timed_call(spec, config, negated)()
            timer.synchronize()
        except Exception as error:
            if config is None:
                raise
            print(f"{shown(config)} fails: {first_line(error)}", flush=True)
            continue
        calls[CURRENT if config is None else shown(config)] = timed
    seconds = timer.rounds(calls, 10, 0.05)
    times = {}
    for config in (config for config in configs if config in results):
        samples, base = seconds[shown(config)], seconds[CURRENT]
        gaps = [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
            for a, b in zip(results[config], results[None], strict=True)
        ]
        spread = Spread.of([1e3 * s for s in samples])
        times[config] = Timed(spread, ratio(samples, base), max(gaps))
    return times


def timed_call(
    spec: Specialization, config: Any, call: Callable[[], tuple[Tensor, tuple]]
) -> Callable[[], tuple[Tensor, ...]]:
    from attnzoo.backends.triton.common import prepared

    # Prepared calls have the tile of their first run, so each tile needs its own.
    calls, seen = {}, set()

    @contextmanager
    def patched() -> Iterator[None]:
        with (
            mock.patch.object(prepared, "_prepared", calls),
            mock.patch.object(prepared, "_seen", seen),
            with_tile(spec.kernel, config),
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


def table(clean: list[tuple[Any, Compiled]], timed: dict[Any, Timed]) -> Iterator[str]:
    wrong = {config for config, t in timed.items() if not t.difference <= TOLERANCE}
    if timed:
        ranked = [pair for pair in clean if pair[0] in timed and pair[0] not in wrong]
        clean = sorted(ranked, key=lambda pair: timed[pair[0]].milliseconds.median)
    for config, row in clean:
        text = f"{shown(config):<44} {row.registers:>3} registers {row.shared_bytes:>6} B shared"
        text += f" {row.tensor_core or '–':<8}"
        if config in timed:
            ms, share, _ = timed[config]
            text += f" {ms.median:.3f} ms ({ms.lower:.3f}–{ms.upper:.3f})"
            text += f"  {share.median:.3f} × {CURRENT}"
        yield text.rstrip()
    for config in wrong:
        difference = timed[config].difference
        yield f"{shown(config)} DIFFERS from the {CURRENT} result by {difference:.1e}"
