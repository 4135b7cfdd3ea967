"""The kernel specializations that ``python -m benchmarks compile`` compiles and checks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from attnzoo.backends.triton.common.tiles import LINEAR_KERNELS, SHARES
from benchmarks.kernels.activations import kinds

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
HEAD_DIMS = (48, 64, 96, 128, 192, 256)
QUICK_DIMS = (64, 128)
KERNELS = (
    "forward", "dq", "dkdv", "dbias", "stats", "threshold", "segments", "linear", "decode",
    "shares", "rows", "selection",
)  # fmt: skip
ROW_KERNELS = ("three-pass", "online", "two-pass")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXTRAS = ("window", "alibi", "segments", "keys", "mask")
# A key bias with an offset, a softcap, a gain and a bias by distance, and a table of biases.
TERMS = ("key-bias", "softcap", "distance", "table")
# Kinds of activations, see `VariantForm.kind`, that few variants have
RARE = ("factor", "factor-family", "factor-masked", "vanishing-sum", "shifted")
# "full" calls are not causal. "no gain" calls have no per-query gain.
BARE = ("full", "no gain", "full no gain")
# Calls of converted models and of modules with torch's interface: a padding mask over keys, and a
# dense boolean mask, such as of a sliding window. The causal padding mask is "keys". Transposed,
# packed and grouped heads only change strides, which are arguments at run time.
MODELS = ("full keys no gain", "full bool no gain")
# A padded batch of a model with a window or ALiBi
PADDED = ("window keys", "alibi keys")
# Also with a causal mask, a per-query gain and a dense mask
DROPOUT = "dropout"
PAGES = "pages"  # of paged keys, in decoding
# Packed sequences without causality, in kernels of linear forms
PACKED = "full segments"
# Few programs: parts of a group of heads in dK/dV, splits of the keys in the forward
SPLIT = "split"
# Launches that do not depend on both the activation and the head dimension. The solver depends only
# on the activation, the merge only on the head dimension, the others on neither.
STAGES = ("decode statistics", "decode solver", "decode merge", "forward merge", "segments")


class Specialization(NamedTuple):
    """One kernel and the settings that its compilation depends on.

    kernel: one of KERNELS. "forward", "linear", "decode", "shares" and "rows" may be followed by a
        space and the name of a launch or an algorithm. "decode short" has few keys, in one split.
        "rows" has no head dimension; "rows", "linear" and "shares" have no activation.
    extra: one of EXTRAS, TERMS, BARE, PADDED or MODELS; PACKED; PAGES; "heads" (a key mask per
        head); "learned-keys" (a float mask of the keys with a gradient; "dbias" always has a dense
        one); "fp32 mask" (as under autocast); SPLIT; DROPOUT; "peak" (of "stats", only the
        maximum); or "all" (all of EXTRAS, a sink and dlse).
    """

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    activation: str = ""
    extra: str = ""

    @property
    def config(self) -> str:
        dim = "" if self.family == "rows" else f"D={self.head_dim}"
        return " ".join(filter(None, (self.activation, dim, self.dtype, self.extra)))

    @property
    def family(self) -> str:
        return self.kernel.split()[0]


class Group(NamedTuple):
    """All combinations of these kernels, kinds, dtypes, head dimensions, extras and architectures.

    ``kinds`` and ``dtypes`` are separated by spaces. A kind is `VariantForm.kind`, "linear",
    "shares" or "rows". Calls are causal with a per-query gain, unless the extra says "full" or "no
    gain"; those of shares have no gain.
    """

    kernels: tuple[str, ...]
    kinds: str
    dtypes: str
    dims: tuple[int, ...]
    extras: tuple[str, ...] = ("",)
    archs: tuple[str, ...] = ARCHITECTURES


PASSES = ("forward", "dq", "dkdv")
FLASH = (*PASSES, "stats", "threshold")
SELECTION = (*PASSES, "selection")
SHARES_KERNELS = tuple(dict.fromkeys(f"shares {kernel}" for kernel, _ in SHARES))
LINEAR = tuple(f"linear {name}" for name in LINEAR_KERNELS)
POWERS = (64, 128, 256)  # other head dimensions are padded to a power of two
DECODE_DIMS = (96, *POWERS)
DECODE_EXTRAS = ("", "keys", "heads", "window")
GROUPS = (
    Group(FLASH, "online none threshold family", "bf16", POWERS),
    Group(PASSES, "online none threshold", "bf16", (96,)),
    Group(("forward", "dq"), "online none", "bf16", (48, 192)),
    Group(FLASH, "online threshold", "fp32", POWERS),
    # In fp16, kernels of all kinds but "online" keep running maxima of φ and dS; see `relative`. Of
    # kind "sum", only fp16 is compiled.
    Group(PASSES, "none threshold family", "fp16", POWERS),
    Group(PASSES, "factor factor-masked shifted", "fp16", (128,)),
    Group(("forward",), "sum", "fp16", POWERS),
    Group(("dq", "dkdv"), "sum", "fp16", (128,)),
    Group(FLASH, "online family", "bf16", POWERS, ("all",)),
    Group(FLASH, "threshold", "fp32", POWERS, ("all",)),
    Group(FLASH, "online", "fp32", (128, 256), ("all",)),
    Group(PASSES, "online", "bf16", QUICK_DIMS, BARE),
    Group(FLASH, "none threshold", "bf16", QUICK_DIMS, ("full no gain",)),
    Group(PASSES, "online", "bf16", POWERS, (*EXTRAS, *PADDED, *MODELS)),
    Group(FLASH, "none threshold", "bf16", POWERS, ("mask", "keys", *PADDED)),
    Group(("stats",), "online", "bf16", POWERS, ("mask", "peak")),
    Group((*PASSES, "threshold"), "online none threshold", "bf16", POWERS, ("key-bias", "table")),
    Group(FLASH, "online threshold", "bf16", QUICK_DIMS, ("softcap",)),
    Group(PASSES, "online", "bf16", POWERS, ("distance", "distance full")),
    Group((*PASSES, "threshold"), "threshold", "bf16", POWERS, ("distance full",)),
    Group(PASSES, "online", "fp32", (128,), TERMS),
    Group(PASSES, "online none threshold", "bf16", POWERS, (DROPOUT,)),
    Group(PASSES, "online", "bf16", (128,), ("dropout mask", "dropout full no gain")),
    Group(PASSES, "online", "fp32", (128,), (DROPOUT,)),
    Group(PASSES, "sum", "fp16", (128,), (DROPOUT,)),
    Group(("dbias",), "online", "bf16", QUICK_DIMS, (DROPOUT,)),
    Group(PASSES, " ".join(RARE), "bf16", QUICK_DIMS),
    Group(FLASH, "online threshold", "bf16", QUICK_DIMS, ("fp32 mask",)),
    Group(FLASH, "threshold", "bf16", POWERS, ("all",)),
    Group(PASSES, "sum", "fp16", POWERS, ("mask", "keys")),
    Group(("forward", "dkdv"), "online none", "bf16", POWERS, (SPLIT,)),
    Group(("dkdv",), "threshold", "bf16", POWERS, (SPLIT,)),
    Group(("forward", "dkdv"), "sum", "fp16", (128,), (SPLIT,)),
    Group(("forward", "dkdv"), "online", "fp32", (128,), (SPLIT,)),
    Group(("forward merge",), "online shifted", "fp32", (128,), (SPLIT,)),
    Group(("dkdv",), "online none threshold", "bf16", POWERS, ("learned-keys",)),
    Group(("dbias",), "online", "bf16", POWERS),
    Group(("dbias",), "none sum threshold", "fp16", POWERS),
    Group(("dbias",), "online threshold", "fp32", POWERS),
    Group(("dbias",), "online", "bf16", QUICK_DIMS, ("fp32 mask", "window")),
    Group(("dbias",), "family", "bf16", QUICK_DIMS, ("all",)),
    Group(("dbias",), "online threshold", "fp16", (128,), TERMS),
    Group(("dbias",), "factor factor-masked shifted", "fp16", (128,)),
    # These extras and dtypes cover each possible number of rows in a tile; see `few_queries`.
    Group(("decode",), "online", "bf16 fp32", DECODE_DIMS, (*DECODE_EXTRAS, "all")),
    Group(("decode",), "none", "bf16 fp32", DECODE_DIMS),
    Group(("decode",), "threshold", "bf16 fp32", DECODE_DIMS, ("", "all")),
    Group(("decode",), "sum", "fp16", DECODE_DIMS),
    Group(("decode",), "online", "bf16", QUICK_DIMS, ("full no gain",)),
    Group(("decode",), "online", "bf16", (128,), ("key-bias", "distance", "table")),
    Group(("decode",), "factor factor-masked shifted", "bf16", (128,)),
    Group(("decode",), "online", "bf16 fp32", DECODE_DIMS, (PAGES,)),
    Group(("decode products",), "threshold", "bf16 fp32", DECODE_DIMS, (PAGES,)),
    Group(("decode short",), "online", "bf16 fp32", POWERS, ("all",)),
    Group(("decode short",), "online", "bf16", (128,)),
    Group(("decode short",), "none threshold factor shifted", "bf16", (128,), archs=("sm_90",)),
    Group(("decode short",), "sum", "fp16", (128,), archs=("sm_90",)),
    Group(("decode short products",), "online", "bf16", (128,), ("all",), ("sm_90",)),
    Group(("decode merge",), "factor shifted", "fp32", (128,)),
    Group(("decode products",), "threshold", "bf16", (128,), TERMS),
    Group(("decode products",), "threshold", "bf16 fp32", DECODE_DIMS, DECODE_EXTRAS),
    Group(("decode products",), "online", "bf16 fp32", DECODE_DIMS, ("all",)),
    Group(("segments",), "online", "fp32", (64,)),
    Group(("decode statistics",), "online", "fp32", (64,)),
    Group(("decode solver",), "threshold", "fp32", (64,)),
    Group(("decode solver",), "family", "fp32", (64,), ("all",)),
    Group(("decode merge",), "online", "fp32", DECODE_DIMS, ("", "all")),
    Group(SELECTION, "select", "bf16", POWERS, ("", "mask", "all")),
    Group((*SELECTION, "dbias"), "select", "fp32", (128, 256)),
    Group(SELECTION, "select", "bf16", (128,), ("key-bias", "softcap", "table")),
    Group(PASSES, "select", "bf16", (128,), (DROPOUT,)),
    Group(("forward", "dkdv"), "select", "bf16", (128,), (SPLIT,)),
    Group(("dbias",), "select", "bf16", (128,)),
    # The other kernels do not know how the keys were selected.
    Group(("selection",), "mass", "bf16", POWERS, ("", "mask", "all")),
    Group(("selection",), "mass", "fp32", (128, 256)),
    Group(("selection",), "mass", "bf16", (128,), ("key-bias", "softcap", "table")),
    Group(SHARES_KERNELS, "shares", "bf16", POWERS, ("", "bool", "all")),
    Group(SHARES_KERNELS, "shares", "fp32", POWERS),
    Group(LINEAR, "linear", "bf16 fp32", (64,), ("", "segments")),
    Group(LINEAR, "linear", "bf16", (128,), ("", "segments")),
    Group(LINEAR[2:], "linear", "bf16 fp32", (64,), (PACKED,)),  # the states are the same
    Group(LINEAR[2:], "linear", "bf16", (128,), (PACKED,)),
    Group(tuple(f"rows {name}" for name in ROW_KERNELS), "rows", "bf16 fp32", (64,)),
)


def specializations(archs: list[str], dims: list[int]) -> Iterator[Specialization]:
    """All specializations for these architectures and head dimensions, each of them once.

    A head dimension outside HEAD_DIMS is treated like 64 if it is a power of two, else like 96.
    """
    return of_groups(GROUPS, archs, dims)


def of_groups(
    groups: tuple[Group, ...], archs: list[str], dims: list[int]
) -> Iterator[Specialization]:
    """The specializations of these groups, each of them once; see `specializations`."""
    names, seen = {**kinds(), "linear": "", "shares": "", "rows": ""}, set()
    for arch, dim, group in product(archs, dims, groups):
        like = dim if dim in HEAD_DIMS else 96 if dim & (dim - 1) else 64
        if arch not in group.archs or like not in group.dims:
            continue
        for kind, kernel, dtype, extra in product(
            group.kinds.split(), group.kernels, group.dtypes.split(), group.extras
        ):
            wrong = {"stats": kind != "online", "threshold": kind not in ("threshold", "family")}
            spec = Specialization(kernel, arch, dtype, dim, names[kind], extra)
            if not wrong.get(kernel) and spec not in seen:
                seen.add(spec)
                yield spec


def quick_specializations(archs: list[str]) -> Iterator[Specialization]:
    """The specializations of most calls: bf16 without extras, and the stages of decoding.

    Terms of the scores, rare forms, "decode short" and SPLIT are compiled once, for sm_90 and
    a head dimension of 128, SPLIT, DROPOUT and a table with a softmax only. A learned power has
    small tiles, whose work is done more than once, and is left out.
    """
    rare_forms = {name for kind, name in kinds().items() if kind in (*RARE, "mass")}
    for spec in specializations(archs, list(QUICK_DIMS)):
        common = spec.dtype == "bf16" or spec.kernel in STAGES
        if not common or spec.activation in (kinds()["family"], kinds()["factor-family"]):
            continue
        if spec.extra in (SPLIT, DROPOUT, "table") and spec.activation != kinds()["online"]:
            continue
        if spec.extra in TERMS and spec.activation in (kinds()["select"], kinds()["mass"]):
            continue
        special = spec.extra in (SPLIT, DROPOUT, *TERMS) or "short" in spec.kernel
        if special or spec.activation in rare_forms:
            once = (spec.arch, spec.head_dim) == ("sm_90", 128)
            if once and spec.extra in ("", SPLIT, DROPOUT, *TERMS):
                yield spec
        elif spec.extra in ("", *BARE):
            yield spec
