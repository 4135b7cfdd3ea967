"""Builds the launches of the row kernels; see `common.launch`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.triton.common.launch import Launch, align_of
from attnzoo.backends.triton.common.tiles import row_config
from attnzoo.backends.triton.rows import kernels

KERNELS = {
    "three-pass": kernels.three_pass,
    "online": kernels.online,
    "two-pass": kernels.two_pass,
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 2**30  # columns; offsets inside a row have 32 bits


def describe(algorithm: str, x: Tensor, out: Tensor, arch: int) -> Launch:
    """Return the launch that writes softmax(x) over the rows of x to ``out``.

    Args:
        algorithm: a key of `KERNELS`.
        x: (rows, columns), fp16, bf16 or fp32, with contiguous rows.
        out: the same shape, with contiguous rows.

    Raises:
        ValueError: the algorithm, a shape or a stride differs from the above.
        TypeError: a dtype differs from the above.
    """
    if algorithm not in KERNELS:
        raise ValueError(f"algorithm must be one of {', '.join(KERNELS)}, got {algorithm!r}")
    for name, tensor in (("x", x), ("out", out)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16 or fp32, got {tensor.dtype}")
    if x.dim() != 2 or x.shape != out.shape or not 0 < x.shape[1] <= LONGEST:
        raise ValueError(
            "x and out must be (rows, columns) of the same shape with 1 to 2^30 columns, got "
            f"{tuple(x.shape)} and {tuple(out.shape)}"
        )
    if x.shape[1] > 1 and (x.stride(1), out.stride(1)) != (1, 1):
        raise ValueError(
            f"rows of x and out must be contiguous, got strides {x.stride()} and {out.stride()}"
        )
    config = row_config(arch)
    align = align_of(x[None, None], out[None, None])
    args = {
        "x": x, "out": out, "columns": x.shape[1], "x_row": x.stride(0) // align,
        "out_row": out.stride(0) // align, "BLOCK": config.block_n, "ALIGN": align,
    }  # fmt: skip
    return Launch(KERNELS[algorithm], x.shape[0], args, config)
