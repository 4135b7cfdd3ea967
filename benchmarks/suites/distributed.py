"""Check context parallelism, and count the bytes that it sends.

Each rank is a process: with gloo on a CPU, with NCCL on GPUs (one per rank). The outputs and the
gradients of q, k and v are compared with one process that has the whole sequence. The bytes that
rank 0 sends are counted and compared with the formulas of docs/distributed.md. The last column is
predicted, not measured: the bytes of a step divided by --bandwidth. On GPUs the median time of a
step is measured too. The exit status is 1 if an output is wrong or a count differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

import attnzoo
from attnzoo.distributed import context_parallel_attention, shard
from benchmarks.harness.cases import Case
from benchmarks.harness.options import DTYPES, positive, subset_of
from benchmarks.harness.report import check_target, environment, headline, write_json
from benchmarks.harness.traffic import SentBytes, Sizes, Traffic, formula
from commandline.arguments import add_plugin, seed
from commandline.errors import UsageError
from commandline.variants import split_list

METHODS = ("ulysses", "all_gather", "ring")
# Largest difference from one process, relative to the largest entry.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "distributed", help="Check context parallelism and count its bytes", description=__doc__
    )
    add, size = parser.add_argument, positive(int)
    add("--variants", metavar="a,b(x=1)", help="Check these variants (default: all)")
    add_plugin(parser)
    add("--methods", type=subset_of(METHODS), default=list(METHODS), metavar=",".join(METHODS),
        help="Check these methods (default: all of them)")  # fmt: skip
    add("--layout", choices=("zigzag", "contiguous"), default="zigzag",
        help="Shard tokens in this layout (default: zigzag)")  # fmt: skip
    add("--ranks", type=size, default=2, metavar="R", help="Use R ranks (default: 2)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="Use this device (default: cpu)")
    add("--length", type=size, default=256, metavar="N",
        help="Use sequences of N tokens in all (default: 256)")  # fmt: skip
    add("--batch", type=size, default=1, metavar="B", help="Use B sequences (default: 1)")
    add("--heads", type=size, default=4, metavar="H", help="Use H heads (default: 4)")
    add("--kv-heads", type=size, default=2, metavar="H",
        help="Use H key/value heads (default: 2)")  # fmt: skip
    add("--head-dim", type=size, default=32, metavar="D", help="Use head dimension D (default: 32)")
    add("--dtype", choices=DTYPES, default="float32", help="Use this dtype (default: float32)")
    add("--bandwidth", type=positive(float), default=50.0, metavar="GB/s",
        help="Predict times for this bandwidth per rank (default: 50)")  # fmt: skip
    add("--seed", type=seed, default=0, help="Draw the inputs with this seed (default: 0)")
    add("--json", metavar="FILE", help="Write results to a JSON file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_target("--json", args.json)
    if not args.methods:
        raise UsageError(f"--methods must list some of {', '.join(METHODS)}, got ''")
    if args.length % (2 * args.ranks):
        raise UsageError(f"--length must be a multiple of {2 * args.ranks}, got {args.length}")
    if args.heads % args.kv_heads:
        raise UsageError(f"--heads must be a multiple of --kv-heads, got {args.heads}")
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        raise UsageError(f"--ranks must be at most {torch.cuda.device_count()}, the GPUs here")
    named = attnzoo.list_variants() if args.variants is None else split_list(args.variants)
    cases = [Case.parse(spec, args.length) for spec in named]
    where = environment()
    print(headline(where))
    print(
        f"{args.ranks} ranks, {args.batch} × {args.length} tokens, H={args.heads} "
        f"Hkv={args.kv_heads} D={args.head_dim} {args.dtype}, causal, {args.layout}"
    )
    with tempfile.TemporaryDirectory() as folder:
        work = (args, [case.spec for case in cases], folder)
        start_processes(_rank, work, nprocs=args.ranks, start_method="spawn")
        rows = torch.load(Path(folder) / "rows", weights_only=True)
    print(_header(args))
    for row in rows:
        print(_line(row, args))
    if args.json:
        write_json(args.json, {"environment": where, "rows": rows})
    wrong = [row for row in rows if row["problem"]]
    for row in wrong:
        print(f"{row['variant']}, {row['method']}: {row['problem']}", file=sys.stderr)
    return 1 if wrong else 0


def _header(args: argparse.Namespace) -> str:
    measured = f"{'ms':>9}" if args.device == "cuda" else ""
    return (
        f"{'variant':<24}{'method':<12}{'error':>9}{'forward B':>12}{'formula':>12}"
        f"{'backward B':>12}{'formula':>12}{measured}  predicted ms at {args.bandwidth:g} GB/s"
    )


def _line(row: dict[str, Any], args: argparse.Namespace) -> str:
    start = f"{row['variant']:<24}{row['method']:<12}"
    if row["rejected"]:
        return f"{start} {row['rejected']}"
    counts = [row["forward"], row["forward_formula"], row["backward"], row["backward_formula"]]
    shown = "".join(f"{count:>12}" for count in counts)
    measured = f"{row['milliseconds']:>9.3f}" if args.device == "cuda" else ""
    return f"{start}{row['error']:>9.1e}{shown}{measured}  {row['predicted_ms']:.4f}"


def _rank(rank: int, args: argparse.Namespace, specs: list[str], folder: str) -> None:
    """One process: runs all calls; rank 0 writes the rows."""
    if args.plugin is not None:
        attnzoo.load_plugin(args.plugin)
    torch.set_num_threads(1)
    device = "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo", init_method=f"file://{folder}/store",
        rank=rank, world_size=args.ranks,
    )  # fmt: skip
    mesh = init_device_mesh(args.device, (args.ranks,))
    rows = [
        _measure(args, Case.parse(spec, args.length), method, mesh, rank, device)
        for spec in specs
        for method in args.methods
    ]
    if rank == 0:
        torch.save(rows, Path(folder) / "rows")
    dist.barrier()
    # Threads of gloo may still run, and Python's shutdown then sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


def _measure(
    args: argparse.Namespace, case: Case, method: Any, mesh: Any, rank: int, device: str
) -> dict[str, Any]:
    sizes = Sizes(
        args.ranks, args.batch, args.heads, args.kv_heads, args.length // args.ranks,
        args.head_dim, args.head_dim, getattr(torch, args.dtype).itemsize, args.layout,
        args.device,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(args.seed)
    qkv = [
        torch.randn(args.batch, heads, args.length, args.head_dim, generator=generator)
        .to(device, getattr(torch, args.dtype))
        .requires_grad_()
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    ]
    weight = torch.randn(qkv[0].shape, generator=generator).to(device, qkv[0].dtype)
    # Without noise, which would differ between the ranks.
    without_noise = {p.name: p.in_eval for p in attnzoo.get_variant(case.variant).params}
    params = case.params | {name: x for name, x in without_noise.items() if x is not None}
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, **params}
    row: dict[str, Any] = {"variant": case.spec, "method": method, **asdict(sizes)}
    row |= {"rejected": "", "problem": ""}

    def local(x: torch.Tensor) -> torch.Tensor:
        return shard(x.detach(), mesh, 2, layout=args.layout)

    shards = [local(x).requires_grad_() for x in qkv]

    def attend() -> torch.Tensor:
        q, k, v = shards
        return context_parallel_attention(
            q, k, v, case.variant, mesh=mesh, method=method, layout=args.layout, **options
        )

    try:
        with SentBytes(rank, args.ranks) as forward:
            out = attend()
    except ValueError as error:
        return row | {"rejected": str(error)}
    with SentBytes(rank, args.ranks) as backward:
        actual = [out, *torch.autograd.grad(out, shards, local(weight))]
    q, k, v = qkv
    expected_out = attnzoo.attention(q, k, v, case.variant, **options)
    expected = [expected_out, *torch.autograd.grad(expected_out, qkv, weight)]
    error = max(_error(x, local(y)) for x, y in zip(actual, expected, strict=True))
    # A ring sends one message per round of the keys, and two in the last round.
    rounds = forward.messages // max(1, args.ranks - 1)
    predicted = formula(method, case, sizes, rank, solver_steps=rounds - 3)
    counted = Traffic(forward.bytes, backward.bytes)
    row |= {
        "error": error, "forward": counted.forward, "backward": counted.backward,
        "forward_formula": predicted.forward, "backward_formula": predicted.backward,
        "predicted_ms": sum(predicted) / args.bandwidth / 1e6,
    }  # fmt: skip
    if error > TOLERANCE[args.dtype]:
        row["problem"] = f"differs from one process by {error:.2g} of the largest entry"
    elif counted != predicted:
        row["problem"] = f"sent {tuple(counted)} bytes, by the formula {tuple(predicted)}"
    if args.device == "cuda":
        row["milliseconds"] = _milliseconds(attend, shards, local(weight))
    return row


def _error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).detach())


def _milliseconds(attend: Any, shards: list[torch.Tensor], weight: torch.Tensor) -> float:
    """The median time of a forward and backward, over ten steps after two."""
    times = []
    for _ in range(12):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(attend(), shards, weight)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])
