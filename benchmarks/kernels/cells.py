"""The table of the compile gate: every kernel with everything that its compilation depends on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from attnzoo.backends.triton.common.configurations import LINEAR_KERNELS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
HEAD_DIMS = (64, 96, 128, 256)
QUICK_DIMS = (64, 128)
KERNELS = ("forward", "dq", "dkdv", "stats", "threshold", "linear", "decode")
# Of linear forms: Taylor's 153 at D = 16, filled up to eights.
FEATURES = 160
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# normalize, unit and whether φ vanishes at −∞, for each Triton activation.
TWINS = {
    "exp": ("online", 1.4426950408889634, True),
    "sigmoid": ("none", 1.4426950408889634, True),
    "taylor2": ("sum", 1.0, False),
    "entmax15": ("threshold", 1.0, True),
    "q_exp": ("threshold", 1.0, True),
}
EXTRAS = ("window", "alibi", "segments", "keys", "mask")
# Of `decode` beside the walk itself, by the stage's name in place of a twin.
STAGES = ("products", "statistics", "solver", "merge")
# Calls that are not both causal and scaled row by row.
BARE = ("full", "no gain", "full no gain")


class Cell(NamedTuple):
    """One kernel with everything that its compilation depends on."""

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    twin: str
    # One of EXTRAS, or "all" with a sink and the gradient of lse on top; then "odd" for strides
    # that no wide load divides. Or one of BARE.
    extra: str = ""

    @property
    def config(self) -> str:
        return f"{self.twin} D={self.head_dim} {self.dtype} {self.extra}".rstrip()


def cells(archs: list[str], dims: list[int]) -> Iterator[Cell]:
    """Calls that meet every row of `configs`: twins plain, some with all extras, exp with each.

    A call is causal and has a gain, unless it is one of BARE. A dimension that is no power of two
    takes other rows than the next power of two does only where it is plain.
    """
    for arch in archs:
        for dim in dims:
            if dim in QUICK_DIMS:
                for dtype, name in product(
                    ("bf16", "fp32") if dim == 64 else ("bf16",), LINEAR_KERNELS
                ):
                    yield Cell("linear", arch, dtype, dim, name)
            yield from decode_cells(arch, dim)
            if dim & (dim - 1):
                for twin in ("exp", "sigmoid", "entmax15"):
                    for kernel in ("forward", "dq", "dkdv"):
                        yield Cell(kernel, arch, "bf16", dim, twin)
                continue
            for twin, (normalize, *_) in TWINS.items():
                kernels = ["forward", "dq", "dkdv"]
                kernels += ["stats"] if twin == "exp" else []
                kernels += ["threshold"] if normalize == "threshold" else []
                for kernel in kernels:
                    if twin == "taylor2":  # like exp, but for a maximum that fp16 alone needs
                        if kernel == "forward" or dim == 128:
                            yield Cell(kernel, arch, "fp16", dim, twin)
                        continue
                    yield Cell(kernel, arch, "bf16", dim, twin)
                    if twin in ("exp", "entmax15"):
                        yield Cell(kernel, arch, "fp32", dim, twin)
                    if twin in ("exp", "q_exp"):
                        yield Cell(kernel, arch, "bf16", dim, twin, "all")
                    if twin == "entmax15" or (twin, dim) in (("exp", 128), ("exp", 256)):
                        yield Cell(kernel, arch, "fp32", dim, twin, "all")
                    if twin == "exp" and dim >= 128:
                        yield Cell(kernel, arch, "bf16", dim, twin, "all odd")
                        if dim == 256:
                            yield Cell(kernel, arch, "fp32", dim, twin, "all odd")
                    if dim in QUICK_DIMS and kernel != "stats" and twin != "q_exp":
                        for extra in BARE if twin == "exp" else ("full no gain",):
                            yield Cell(kernel, arch, "bf16", dim, twin, extra)
                    if twin == "exp" and kernel != "stats":
                        all_of_them = (dim, arch) == (128, "sm_90")
                        for extra in EXTRAS if all_of_them else ("segments",):
                            yield Cell(kernel, arch, "bf16", dim, twin, extra)


def decode_cells(arch: str, dim: int) -> Iterator[Cell]:
    """With each number of rows in a tile; a mask of keys is one for all heads, or one for each."""
    for dtype in ("bf16", "fp32"):
        for twin, extra in product(("exp", "products"), ("", "keys", "heads", "window", "all")):
            yield Cell("decode", arch, dtype, dim, twin, extra)
        yield Cell("decode", arch, dtype, dim, "sigmoid")
        yield Cell("decode", arch, dtype, dim, "entmax15", "all")
    yield Cell("decode", arch, "fp16", dim, "taylor2")
    if dim in QUICK_DIMS:
        yield Cell("decode", arch, "bf16", dim, "exp", "full no gain")
    for dtype in ("bf16", "fp32"):
        yield Cell("decode", arch, dtype, dim, "exp", "all odd")
    if dim == 64:  # the others read no head dimension
        for stage in ("statistics", "solver"):
            yield Cell("decode", arch, "fp32", dim, stage)
        yield Cell("decode", arch, "fp32", dim, "solver", "all")
    yield Cell("decode", arch, "fp32", dim, "merge")
    yield Cell("decode", arch, "fp32", dim, "merge", "all")


def quick_cells(archs: list[str]) -> Iterator[Cell]:
    """The part of the table that most calls use: bf16, without extras, and what decoding adds."""
    for cell in cells(archs, list(QUICK_DIMS)):
        stage = cell.twin in STAGES and cell.dtype == "fp32" and cell.twin != "products"
        if (cell.dtype == "bf16" or stage) and cell.extra in ("", *BARE) and cell.twin != "q_exp":
            yield cell
