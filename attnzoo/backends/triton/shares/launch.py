"""Builds the launches of the kernels of `Shares`; see `common.launch`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import triton
from torch import Tensor

from attnzoo.backends.shared_operands import Layout, Terms, Vectors
from attnzoo.backends.triton.common import launch
from attnzoo.backends.triton.common.activations import LN2
from attnzoo.backends.triton.common.groups import Gradients, RuleConstants, constants
from attnzoo.backends.triton.common.kernel_operands import like, new_vector, unit_of
from attnzoo.backends.triton.common.launch import Launch, descriptors, strides
from attnzoo.backends.triton.common.tiles import Config, shares_tile
from attnzoo.backends.triton.flash.launch import tile_constants
from attnzoo.backends.triton.flash.parts import programs_of
from attnzoo.backends.triton.flash.segments import ranges_of
from attnzoo.backends.triton.shares import kernels


def _config(kernel: str, arch: int, q: Tensor, v: Tensor) -> Config:
    return shares_tile(kernel, arch, 8 * q.element_size(), max(q.shape[3], v.shape[3]))


def _arguments(
    config: Config, q: Tensor, k: Tensor, v: Tensor, layout: Layout, ranges: Tensor | None,
    **tensors: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of all kernels. ``tensors``: (B, H, N, D) tensors beside q, k and v."""
    rule = constants(RuleConstants, UNIT=1.0 / LN2.value)
    return {
        **launch.arguments_of(q, k, layout, rule, Vectors(), Terms(), ranges),
        **strides(unit_of(q), q=q, k=k, v=v, **tensors), "v": v, **tensors,
        "tile": tile_constants(config, q, v, layout),
    }  # fmt: skip


def describe_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, arch: int
) -> tuple[list[Launch], Tensor]:
    """Return the launches and the output."""
    out, config = like(q, v.shape[3]), _config("forward", arch, q, v)
    ranges, before = ranges_of(layout, config.block_m, arch)
    args = _arguments(config, q, k, v, layout, ranges, o=out)
    args |= descriptors(config, arch, k=k, v=v)
    forward = Launch(kernels.shares_forward, programs_of(q, config.block_m), args, config)
    return [*before, forward], out


def describe_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, wanted: Collection[str], arch: int
) -> tuple[list[Launch], dict[str, Tensor]]:
    """Return the launches, and the gradients of q, k, v and the relative bias by name.

    The gradient of ALiBi's slopes is [B, H, Nq]. That of a table is [B, H, Nq, 2·radius + 1], of
    which the caller takes the sum.
    """
    grads = {name: like(x, x.shape[3]) for name, x in zip("qkv", (q, k, v))}
    of_dq, of_dkdv = (_config(kernel, arch, q, v) for kernel in ("dq", "dkdv"))
    assert of_dq.block_n == of_dkdv.block_n, "the sums of `Carried` are those of blocks of keys"
    blocks = triton.cdiv(k.shape[2], of_dq.block_n)
    shape = *q.shape[:2], blocks, q.shape[2]
    carried = kernels.Carried(*(q.new_empty(shape, dtype=torch.float32) for _ in range(2)))
    gradients, bias = Gradients(), layout.relative_bias
    if "relative_bias" in wanted and bias is not None:
        if bias.dim() == 2:
            rows = q.new_empty(*q.shape[:3], bias.shape[1], dtype=torch.float32)
            gradients, grads["relative_bias"] = Gradients(table=rows), rows
        else:
            grads["relative_bias"] = new_vector(q)
            gradients = Gradients(slopes=grads["relative_bias"])
    ranges, before_dq = ranges_of(layout, of_dq.block_m, arch)
    args = _arguments(of_dq, q, k, v, layout, ranges, do=do, dq=grads["q"])
    args |= {"carried": carried, "gradients": gradients}
    args |= descriptors(of_dq, arch, k=k, v=v)
    zeroed = carried if gradients.table is None else (*carried, gradients.table)
    dq = Launch(kernels.shares_dq, programs_of(q, of_dq.block_m), args, of_dq, tuple(zeroed))
    ranges, before_dkdv = ranges_of(layout, of_dkdv.block_n, arch, of_keys=True)
    args = _arguments(of_dkdv, q, k, v, layout, ranges, do=do, dk=grads["k"], dv=grads["v"])
    args |= {"carried": carried, **descriptors(of_dkdv, arch, q=q, do=do)}
    dkdv = Launch(kernels.shares_dkdv, programs_of(k, of_dkdv.block_n), args, of_dkdv)
    return [*before_dq, dq, *before_dkdv, dkdv], grads
