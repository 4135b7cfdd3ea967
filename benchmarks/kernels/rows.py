"""Compare algorithms for the softmax of rows: three passes, online, and two passes.

On a CPU they are loops compiled with numba for one core, all with the same exponential, on fp32. On
a GPU they are Triton kernels. Each is first compared with fp64. Then every round times each of them
once, on rows drawn from a normal distribution. Top-k has rounds of its own.

Columns: the largest relative error of a weight; the median time per entry and its quartiles; the
memory that the algorithm itself reads and writes per second; the speed-up over three passes, as the
median of the ratios within the rounds, with quartiles; and the speed-up that the paper reports, on
its machines. For top-k, the speed-up is that over three passes followed by a separate top-k.

The papers: arXiv:1805.02867 (online, top-k; on a GPU) and arXiv:2001.04438 (two-pass; on a CPU,
rows larger than the cache).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.baselines import installed
from benchmarks.harness.options import (
    DEVICES,
    DTYPES,
    apply_defaults,
    by_device,
    positive,
    timer_of,
)
from benchmarks.harness.report import check_target, environment, headline, write_json
from benchmarks.harness.timing import Spread, ratio
from benchmarks.kernels.compile import require_compiler
from commandline.arguments import integer, numbers, seed
from commandline.errors import UsageError
from commandline.table import aligned

ENTRIES = 2**25  # of an array, if only --columns is given
# Rows and columns. CPU: small array, large array of short rows, row of a few MiB, row larger than
# most caches. A GPU needs many rows, because each has one program.
SIZES = {
    "cpu": ((64, 4096), (8192, 4096), (1, 2**20), (1, 2**25)),
    "cuda": ((8192, 4096), (4096, 2**15), (1024, 2**18)),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "rounds": 15},
    "cuda": {"dtype": "bfloat16", "rounds": 30},
}
MIN_SECONDS, TOP = 0.5, 5
THREE, THEN_TOP = "three-pass", "three-pass, then top-k"
FUSED, TWO, ONLINE = "online, top-k fused", "two-pass", "online"
# The papers' speed-ups over three passes
PAPERS = {ONLINE: "up to 1.3", TWO: "up to 1.28 AVX-512, 1.18 AVX2", FUSED: "up to 5"}
HEADER = ("algorithm", "error", "ns/entry", "quartiles", "GB/s", "speed-up", "quartiles", "paper")
WIDTHS, LEFT = (25, 7, 8, 13, 6, 8, 10, 0), (0, 7)


@dataclass(frozen=True)
class Algorithm:
    """A way to compute the softmax or the k largest weights of the rows.

    compute: writes the weights into ``out``. accesses: entries read and written per entry of a row,
    unknown for functions of torch. baseline: the algorithm whose time is divided by its own.
    top: whether ``out`` has the k largest weights instead of all.
    """

    compute: Callable[[], object]
    out: Tensor
    accesses: int | None
    baseline: str
    top: bool = False


@dataclass(frozen=True)
class Result:
    """Figures of one algorithm; without seconds if its error exceeds the budget.

    allowed: the largest error; None for functions of torch, which are not judged.
    """

    rows: int
    columns: int
    algorithm: str
    error: float
    allowed: float | None
    seconds: Spread | None = None
    speedup: Spread | None = None
    gigabytes_per_second: float | None = None
    paper: str = ""

    @property
    def wrong(self) -> bool:
        return self.allowed is not None and not self.error <= self.allowed  # also if NaN

    def record(self) -> dict[str, Any]:
        """The fields for JSON, which has no NaN."""
        return asdict(self) | {"error": self.error if math.isfinite(self.error) else None}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "rows", help="Compare algorithms for softmax over rows", description=__doc__
    )
    add, default = parser.add_argument, partial(by_device, DEFAULTS)
    words = "cuda if torch sees a CUDA device, otherwise cpu"
    add("--device", choices=DEVICES, help=f"Run on this device (default: {words})")
    sizes = {
        device: {"sizes": [f"{rows} × {columns}" for rows, columns in known]}
        for device, known in SIZES.items()
    }
    add("--columns", type=numbers, metavar="N,N,…",
        help="Use rows of these lengths; without it, these rows × columns are used "
        + by_device(sizes, "sizes"))  # fmt: skip
    add("--rows", type=numbers, metavar="N,N,…",
        help="With --columns: use this number of rows, or one for each number of columns "
        "(default: as many as hold 2^25 entries)")  # fmt: skip
    add("--top", type=positive(int), metavar="K",
        help=f"Find the K largest weights; only on a CPU (default: {TOP})")  # fmt: skip
    add("--dtype", choices=DTYPES, help=f"Use inputs of this dtype {default('dtype')}")
    add("--rounds", type=integer(3, 10**6), metavar="N",
        help=f"Time at least N rounds {default('rounds')}")  # fmt: skip
    add("--seed", type=seed, default=0, help="Draw the inputs with this seed (default: 0)")
    add("--json", metavar="FILE", help="Write results to a JSON file after each table")
    parser.set_defaults(run=compare, threads=1)  # the compiled loops use one core


def compare(args: argparse.Namespace) -> int:
    sizes = prepare(args)
    where = environment() | machine(args.device)
    print(f"{headline(where)}\n{where['compiled']}", flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "run"}
    results: list[Result] = []
    for rows, columns in sizes:
        measured = measure(args, rows, columns)
        print(f"\n{title(args, rows, columns, where.get('cache_bytes'))}")
        print(aligned(HEADER, WIDTHS, LEFT))
        for result in measured:
            print(line(result), flush=True)
        results += measured
        if args.json is not None:
            records = [result.record() for result in results]
            write_json(args.json, {"settings": settings, "environment": where, "rows": records})
    return 1 if any(result.wrong for result in results) else 0


# ---- options ------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Checks the options. Returns the numbers of rows and columns of each table.

    Raises:
        UsageError: an option is invalid, or a package is missing.
    """
    apply_defaults(args, DEFAULTS)
    check_target("--json", args.json)
    sizes = sizes_of(args)
    shortest = min(columns for _, columns in sizes)
    if args.device == "cuda":
        if args.top is not None:
            raise UsageError("--top requires --device cpu; there is no Triton kernel for it")
        require_compiler("rows --device cuda")
        return sizes
    args.top = TOP if args.top is None else args.top
    if args.dtype != "float32":
        raise UsageError(f"--dtype must be float32 on a CPU, got {args.dtype}")
    if args.top > shortest:
        raise UsageError(f"--top must be at most the {shortest} columns of a row, got {args.top}")
    if not installed("numba"):
        raise UsageError("rows on a CPU requires numba. Install it with: pip install -e '.[rows]'")
    return sizes


def sizes_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    if args.columns is None:
        if args.rows is not None:
            raise UsageError("--rows requires --columns")
        return list(SIZES[args.device])
    rows = args.rows or [max(1, ENTRIES // columns) for columns in args.columns]
    if len(rows) == 1:
        rows = rows * len(args.columns)
    if len(rows) != len(args.columns):
        raise UsageError(
            f"--rows must list one number, or one for each of the {len(args.columns)} numbers of "
            f"--columns, got {len(rows)}"
        )
    return list(zip(rows, args.columns))


def machine(device: str) -> dict[str, Any]:
    """What the loops are compiled for, and the largest cache."""
    if device == "cuda":
        return {"compiled": "Triton kernels"}
    import llvmlite.binding as llvm
    import numba
    from numba.core import config

    # NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, which choose another target than this CPU
    name, features = vars(config)["CPU_NAME"], vars(config)["CPU_FEATURES"]
    name = name or llvm.get_host_cpu_name()
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    vectors = next((unit for unit in ("avx512f", "avx2") if f"+{unit}" in features), "neither")
    cache = cache_bytes()
    known = "unknown" if cache is None else size(cache)
    words = f"numba {numba.__version__} for {name} ({vectors}), one core; largest cache: {known}"
    return {"compiled": words, "numba": numba.__version__, "target": name, "vectors": vectors,
            "cache_bytes": cache}  # fmt: skip


def cache_bytes() -> int | None:
    """The size of the largest cache of the first core; None if the system does not tell."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text().strip() for path in files]
    return max((int(x[:-1]) * 1024 for x in sizes if x.endswith("K")), default=None)


# ---- measurement --------------------------------------------------------------------------------


def measure(args: argparse.Namespace, rows: int, columns: int) -> list[Result]:
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(rows, columns, generator=generator).to(args.device, getattr(torch, args.dtype))
    made = dict(on_gpu(x) if args.device == "cuda" else on_cpu(x, args.top))
    exact = torch.softmax(x.double(), 1)
    results: dict[str, Result] = {}
    for name, algorithm in made.items():
        algorithm.compute()
        k = algorithm.out.shape[1]
        error = error_of(algorithm.out, exact.topk(k, 1).values if algorithm.top else exact)
        budget = None if algorithm.accesses is None else allowed(x)
        results[name] = Result(rows, columns, name, error, budget, paper=PAPERS.get(name, ""))
    del exact
    seconds: dict[str, list[float]] = {}
    for baseline in (THREE, THEN_TOP):  # in rounds of their own: each call leaves data in the cache
        calls = {
            name: made[name].compute
            for name, result in results.items()
            if made[name].baseline == baseline and not result.wrong
        }
        if calls:
            seconds |= timer_of(args).rounds(calls, args.rounds, MIN_SECONDS)
    for name, spent in seconds.items():
        baseline, accesses = seconds.get(made[name].baseline), made[name].accesses
        spread, num_bytes = Spread.of(spent), x.numel() * x.element_size()
        results[name] = replace(
            results[name],
            seconds=spread,
            speedup=None if baseline is None else ratio(baseline, spent),
            gigabytes_per_second=accesses and accesses * num_bytes / spread.median / 1e9,
        )
    return list(results.values())


def error_of(weights: Tensor, exact: Tensor) -> float:
    """The largest relative error of a weight; of tiny ones, relative to the least normal number."""
    scale = exact.clamp(min=torch.finfo(weights.dtype).tiny)
    return float(((weights.double() - exact).abs() / scale).max())


def allowed(x: Tensor) -> float:
    """The budget of `error_of`: roundings of e^(x−max), of the sum and of the result.

    The roundings of a sum of n terms are taken to add up like √n.
    """
    eps = torch.finfo(torch.float32).eps
    distance = float((x.amax(1) - x.amin(1)).max())
    return (16 + 3 * distance + 4 * x.shape[1] ** 0.5) * eps + 2 * torch.finfo(x.dtype).eps


def on_cpu(x: Tensor, k: int) -> Iterator[tuple[str, Algorithm]]:
    from benchmarks.kernels import row_loops

    out = torch.empty_like(x)
    values, columns = x.new_empty(len(x), k), x.new_empty(len(x), k, dtype=torch.int64)
    xs, ys, best, at = (t.numpy() for t in (x, out, values, columns))

    def three_then_top() -> None:
        row_loops.three_pass(xs, ys)
        row_loops.top(ys, best, at)

    for name, loop, accesses in (
        (THREE, row_loops.three_pass, 4),
        ("three-pass, exp stored", row_loops.three_pass_stored, 5),
        (ONLINE, row_loops.online, 3),
        (TWO, row_loops.two_pass, 3),
    ):
        yield name, Algorithm(partial(loop, xs, ys), out, accesses, THREE)
    yield "torch, softmax", torch_softmax(x, out)
    yield THEN_TOP, Algorithm(three_then_top, values, 5, THEN_TOP, top=True)
    yield (
        FUSED,
        Algorithm(partial(row_loops.online_top, xs, best, at), values, 1, THEN_TOP, top=True),
    )


def on_gpu(x: Tensor) -> Iterator[tuple[str, Algorithm]]:
    from attnzoo.backends.triton.common.launch import run as launch
    from benchmarks.kernels.row_softmax import describe

    out = torch.empty_like(x)
    for name, accesses in ((THREE, 4), (ONLINE, 3), (TWO, 3)):
        yield name, Algorithm(partial(launch, describe(name, x, out)), out, accesses, THREE)
    yield "torch, softmax", torch_softmax(x, out)


def torch_softmax(x: Tensor, out: Tensor) -> Algorithm:
    return Algorithm(partial(torch.softmax, x, 1, out=out), out, None, THREE)


# ---- the table ----------------------------------------------------------------------------------


def title(args: argparse.Namespace, rows: int, columns: int, cache: int | None) -> str:
    of_row = columns * getattr(torch, args.dtype).itemsize
    words = f"{rows} rows × {columns} columns, {args.dtype}: {size(of_row)} per row"
    if cache is not None:
        where = ["beyond", "within"][of_row <= cache]
        both = ["beyond", "within"][2 * rows * of_row <= cache]
        words += f" ({where} the largest cache), {size(2 * rows * of_row)} in and out ({both} it)"
    return words if args.device == "cuda" else f"{words}; k = {args.top}"


def size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"


def line(result: Result) -> str:
    cells = [result.algorithm, f"{result.error:.1e}"]
    if result.wrong:
        return aligned([*cells, f"WRONG, not timed: at most {result.allowed:.1e}"], (25, 7, 0))
    seconds, entries = result.seconds, result.rows * result.columns
    assert seconds is not None
    times = (x / entries * 1e9 for x in (seconds.median, seconds.lower, seconds.upper))
    moved = result.gigabytes_per_second
    cells += [*spread_cells(*times, digits=3), "" if moved is None else f"{moved:.1f}"]
    gain = result.speedup
    cells += ["", ""] if gain is None else spread_cells(gain.median, gain.lower, gain.upper)
    return aligned([*cells, result.paper], WIDTHS, LEFT)


def spread_cells(median: float, lower: float, upper: float, digits: int = 2) -> list[str]:
    return [f"{median:.{digits}f}", f"{lower:.{digits}f}–{upper:.{digits}f}"]
