"""Time the host's part of Triton kernel calls, without a GPU: causal bf16 calls of 128 tokens.

Each variant is timed without gradients, forward and backward, and in a decoding step (one query).

A stand-in replaces the GPU driver. Kernels are compiled for sm_90 and bound, but not launched. The
time covers validation, planning, allocation of the outputs and Triton's binding of arguments. The
driver's own launch is missing. From the third call with equal shapes and settings on, a call reuses
its prepared launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import attnzoo
from benchmarks.harness.cases import Case
from benchmarks.kernels.compile import require_compiler
from benchmarks.kernels.stand_in import install
from benchmarks.suites import overhead
from commandline.arguments import add_plugin

HEADS, TOKENS, HEAD_DIM = 8, 128, 64


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "host", help="Time the host's part of kernel calls", description=__doc__
    )
    add_plugin(parser)
    overhead.add_options(parser)
    parser.set_defaults(run=time_host_calls)


def time_host_calls(args: argparse.Namespace) -> int:
    require_compiler("host")
    install()
    return overhead.time_calls(args, calls())


def calls() -> dict[str, Callable[[], object]]:
    """The calls of each variant that the kernels support, by name."""
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, HEAD_DIM).bfloat16()
    made: dict[str, Callable[[], object]] = {}
    for case in (Case.parse(name, TOKENS) for name in attnzoo.list_variants()):
        plan = attnzoo.explain(q, k, v, case.variant, is_causal=True, **case.params)
        if any(x.backend == "flash" and x.reason is None for x in plan.candidates):
            made[case.spec] = partial(_attend, q, k, v, case)
            made[f"{case.spec}, forward and backward"] = partial(_train, q, k, v, case)
            made[f"{case.spec}, decoding"] = partial(_attend, q[:, :, -1:], k, v, case, "decode")
    return made


def _attend(q: Tensor, k: Tensor, v: Tensor, case: Case, backend: str = "flash") -> Tensor:
    return attnzoo.attention(q, k, v, case.variant, is_causal=True, backend=backend, **case.params)


def _train(q: Tensor, k: Tensor, v: Tensor, case: Case) -> None:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        _attend(q, k, v, case).backward(v.detach())
