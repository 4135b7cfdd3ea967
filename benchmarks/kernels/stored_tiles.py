"""Adds the tiles that ``tune`` measured to the file of a GPU; see `attnzoo`'s `common.measured`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.report import check_target
from benchmarks.kernels.launches import is_plain
from benchmarks.kernels.specializations import DTYPES, Specialization
from commandline.errors import UsageError


def check_output(output: Path | None) -> None:
    """Refuse a file that measured tiles cannot be added to, before anything is timed."""
    from attnzoo.backends.triton.common import measured

    device = torch.cuda.get_device_name()
    file = output or measured.user_file(device)
    check_target("--output", str(file))
    try:
        foreign = file.exists() and measured.parsed(file, device) is None
    except ValueError as error:
        raise UsageError(f"--output: {error}") from None
    if foreign:
        raise UsageError(
            f"--output must be a new file or one for {device} and Triton "
            f"{measured.triton_version()}, got {file}"
        )


def is_stored(spec: Specialization) -> bool:
    """Whether a tile that was measured for the kernel is used for all plain calls of its class."""
    activation = "entmax15" if spec.kernel == "threshold" else "exp"
    largest = spec.head_dim in (64, 128, 256) and spec.dtype in ("bf16", "fp32")
    return largest and spec.activation == activation and not spec.extra and is_plain(spec)


def store(spec: Specialization, config: Any, device: str, file: Path | None = None) -> Path:
    """Add a tile to the measured ones of a GPU, and return their file."""
    from attnzoo.backends.triton.common import measured
    from attnzoo.backends.triton.common.tiles import limit_of

    file, key = file or measured.user_file(device), (spec.kernel, 8 * DTYPES[spec.dtype].itemsize)
    tiles = measured.parsed(file, device) or {}
    measured.write(file, device, {**tiles, (*key, limit_of(spec.head_dim)): config})
    measured.read.cache_clear()
    return file
