"""What the compile gate compiles: every kernel with everything that its compilation depends on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from attnzoo.backends.triton.common.configurations import LINEAR_KERNELS
from benchmarks.kernels.activations import kinds

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
HEAD_DIMS = (48, 64, 96, 128, 192, 256)
QUICK_DIMS = (64, 128)
KERNELS = ("forward", "dq", "dkdv", "stats", "threshold", "linear", "decode")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXTRAS = ("window", "alibi", "segments", "keys", "mask")
# Calls that are not both causal and scaled query by query.
BARE = ("full", "no gain", "full no gain")
# Launches of `decode` that read no activation or no head dimension.
STAGES = ("decode statistics", "decode solver", "decode merge")


class Cell(NamedTuple):
    """One kernel with everything that its compilation depends on."""

    kernel: str  # of KERNELS; of linear and decode with the launch, where there are several
    arch: str
    dtype: str
    head_dim: int
    activation: str = ""
    # One of EXTRAS or BARE; "heads", a mask of keys for each head; or "all" of EXTRAS with a sink
    # and the gradient of lse on top, then "unaligned" for strides that no wide load divides.
    extra: str = ""

    @property
    def config(self) -> str:
        return f"{self.activation} D={self.head_dim} {self.dtype} {self.extra}".strip()

    @property
    def family(self) -> str:
        return self.kernel.split()[0]


class Group(NamedTuple):
    """Cells of these kernels, kinds of activation, dtypes, head dimensions and extras: all of each.

    A kind is that of `activations.Use`, or "linear". A call is causal and has a gain, unless it is
    one of BARE.
    """

    kernels: tuple[str, ...]
    kinds: str
    dtypes: str
    dims: tuple[int, ...]
    extras: tuple[str, ...] = ("",)
    archs: tuple[str, ...] = ARCHITECTURES


BOTH = ("forward", "dq", "dkdv")
FLASH = (*BOTH, "stats", "threshold")
POWERS = (64, 128, 256)  # the columns of other head dimensions are filled up to a power of two
DECODED = (96, *POWERS)
FEW = ("", "keys", "heads", "window")
GROUPS = (
    Group(FLASH, "online none threshold family", "bf16", POWERS),
    Group(BOTH, "online none threshold", "bf16", (96,)),
    Group(("forward", "dq"), "online none", "bf16", (48, 192)),
    Group(FLASH, "online threshold", "fp32", POWERS),
    # Like a softmax, but for a maximum that fp16 alone needs.
    Group(("forward",), "sum", "fp16", POWERS),
    Group(("dq", "dkdv"), "sum", "fp16", (128,)),
    Group(FLASH, "online family", "bf16", POWERS, ("all",)),
    Group(FLASH, "threshold", "fp32", POWERS, ("all",)),
    Group(FLASH, "online", "fp32", (128, 256), ("all",)),
    Group(FLASH, "online", "bf16", POWERS, ("all unaligned",)),
    Group(FLASH, "online", "fp32", (256,), ("all unaligned",)),
    Group(BOTH, "online", "bf16", QUICK_DIMS, BARE),
    Group(FLASH, "none threshold", "bf16", QUICK_DIMS, ("full no gain",)),
    Group(BOTH, "online", "bf16", POWERS, ("segments",)),
    Group(BOTH, "online", "bf16", (128,), EXTRAS, ("sm_90",)),
    # With each number of rows in a tile.
    Group(("decode",), "online", "bf16 fp32", DECODED, (*FEW, "all", "all unaligned")),
    Group(("decode",), "none", "bf16 fp32", DECODED),
    Group(("decode",), "threshold", "bf16 fp32", DECODED, ("all",)),
    Group(("decode",), "sum", "fp16", DECODED),
    Group(("decode",), "online", "bf16", QUICK_DIMS, ("full no gain",)),
    Group(("decode products",), "threshold", "bf16 fp32", DECODED, FEW),
    Group(("decode products",), "online", "bf16 fp32", DECODED, ("all",)),
    Group(("decode statistics",), "online", "fp32", (64,)),
    Group(("decode solver",), "threshold", "fp32", (64,)),
    Group(("decode solver",), "family", "fp32", (64,), ("all",)),
    Group(("decode merge",), "online", "fp32", DECODED, ("", "all")),
    Group(tuple(f"linear {name}" for name in LINEAR_KERNELS), "linear", "bf16 fp32", (64,)),
    Group(tuple(f"linear {name}" for name in LINEAR_KERNELS), "linear", "bf16", (128,)),
)


def cells(archs: list[str], dims: list[int]) -> Iterator[Cell]:
    """All cells, none twice. A dimension not in HEAD_DIMS is taken as 96 if it is filled up."""
    names, seen = {**kinds(), "linear": ""}, set()
    for arch, dim, group in product(archs, dims, GROUPS):
        like = dim if dim in HEAD_DIMS else 96 if dim & (dim - 1) else 64
        if arch not in group.archs or like not in group.dims:
            continue
        for kind, kernel, dtype, extra in product(
            group.kinds.split(), group.kernels, group.dtypes.split(), group.extras
        ):
            wrong = {"stats": kind != "online", "threshold": kind not in ("threshold", "family")}
            cell = Cell(kernel, arch, dtype, dim, names[kind], extra)
            if not wrong.get(kernel) and cell not in seen:
                seen.add(cell)
                yield cell


def quick_cells(archs: list[str]) -> Iterator[Cell]:
    """The part that most calls use: bf16, without extras, and what decoding adds."""
    for cell in cells(archs, list(QUICK_DIMS)):
        common = cell.dtype == "bf16" or cell.kernel in STAGES
        if common and cell.extra in ("", *BARE) and cell.activation != kinds()["family"]:
            yield cell
