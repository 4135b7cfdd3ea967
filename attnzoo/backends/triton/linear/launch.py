"""Builds the launches of the kernels of linear forms; see `common.launch`.

Shapes: features x (B, H, N, F) and y (B, Hkv, N, F), v (B, Hkv, N, Dv), out and do (B, H, N, Dv),
states (B, Hkv, F, WIDTH) as in `linear.kernels`. All tensors are contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnzoo.backends.triton.common.launch import Launch, interpreted, padded
from attnzoo.backends.triton.common.tiles import Config, linear_tile
from attnzoo.backends.triton.linear import kernels
from attnzoo.backends.triton.linear.state import width

# Chunks per program of `linear_states` if only the final state is needed.
SPAN = 8


class Upstream(NamedTuple):
    """G = dO/Z (B, H, N, Dv) in the dtype of the features, and the per-query vector δ = G·o."""

    g: Tensor
    delta: Tensor


def _common(x: Tensor, dim: int, arch: int) -> tuple[dict[str, Any], Config]:
    """Return arguments and tile of a kernel over features x (B, H, N, F); dim is Dv."""
    config = linear_tile(arch, 8 * x.element_size())
    if arch == 0 and x.shape[3] > 512:
        config = config._replace(block_n=4096)  # fewer blocks for the interpreter
    args = {
        "length": x.shape[2], "F": x.shape[3], "DV": dim, "BLOCK_DV": padded(dim),
        "CHUNK": config.block_m, "BLOCK_F": config.block_n,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return args, config


def chunk_length(y: Tensor) -> int:
    """Tokens per chunk, independent of the GPU, because fake functions run without one."""
    # Chunks are equally long on all GPUs.
    return linear_tile(0 if interpreted() else 80, 8 * y.element_size()).block_m


def _blocks(x: Tensor, config: Config) -> tuple[int, int]:
    """Return the number of chunks of tokens, and the number of blocks of features."""
    return triton.cdiv(x.shape[2], config.block_m), triton.cdiv(x.shape[3], config.block_n)


def describe_states(
    x: Tensor, y: Tensor, first: Tensor | None, delta: Tensor | None, kv_heads: int, keep: bool,
    arch: int,
) -> tuple[Launch, Tensor, Tensor]:  # fmt: skip
    """Return the launch, the states before each chunk, and the sums over each span of chunks.

    x are features (B, H, N, F), y values (B, H, N, Dv). The states are (B, Hkv, chunks, F, WIDTH),
    see `state`, or empty without ``keep``. The sums are (B, Hkv, spans, F, WIDTH) in fp32 and add
    up to the final state.
    With ``delta`` the states are R of the backward, summed from the last chunk to the first.
    """
    args, config = _common(x, y.shape[3], arch)
    (chunks, features), batch = _blocks(x, config), x.shape[0]
    span = chunks if keep or first is not None else SPAN
    spans = max(1, triton.cdiv(chunks, max(1, span)))
    kept_shape = batch, kv_heads, chunks, x.shape[3], width(y.shape[3], x.dtype)
    kept = x.new_empty(kept_shape if keep else 0)
    shape = batch, kv_heads, spans, x.shape[3], width(y.shape[3])
    last = x.new_empty(shape, dtype=torch.float32)
    args |= {
        "x": x, "y": y, "first": first, "states": kept if keep else None, "last": last,
        "delta": delta, "chunks": chunks, "spans": spans,
        "span": span, "GROUP": x.shape[1] // kv_heads, "REVERSE": delta is not None,
    }  # fmt: skip
    launch = Launch(kernels.linear_states, batch * kv_heads * spans * features, args, config)
    return launch, kept, last


def describe_output(
    x: Tensor, y: Tensor | None, v: Tensor | None, kept: Tensor, dim: int, dtype: torch.dtype,
    arch: int,
) -> tuple[Launch, Tensor, Tensor]:  # fmt: skip
    """Return the launch, o and Z. ``kept``: one state per chunk, or a single one if y is None."""
    batch, heads, length, _ = x.shape
    out = x.new_empty(batch, heads, length, dim, dtype=dtype)
    z = x.new_empty(batch, heads, length, dtype=torch.float32)
    args, config = _common(x, dim, arch)
    args |= {
        "x": x, "y": y, "v": v, "states": kept, "out": out, "z": z, "chunks": kept.shape[2],
        "GROUP": heads // kept.shape[1], "CAUSAL": y is not None,
    }  # fmt: skip
    programs = batch * heads * _blocks(x, config)[0]
    return Launch(kernels.linear_output, programs, args, config), out, z


def describe_dx(
    x: Tensor, y: Tensor | None, v: Tensor | None, upstream: Upstream, kept: Tensor, arch: int,
) -> tuple[Launch, Tensor]:  # fmt: skip
    dx = torch.empty_like(x)
    args, config = _common(x, upstream.g.shape[3], arch)
    args |= {
        "y": y, "v": v, "g": upstream.g, "states": kept, "delta": upstream.delta, "dx": dx,
        "chunks": kept.shape[2], "GROUP": x.shape[1] // kept.shape[1], "CAUSAL": y is not None,
    }  # fmt: skip
    programs = x.shape[0] * x.shape[1] * _blocks(x, config)[0]
    return Launch(kernels.linear_dx, programs, args, config), dx


def describe_dy_dv(
    x: Tensor | None, y: Tensor, v: Tensor, upstream: Upstream | None, kept: Tensor, arch: int,
) -> tuple[tuple[Launch, Launch], Tensor, Tensor]:  # fmt: skip
    """Return the launches, dy and dv. ``kept``: R of each chunk, or a single R if x is None.

    x and upstream are None in the backward of `linear_state`, where only R contributes.
    """
    dy, dv = torch.empty_like(y), torch.empty_like(v)
    given = {
        "x": x, "g": upstream and upstream.g, "states": kept, "chunks": kept.shape[2],
        "GROUP": 1 if x is None else x.shape[1] // y.shape[1], "CAUSAL": x is not None,
    }  # fmt: skip
    args, config = _common(y, v.shape[3], arch)
    chunks, _ = _blocks(y, config)
    programs = y.shape[0] * y.shape[1] * chunks
    of_v = Launch(kernels.linear_dv, programs, {**args, **given, "y": y, "dv": dv}, config)
    args, config = _common(y, v.shape[3], arch)
    given |= {"v": v, "dy": dy, "delta": upstream and upstream.delta}
    programs *= _blocks(y, config)[1]
    of_y = Launch(kernels.linear_dy, programs, {**args, **given}, config)
    return (of_y, of_v), dy, dv
