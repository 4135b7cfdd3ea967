"""The kernels of `Shares` as PyTorch operators, with fake functions and first derivatives."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from attnzoo.backends import flops
from attnzoo.backends.operator import operator
from attnzoo.backends.shared_operands import Layout
from attnzoo.backends.triton.common.kernel_operands import aligned, aligned_layout, like


@cache
def _modules() -> tuple[Any, ...]:
    from attnzoo.backends.triton.common import launch, prepared
    from attnzoo.backends.triton.shares import launch as shares_launch

    return launch, prepared, shares_launch


@operator
def shares_forward(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    launch, prepared, shares_launch = _modules()
    operands = *aligned(q, k, v), aligned_layout(layout), launch.architecture(q.device)
    return prepared.launch(shares_launch.describe_forward, *operands)


@shares_forward.fake
def _(*, q: Tensor, v: Tensor) -> Tensor:
    return like(q, v.shape[3])


@shares_forward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> int:
    return flops.attended(q, k, v, layout)


@shares_forward.backward(
    "q", "k", "v", "relative_bias",
    like=lambda x: like(x, x.shape[3]) if x.dim() == 4 else x.new_empty(x.shape),
)  # fmt: skip
def shares_backward(
    *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, dout: Tensor, wanted: list[str]
) -> dict[str, Tensor]:
    launch, prepared, shares_launch = _modules()
    operands = *aligned(dout, q, k, v), aligned_layout(layout), wanted
    machine = launch.architecture(q.device)
    grads = prepared.launch(shares_launch.describe_backward, *operands, machine)
    if "relative_bias" in wanted and grads["relative_bias"].dim() == 4:
        grads["relative_bias"] = grads["relative_bias"].sum((0, 2))  # of a table, [H, W]
    return grads


@shares_backward.flops
def _(*, q: Tensor, k: Tensor, v: Tensor, layout: Layout, wanted: list[str]) -> int:
    # One more q kᵀ, for the sums over later keys
    return flops.gradients(q, k, v, layout, wanted) + flops.one_pass(q, k, layout)
