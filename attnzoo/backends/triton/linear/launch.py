"""Builds the launches of the kernels of linear forms; see `common.launch`.

Shapes: features x (B, H, N, F) and y (B, Hkv, N, F), v (B, Hkv, N, Dv), G = dO/Z (B, H, N, Dv) in
the dtype of the features, and δ = G·o (B, H, N). The state that the tokens of a chunk read is in
``states`` (B, Hkv, chunks, F, WIDTH), see `state`. Without causality there is one for all chunks.
With segments, ``bounds`` (B, 2, N) is that of `packed_tokens`. Without causality there are then two
states for each chunk, the second ones in ``others``, and y, v, x, g and delta are never None.
All tensors are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from attnzoo.backends.triton.common import prepared
from attnzoo.backends.triton.common.groups import constants
from attnzoo.backends.triton.common.launch import Launch, architecture, padded
from attnzoo.backends.triton.common.tile import INTERPRETED
from attnzoo.backends.triton.common.tiles import Config, linear_tile
from attnzoo.backends.triton.linear import kernels
from attnzoo.backends.triton.linear.state import layout

# Chunks per program of `linear_states` if only the final state is needed.
SPAN = 8


def run(describe: Callable[..., Any], x: Tensor, *operands: Any) -> Any:
    """Run the launches that a function of this module describes, and return their results."""
    return prepared.launch(describe, x, *operands, architecture(x.device))


def chunk_length(y: Tensor) -> int:
    """Tokens per chunk, independent of the GPU, because fake functions run without one."""
    # Chunks are equally long on all GPUs.
    return linear_tile(0 if INTERPRETED.value else 80, 8 * y.element_size()).block_m


def _config(x: Tensor, arch: int) -> Config:
    config = linear_tile(arch, 8 * x.element_size())
    # The interpreter takes as long for a small block as for a large one.
    return config._replace(block_n=4096) if arch == 0 and x.shape[3] > 512 else config


def _launch(
    kernel: Any,
    tokens: Tensor,
    value_dim: int,
    group: int,
    bounds: Tensor | None,
    arch: int,
    **operands: Any,
) -> Launch:
    """Return a launch with one program per chunk of features ``tokens`` (B, H or Hkv, N, F)."""
    config, (batch, heads, length, size) = _config(tokens, arch), tokens.shape
    sizes = constants(
        kernels.Sizes, F=size, BLOCK_F=config.block_n, DV=value_dim, BLOCK_DV=padded(value_dim),
        CHUNK=config.block_m, GROUP=group,
        PRECISION="tf32x3" if tokens.dtype == torch.float32 else "tf32",
        HEADS=0 if bounds is None else heads,
    )  # fmt: skip
    programs = batch * heads * triton.cdiv(length, config.block_m)
    operands |= {"bounds": bounds, "length": length, "sizes": sizes}
    return Launch(kernel, programs, operands, config)


def describe_states(
    x: Tensor, values: Tensor, delta: Tensor | None, first: Tensor | None, bounds: Tensor | None,
    backwards: bool, kv_heads: int, keep: bool, arch: int,
) -> tuple[Launch, tuple[Tensor | None, Tensor]]:  # fmt: skip
    """Return the launch, the states before each chunk, and the sums over each span of chunks.

    The states are (B, Hkv, chunks, F, WIDTH), or None without ``keep``. The sums (B, Hkv, spans, F,
    WIDTH) in fp32 add up to the final state. ``first`` and ``bounds`` require ``keep``, for
    which there is one span. With ``delta`` the states are R of the backward. If ``backwards``,
    states are summed from the last chunk to the first.
    """
    (batch, heads, length, size), value_dim = x.shape, values.shape[3]
    config = _config(x, arch)
    chunks = triton.cdiv(length, config.block_m)
    span = max(1, chunks if keep else SPAN)
    spans = max(1, triton.cdiv(chunks, span))
    states, width = None, layout(value_dim, 8 * x.element_size()).WIDTH
    if keep:
        states = x.new_empty(batch, kv_heads, chunks, size, width)
    shape = batch, kv_heads, spans, size, layout(value_dim, 32).WIDTH
    last = x.new_empty(shape, dtype=torch.float32)
    launch = _launch(
        kernels.linear_states, x, value_dim, heads // kv_heads, bounds, arch, features=x,
        values=values, delta=delta, first=first, states=states, last=last, spans=spans, span=span,
        BACKWARDS=backwards,
    )  # fmt: skip
    programs = batch * kv_heads * spans * triton.cdiv(size, config.block_n)
    return launch._replace(programs=programs), (states, last)


def describe_output(
    x: Tensor, y: Tensor | None, v: Tensor | None, states: Tensor, others: Tensor | None,
    bounds: Tensor | None, value_dim: int, dtype: torch.dtype, arch: int,
) -> tuple[Launch, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the launch, o and Z. y and v are None if all queries read one state."""
    out = x.new_empty(*x.shape[:3], value_dim, dtype=dtype)
    z = x.new_empty(x.shape[:3], dtype=torch.float32)
    sizes = value_dim, x.shape[1] // states.shape[1], bounds, arch
    operands = {"x": x, "y": y, "v": v, "states": states, "others": others, "out": out, "z": z}
    return _launch(kernels.linear_output, x, *sizes, **operands), (out, z)


def describe_dx(
    x: Tensor, y: Tensor | None, v: Tensor | None, g: Tensor, delta: Tensor, states: Tensor,
    others: Tensor | None, bounds: Tensor | None, arch: int,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """Return the launch and dx. y and v are None if all queries read one state."""
    dx, sizes = torch.empty_like(x), (g.shape[3], x.shape[1] // states.shape[1], bounds, arch)
    operands = {"y": y, "v": v, "g": g, "delta": delta, "states": states, "others": others}
    operands["dx"] = dx
    return _launch(kernels.linear_dx, x, *sizes, **operands), dx


def describe_dy_dv(
    y: Tensor, v: Tensor, x: Tensor | None, g: Tensor | None, delta: Tensor | None, states: Tensor,
    others: Tensor | None, bounds: Tensor | None, arch: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the launches, dy and dv, from the states R. x, g and delta are None if only R adds."""
    dy, dv = torch.empty_like(y), torch.empty_like(v)
    shared = y, v.shape[3], 1 if x is None else x.shape[1] // y.shape[1], bounds, arch
    both = {"x": x, "g": g, "states": states, "others": others}
    of_v = _launch(kernels.linear_dv, *shared, **both, y=y, dv=dv)
    of_y = _launch(kernels.linear_dy, *shared, **both, v=v, delta=delta, dy=dy)
    # A program of `linear_dy` computes one block of features.
    of_y = of_y._replace(programs=of_y.programs * triton.cdiv(y.shape[3], of_y.config.block_n))
    return [of_y, of_v], (dy, dv)
