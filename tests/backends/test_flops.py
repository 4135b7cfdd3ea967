"""torch's FlopCounterMode counts the products of every operator, as it does for a definition."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import attnzoo
from attnzoo.losses import linear_loss
from helpers.cases import rand

SIZES = B, H, N, D, DV = 2, 4, 40, 8, 16
FORWARD, BACKWARD = 2 * B * H * N * N * (D + DV), 2 * B * H * N * N * (3 * D + 2 * DV)


def counted(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def inputs(n: int = N, kv_heads: int = H, value_dim: int = DV) -> list[Tensor]:
    shapes = (B, H, n, D), (B, kv_heads, n, D), (B, kv_heads, n, value_dim)
    return [rand(*shape, seed=i).float().requires_grad_() for i, shape in enumerate(shapes)]


def test_every_operator_has_a_formula() -> None:
    names = [x for x in torch._C._dispatch_get_all_op_names() if x.startswith("attnzoo::")]
    # test_operator registers operators whose names begin with "example".
    names = [x.removeprefix("attnzoo::") for x in names if "::example" not in x]
    assert len(names) >= 17
    assert not [name for name in names if getattr(torch.ops.attnzoo, name) not in flop_registry]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["attnzoo", "torch.utils.flop_counter"])
def test_formulas_are_registered_whichever_is_imported_first(order: str) -> None:
    code = (
        f"import {order}; import attnzoo, torch, torch.utils.flop_counter as counter; "
        "print(torch.ops.attnzoo.tiled_forward in counter.flop_registry)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("backend", ["eager", "tiled", "flash"])
def test_forward_counts_two_products_and_backward_five(backend: str, kv_heads: int) -> None:
    """The definition stores the scores, so its backward has four products."""
    q, k, v = inputs(kv_heads=kv_heads)
    out: Any = None

    def forward() -> None:
        nonlocal out
        out = attnzoo.attention(
            q, k, v, "sink", is_causal=True, enable_gqa=True, b=0.1, backend=backend
        )

    assert counted(forward) == FORWARD
    backward = 2 * FORWARD if backend == "eager" else BACKWARD
    assert counted(lambda: out.sum().backward()) == backward
    q, k = q.detach(), k.detach()
    forward()
    backward = FORWARD * DV // (D + DV) if backend == "eager" else FORWARD  # dv, and q kᵀ
    assert counted(lambda: out.sum().backward()) == backward


def test_fused_softmax_on_a_cpu_is_counted() -> None:
    q, k, v = inputs(value_dim=D)
    out = attnzoo.attention(q, k, v, backend="sdpa")
    forward = 2 * B * H * N * N * 2 * D
    assert counted(lambda: attnzoo.attention(q, k, v, backend="sdpa")) == forward
    assert counted(lambda: out.sum().backward()) == 5 * forward // 2


@pytest.mark.parametrize("n", [64, 512])
@pytest.mark.parametrize("variant", ["softmax", "entmax", "stick_breaking"])
def test_count_does_not_drop_where_another_backend_is_chosen(variant: str, n: int) -> None:
    q, k, v = (x.detach() for x in inputs(n, value_dim=D))
    is_causal = variant == "stick_breaking"
    # Blocks of a definition leave out hidden keys, up to half of all.
    least = B * H * n * n * 2 * D
    assert counted(lambda: attnzoo.attention(q, k, v, variant, is_causal=is_causal)) >= least


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["tiled", "flash"])
def test_statistics_and_thresholds_count_a_further_pass_over_the_keys(backend: str) -> None:
    q, k, v = inputs()
    scores = 2 * B * H * N * N * D
    count = counted(lambda: attnzoo.attention(q, k, v, "adaptive_temperature", backend=backend))
    assert count == FORWARD + scores
    count = counted(lambda: attnzoo.attention(q, k, v, "sparsemax", backend=backend))
    assert count == FORWARD + (scores if backend == "flash" else 0)


def test_differentiable_statistics_are_counted() -> None:
    q, k, v = inputs()
    out = attnzoo.attention(q, k, v, "adaptive_temperature", differentiable=True, backend="tiled")
    assert counted(lambda: out.sum().backward()) == BACKWARD + 3 * 2 * B * H * N * N * D


@pytest.mark.interpreter
@pytest.mark.parametrize("variant", ["softmax", "sparsemax", "adaptive_temperature"])
def test_decode_reads_keys_once(variant: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    count = counted(lambda: attnzoo.attention(q[:, :, :1], k, v, variant, backend="decode"))
    assert count == FORWARD // N


@pytest.mark.slow
@pytest.mark.interpreter
def test_linear_forms_are_counted_linearly() -> None:
    def count(backend: str, n: int, is_causal: bool, backward: bool) -> int:
        def attend() -> None:
            out = attnzoo.attention(
                *inputs(n), "cosformer", backend=backend, is_causal=is_causal, max_length=4096
            )
            if backward:
                out.sum().backward()

        return counted(attend)

    assert count("flash_linear", 64, False, False) == count("linear", 64, False, False) > 0
    for is_causal in (False, True):
        forward, both = (count("flash_linear", 64, is_causal, x) for x in (False, True))
        assert 2.9 < both / forward < 4
        assert count("flash_linear", 128, is_causal, True) == 2 * both


@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["tiled", "flash", "eager"])
def test_packed_sequences_count_products_within_a_sequence_only(backend: str) -> None:
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs())
    ends = torch.tensor([0, 5, 25, N], dtype=torch.int32)
    lengths = ends.diff()

    def attend() -> None:
        attnzoo.varlen_attention(q, k, v, ends, ends, 20, 20, "sink", b=0.1, backend=backend)

    within = 2 * H * int((lengths**2).sum()) * (D + DV)
    assert counted(attend) == within
    ids = torch.repeat_interleave(torch.arange(3), lengths)[torch.randperm(N)][None]
    x = [y.transpose(0, 1)[None] for y in (q, k, v)]
    count = counted(lambda: attnzoo.attention(*x, "sink", b=0.1, segment_ids=ids, backend=backend))
    assert count == (within if backend != "eager" else FORWARD // B)


@pytest.mark.parametrize(("reduction", "products"), [("mean", 3), ("none", 4)])
def test_losses_count_logits_and_gradients(reduction: Any, products: int) -> None:
    h, weight = (rand(n, D, seed=n).float().requires_grad_() for n in (N, 50))
    target = torch.arange(N)
    count = counted(lambda: linear_loss(h, weight, target, reduction=reduction).sum().backward())
    assert count == products * 2 * N * 50 * D


def test_moments_of_classes_are_counted() -> None:
    h, weight = (rand(n, D, seed=n).float().requires_grad_() for n in (N, 5000))
    count = counted(
        lambda: attnzoo.losses.z_loss(h, weight, torch.arange(N), a=0.1, b=10.0).backward()
    )
    assert count >= 2 * 2 * 5000 * D**2


def test_operators_on_meta_tensors_and_in_exported_code_are_counted() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attnzoo.attention(q, k, v, "sink", b=0.1, backend="tiled")

    meta = [x.to("meta") for x in inputs()]
    assert counted(lambda: Attend()(*meta)) == FORWARD
    exported = torch.export.export(Attend(), tuple(inputs())).module()
    assert counted(lambda: exported(*inputs())) == FORWARD
    # torch runs compiled functions without compilation if a mode is active.
    compiled = torch.compile(Attend().forward, backend="aot_eager")
    compiled(*inputs())
    assert counted(lambda: compiled(*inputs()).sum().backward()) == FORWARD + BACKWARD


def test_pairs_of_segments_that_cannot_be_read_are_all_pairs() -> None:
    meta = [x.to("meta") for x in inputs()]
    ids = torch.empty(B, N, device="meta", dtype=torch.int64)
    count = counted(
        lambda: attnzoo.attention(*meta, "sink", b=0.1, segment_ids=ids, backend="tiled")
    )
    assert count == FORWARD
