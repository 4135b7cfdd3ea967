"""Short checks of the kernels on a GPU, from simple to complex: each names one thing that can fail.

A result is compared with the definition in fp64. Its error is the norm of the difference divided by
the norm of the exact tensor. The limits are wide, because a check looks for a wrong result, not for
rounding; the tests in tests/gpu hold error budgets. Further checks measure what no CPU shows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnzoo
from benchmarks.gpu.measurements import MEASUREMENTS, milliseconds
from benchmarks.harness import journal
from benchmarks.harness.bench import first_line
from benchmarks.harness.cases import Case
from benchmarks.harness.options import DEVICES, require_cuda, subset_of
from benchmarks.harness.report import DEVICE_LOST, environment
from benchmarks.kernels.interpreter import support_numpy
from commandline.errors import UsageError

# B, H, Hkv, Nq, Nk, D, Dv
Shape = tuple[int, int, int, int, int, int, int]
BASE: Shape = (2, 4, 2, 1000, 1000, 128, 128)
TOKEN: Shape = (2, 8, 2, 1, 5000, 128, 128)
SHORTER = 10  # lengths are divided by this number in Triton's interpreter
HALF, WIDE = "bfloat16", "float32"

Figures = dict[str, float]
Check = Callable[[str], tuple[bool, Figures]]  # device -> (whether all is well, figures)


def tensors(shape: Shape, dtype: str, device: str) -> list[Tensor]:
    """q, k and v of a shape, with fewer tokens in Triton's interpreter."""
    batch, heads, kv_heads, queries, keys, dim, value_dim = shape
    if os.environ.get("TRITON_INTERPRET") == "1":
        queries, keys = -(-queries // SHORTER), -(-keys // SHORTER)
    shapes = (
        (batch, heads, queries, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim),
    )
    generator = torch.Generator().manual_seed(queries + dim)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(device, getattr(torch, dtype)) for x in drawn]


def relative_error(x: Tensor, exact: Tensor) -> float:
    x, exact = x.double(), exact.double()
    return float((x - exact).norm() / exact.norm().clamp_min(1e-30))


def results(
    leaves: list[Tensor], variant: str, backend: str, gradients: bool, **options: Any
) -> dict[str, Tensor]:
    """The output, and the gradients of q, k, v and a learned mask."""
    q, k, v = leaves
    bias = options.get("attn_mask")
    if bias is not None and bias.requires_grad:
        leaves = [*leaves, bias]
    with torch.set_grad_enabled(gradients):
        out = attnzoo.attention(q, k, v, variant, backend=backend, enable_gqa=True, **options)
    if not gradients:
        return {"out": out}
    ramp = torch.linspace(-1, 1, out.shape[-1], device=out.device).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) * ramp)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), grads))}


@dataclass(frozen=True)
class Agreement:
    """A check that a call agrees with the definition in fp64.

    Attributes:
        limit: the largest relative error of the output and of each gradient.
        offset: number of entries by which q, k and v start after an aligned address.
        options: those of `attnzoo.attention`, or functions of (q, k, v) that make them.
    """

    variant: str = "softmax"
    backend: str = "flash"
    shape: Shape = BASE
    dtype: str = HALF
    gradients: bool = True
    limit: float = 2e-2
    offset: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, device: str) -> tuple[list[Tensor], dict[str, Any]]:
        """q, k and v, and the keyword arguments of the call."""
        qkv = tensors(self.shape, self.dtype, device)
        if self.offset:
            qkv = [shifted(x, self.offset) for x in qkv]
        options = {name: x(qkv) if callable(x) else x for name, x in self.options.items()}
        return qkv, {**options, **Case.parse(self.variant, self.shape[4]).params}

    def results(
        self, backend: str, qkv: list[Tensor], options: dict[str, Any]
    ) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_(self.gradients) for x in qkv]
        return results(leaves, self.variant, backend, self.gradients, **options)

    def attend(self, device: str) -> dict[str, Tensor]:
        """Make the call without a comparison."""
        return self.results(self.backend, *self.inputs(device))

    def __call__(self, device: str) -> tuple[bool, Figures]:
        qkv, options = self.inputs(device)
        actual = self.results(self.backend, qkv, options)
        if (mask := options.get("attn_mask")) is not None and mask.is_floating_point():
            wide = mask.detach().double().requires_grad_(mask.requires_grad)
            options["attn_mask"] = wide
        exact = self.results("eager", [x.double() for x in qkv], options)
        errors = {name: relative_error(x, exact[name]) for name, x in actual.items()}
        return all(error < self.limit for error in errors.values()), errors


def shifted(x: Tensor, offset: int) -> Tensor:
    """A copy of x (…, D) that starts ``offset`` entries after an aligned address."""
    return torch.cat([x, x[..., :8]], -1).roll(offset, -1)[..., offset : x.shape[-1] + offset]


def agreement(variant: str = "softmax", backend: str = "flash", **options: Any) -> Agreement:
    """An `Agreement`. Keywords that are not its fields are options of the call."""
    names = {entry.name for entry in fields(Agreement)} - {"options"}
    settings = {name: options.pop(name) for name in names & options.keys()}
    return Agreement(variant, backend, options=options, **settings)


def seeded(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def key_mask(qkv: list[Tensor]) -> Tensor:
    return (seeded(qkv[0].shape[0], 1, 1, qkv[1].shape[2]) > 0.3).to(qkv[0].device)


def bool_mask(qkv: list[Tensor]) -> Tensor:
    shape = qkv[0].shape[0], 1, qkv[0].shape[2], qkv[1].shape[2]
    return (seeded(*shape) > 0.3).to(qkv[0].device)


def float_mask(qkv: list[Tensor]) -> Tensor:
    return seeded(1, qkv[0].shape[1], qkv[0].shape[2], qkv[1].shape[2]).to(qkv[0])


def learned_mask(qkv: list[Tensor]) -> Tensor:
    return float_mask(qkv).requires_grad_()


def segments(qkv: list[Tensor]) -> Tensor:
    length = qkv[1].shape[2]
    ids = torch.arange(length, device=qkv[0].device) // max(1, length // 10)
    return ids.expand(qkv[0].shape[0], length)


def slopes(qkv: list[Tensor]) -> Tensor:
    return torch.linspace(0.01, 0.3, qkv[0].shape[1], device=qkv[0].device)


def repeatable(device: str) -> tuple[bool, Figures]:
    """Four runs are bit-equal. From the third on, launches are prepared."""
    runs = []
    for _ in range(4):
        leaves = [x.requires_grad_() for x in tensors(BASE, HALF, device)]
        runs.append(results(leaves, "entmax", "flash", True, is_causal=True))
    same = all(torch.equal(x, run[name]) for run in runs[1:] for name, x in runs[0].items())
    return same, {}


def dropout(device: str) -> tuple[bool, Figures]:
    """flash and tiled drop the same weights for the same seed; ms of flash with and without."""
    inputs, figures = tensors(BASE, HALF, device), {}

    def run(backend: str, dtype: torch.dtype, p: float) -> dict[str, Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        torch.manual_seed(0)
        return results(leaves, "softmax", backend, True, is_causal=True, dropout_p=p)

    exact = run("tiled", torch.float64, 0.1)
    for name, x in run("flash", torch.bfloat16, 0.1).items():
        figures[name] = relative_error(x, exact[name])
    well = all(error < 2e-2 for error in figures.values())
    if device == "cuda":
        for p in (0.0, 0.1):
            figures[f"p={p} ms"] = milliseconds(partial(run, "flash", torch.bfloat16, p))
    return well, figures


def captured(device: str, variant: str, backend: str) -> tuple[bool, Figures]:
    """A CUDA graph, replayed for new inputs, equals a call."""
    gradients = backend != "decode"
    shape = BASE if gradients else TOKEN
    params = Case.parse(variant, shape[4]).params
    leaves = [x.requires_grad_(gradients) for x in tensors(shape, HALF, device)]
    call = partial(results, leaves, variant, backend, gradients, is_causal=True, **params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    with torch.no_grad():
        for x in leaves:
            x.copy_(x.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(x, outputs[name]) for name, x in call().items()), {}


def compiled(device: str) -> tuple[bool, Figures]:
    """`torch.compile` with fullgraph gives the results of a call."""
    attend = partial(
        attnzoo.attention, variant="sink", is_causal=True, backend="flash", enable_gqa=True
    )
    runs = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        leaves = [x.requires_grad_() for x in tensors(BASE, HALF, device)]
        out = function(*leaves)
        runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    errors = map(relative_error, runs[1], runs[0])
    figures: Figures = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
    return all(error < 1e-2 for error in figures.values()), figures


def pages(device: str, variant: str) -> tuple[bool, Figures]:
    """Keys read from the pages of a cache equal packed keys; unused entries are NaN."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    used = torch.tensor([300, 1, 77], dtype=torch.int32, device=device)
    table = torch.randperm(64, device=device)[:63].view(3, 21).int()
    cache = torch.full((2, 64, 16, 2, 64), float("nan"), device=device, dtype=torch.bfloat16)
    q, k, v, ends = draw(3, 8, 64), [], [], [0]
    for entries, number in zip(table.long(), used.tolist(), strict=True):
        tokens, at = draw(2, number, 2, 64), torch.arange(number, device=device)
        cache[:, entries[at // 16], at % 16] = tokens
        k, v, ends = [*k, tokens[0]], [*v, tokens[1]], [*ends, ends[-1] + number]
    of_queries, of_keys = (torch.tensor(x, device=device) for x in (range(4), ends))
    attend = partial(attnzoo.varlen_attention, variant=variant, is_causal=True, enable_gqa=True)
    keys, values = torch.cat(k).double(), torch.cat(v).double()
    want = attend(q.double(), keys, values, of_queries, of_keys, 1, 300)
    have = attend(
        q, cache[0], cache[1], of_queries, None, 1, 336, seqused_k=used, block_table=table,
        backend="decode",
    )  # fmt: skip
    error = relative_error(have, want)
    return error < 2e-2, {"out": error}


def long_offsets(device: str) -> tuple[bool, Figures]:
    """The last head of a tensor of 4.6 GiB, whose offsets exceed 2^31 elements."""
    k = torch.randn(2, 9, 2**20, 128, device=device, dtype=torch.bfloat16)
    call = partial(attnzoo.attention, is_causal=True, window=100)
    out = call(k[:, :, -64:], k, k, backend="flash")
    last = k[-1:, -1:, -200:].double()
    error = relative_error(out[-1:, -1:], call(last[:, :, -64:], last, last, backend="eager"))
    return error < 2e-2, {"out": error}


def losses(device: str) -> tuple[bool, Figures]:
    """Losses of 512 tokens over 32 000 classes, and the seconds of one call with gradients."""
    from attnzoo.losses import linear_loss

    figures = {}
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=generator)
    h, e = (0.1 * draw(512, 256)).bfloat16(), draw(32_000, 256).bfloat16()
    target = torch.arange(512, device=device) * 61 % 32_000
    for variant in ("softmax", "entmax"):
        leaves = h.detach().requires_grad_(), e.detach().requires_grad_()
        start = time.perf_counter()
        loss = linear_loss(*leaves, target, variant)
        torch.autograd.grad(loss, leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        figures[f"{variant} s"] = time.perf_counter() - start
        figures[variant] = relative_error(
            loss, linear_loss(h.double(), e.double(), target, variant)
        )
    return max(figures["softmax"], figures["entmax"]) < 1e-2, figures


MORE_VARIANTS = (
    "sigmoid", "relu", "softpick", "sink", "taylor", "ssmax", "adaptive_temperature",
    "position_temperature", "scale_invariant", "forgetting",
)  # fmt: skip
CHECKS: dict[str, Check] = {
    "fp32-forward": agreement(
        shape=(1, 2, 2, 200, 200, 64, 64), dtype=WIDE, gradients=False, limit=1e-4, is_causal=True
    ),
    "tma-forward": agreement(gradients=False, is_causal=True),
    "tma-backward": agreement(is_causal=True),
    "full": agreement(shape=(1, 4, 4, 777, 1000, 64, 64)),
    "unaligned": agreement(offset=1, is_causal=True),
    "odd-dims": agreement(shape=(1, 2, 2, 777, 777, 40, 24), dtype="float16", is_causal=True),
    "d256": agreement(shape=(1, 2, 2, 300, 300, 256, 256), is_causal=True),
    **{name: agreement(name, is_causal=True) for name in MORE_VARIANTS},
    **{
        name: agreement(name, limit=5e-2, is_causal=True)
        for name in ("entmax", "sparsemax", "asentmax")
    },
    "key-mask": agreement(attn_mask=key_mask),
    "bool-mask": agreement(attn_mask=bool_mask, is_causal=True),
    "float-mask": agreement(attn_mask=float_mask),
    "learned-mask": agreement(attn_mask=learned_mask, is_causal=True),
    "segments": agreement(segment_ids=segments, is_causal=True),
    "window-alibi": agreement(window=77, alibi=slopes, is_causal=True),
    **{
        f"decode-{name}": agreement(name, "decode", shape=TOKEN, gradients=False, is_causal=True)
        for name in ("softmax", "ssmax", "sigmoid", "entmax", "sparsemax", "adaptive_temperature")
    },
    **{f"pages-{name}": partial(pages, variant=name) for name in ("softmax", "entmax")},
    "linear-taylor": agreement(
        "taylor", "flash_linear", shape=(2, 4, 2, 1000, 1000, 16, 128), is_causal=True
    ),
    # From 1024 tokens on, each program has several spans of tokens.
    "linear-elu": agreement(
        "elu", "flash_linear", shape=(2, 4, 2, 3000, 3000, 128, 128), is_causal=True
    ),
    "sdpa-ssmax": agreement(
        "ssmax", "sdpa", shape=(2, 4, 4, 1000, 1000, 128, 128), dtype=WIDE, is_causal=True
    ),
    # Few programs, so the work of each is split.
    "one-kv-head": agreement(shape=(1, 32, 1, 1024, 1024, 128, 128), is_causal=True),
    "prefill": agreement(shape=(1, 4, 2, 128, 20_000, 128, 128), is_causal=True),
    "repeatable": repeatable,
    "dropout": dropout,
    "losses": losses,
}
AGREEMENTS = {name: check for name, check in CHECKS.items() if isinstance(check, Agreement)}
# These need a CUDA device. Kernels that they launch are those of other checks.
ON_GPU: dict[str, Check] = {
    **{
        f"graph-{variant}-{backend}": partial(captured, variant=variant, backend=backend)
        for variant, backend in (
            ("softmax", "flash"), ("entmax", "flash"), ("elu", "flash_linear"), ("entmax", "decode")
        )
    },
    "long-offsets": long_offsets,
    **MEASUREMENTS,
    "compile": compiled,  # may take half a minute
}  # fmt: skip
NAMES = (*CHECKS, *ON_GPU)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check", help="Check the kernels on a GPU, from simple to complex", description=__doc__
    )
    add = parser.add_argument
    add("--device", choices=DEVICES, default="cuda",
        help="cpu: run the kernels in Triton's interpreter, if TRITON_INTERPRET=1 is set "
        "(default: cuda)")  # fmt: skip
    add("--only", type=subset_of(NAMES), metavar="NAME,…",
        help=f"Run these checks (default: all): {', '.join(NAMES)}")  # fmt: skip
    add("--no-compare", action="store_true",
        help="Run the calls, and compare nothing: for compute-sanitizer")  # fmt: skip
    add("--journal", type=Path, metavar="FILE",
        help="Append each result to a file of JSON lines at once")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    known = chosen(args)
    names = [name for name in known if args.only is None or name in args.only]
    if args.journal is not None:
        journal.append(args.journal, {"environment": environment()})
    failed = 0
    for result in checked({name: known[name] for name in names}, args.device, args.journal):
        print(json.dumps(result), flush=True)
        failed += not result["ok"]
        if result.get("device_lost"):
            return DEVICE_LOST
    print(f"{len(names) - failed} of {len(names)} checks passed")
    return 1 if failed else 0


def chosen(args: argparse.Namespace) -> dict[str, Check]:
    """The checks that can run on the device.

    Raises:
        UsageError: the device is not there, or --only has a check that needs another one.
    """
    known = {**CHECKS, **ON_GPU}
    if args.device == "cuda":
        require_cuda("check")
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError("check --device cpu requires TRITON_INTERPRET=1 in the environment")
    else:
        known = CHECKS
        support_numpy()
    if args.no_compare:
        known = {name: partial(called, check) for name, check in AGREEMENTS.items()}
    wrong = [name for name in args.only or () if name not in known]
    if wrong:
        raise UsageError(f"--only must be some of {', '.join(known)} here, got {', '.join(wrong)}")
    return known


def called(check: Agreement, device: str) -> tuple[bool, Figures]:
    check.attend(device)
    return True, {}


def checked(checks: dict[str, Check], device: str, file: Path | None) -> Iterator[dict[str, Any]]:
    """The result of each check, which is written to the file at once."""

    def log(**line: Any) -> None:
        if file is not None:
            journal.append(file, line)

    for name, check in checks.items():
        log(begin=name)
        start = time.monotonic()
        result: dict[str, Any] = {"name": name, "ok": False, "figures": {}}
        try:
            ok, figures = check(device)
            # JSON has no NaN.
            shown = {n: x if abs(x) < float("inf") else None for n, x in figures.items()}
            result |= {"ok": ok, "figures": shown}
        except Exception as error:
            result["error"] = first_line(error)[:800]
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:
                result |= {"ok": False, "device_lost": True, "error": first_line(error)[:800]}
        result["seconds"] = round(time.monotonic() - start, 2)
        log(check=result)
        yield result
