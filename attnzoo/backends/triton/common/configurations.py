"""Block sizes, warps and pipeline stages per kernel, architecture, element size and head dimension.

Every entry, except one in `OLDER`, compiles without spilled registers and within the architecture's
shared memory, which ``python -m benchmarks compile`` checks. ``python -m benchmarks tune`` tries
other entries. Nothing is tuned at run time. Architectures other than sm_90 and sm_100 use the
entries of sm_80.

A kernel has several entries, chosen by the features of the call:

- "": none of the following;
- "filled": a head dimension is padded to a power of two; for the forward on sm_90 and sm_100, any
  call that cannot load keys and values by TMA;
- "one": one of window, ALiBi, segments and a key mask;
- "listed": a list of the blocks with nonzero weights, from a threshold; at most one feature of
  "one";
- "heavy": at most one feature of "one", and an activation that needs many registers: it has a
  per-query ``shape`` (with a list of blocks); or, in the backward, it has a normalizer or a
  factor, or PEAKED is set (see `fold`), or (dQ) it is normalized, not exp, and in 16 bits;
- "several": at least one of these: a dense mask; two or more features of "one"; a gradient of lse;
  PEAKED (see `fold`);
- "listed several": the same, with a list of blocks, or with an activation as in "heavy";
- "distance": a gain and a bias by distance, and at most one feature of "one";
- "listed distance": the same, with a list of blocks;
- "narrow": as "several", but the mask allows no wide loads, or the keys cannot be loaded by TMA
  (forward), or the list is of small blocks, or a shape is learned without a threshold (backward);
  or "distance" together with another feature;
- "unaligned": strides or addresses that allow no wide loads, with or without the above;
- "listed unaligned": the same, with a list of blocks.

"narrow" and "unaligned" are rare. Their entries are the same for all architectures, and have blocks
small enough for all features at once. A missing entry is replaced: see `REPLACED`.

Triton before 3.9 needs more registers. With it, the entries in `OLDER` replace those of the table.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    part: int | None = None  # head dimensions per partial product of q kᵀ and dO vᵀ; None: all
    registers: int | None = None  # largest number per thread; None: ptxas decides
    turned: bool = False  # orientation of the tiles of dK/dV, see `backward_kv`
    split: bool = True  # loop over fully visible blocks of keys separately, without bounds checks


# Largest number of registers per thread. Without a limit, ptxas may spill registers to memory so
# that more blocks run at once.
ALL = 255
full = partial(Config, registers=ALL)
turned = partial(Config, turned=True)

# Limit of shared memory in bytes. sm_80 also stands for consumer cards (sm_86, sm_89, sm_120), so
# their limit applies.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448}

# Configurations for head dimensions up to each limit.
LIMITS = (64, 128, 256)
ByHeadDim = tuple[Config, ...]
# A tf32x3 product keeps its left operand in registers twice. Above a head dimension of 64 the
# product must be computed in parts.
FP32: dict[str, ByHeadDim] = {
    "forward": (Config(64, 32, 8, 2), Config(64, 32, 8, 1, 32), Config(32, 32, 8, 1, 32)),
    "dq": (Config(16, 32, 8, 1), Config(32, 32, 8, 1, 32), Config(16, 32, 8, 1, 32)),
    "dq listed": (Config(16, 32, 4, 1), Config(32, 32, 8, 1, 32), Config(16, 32, 8, 1, 32)),
    "dkdv": (Config(32, 32, 8, 2), Config(32, 32, 8, 1, 32), Config(16, 16, 8, 1, 16)),
    "dkdv listed": (Config(32, 32, 8, 1, 32), Config(32, 32, 8, 1, 16), Config(16, 16, 8, 1, 16)),
    "stats": (Config(64, 32, 8, 2), full(64, 32, 8, 1, 32), full(64, 32, 8, 1, 32)),
    "threshold": (full(64, 32, 8, 1), full(32, 32, 8, 1, 32), full(16, 32, 8, 1, 32)),
    "forward several": (Config(16, 32, 8, 1, 32),) * 3,
    "dq several": (Config(16, 32, 8, 1, 32), Config(16, 32, 8, 1, 32), full(16, 16, 8, 1, 16)),
    "dkdv several": (Config(16, 32, 8, 1, 32), Config(16, 32, 8, 1, 32), Config(16, 16, 8, 1, 16)),
    "stats several": (Config(64, 32, 8, 1, 32),) * 3,
    "threshold several": (full(16, 32, 8, 1, 32),) * 3,
}
SAFE: dict[str, ByHeadDim] = {
    "forward narrow": (full(64, 64, 8, 2), full(16, 32, 4, 1), Config(16, 32, 4, 1)),
    "forward unaligned": (Config(64, 16, 4, 1), Config(128, 16, 8, 1), Config(64, 16, 8, 1, 64)),
    "forward listed unaligned": (
        Config(32, 64, 8, 1),
        Config(32, 64, 4, 1),
        Config(64, 32, 8, 1, 64),
    ),
    "dq narrow": (full(32, 64, 8, 1), full(16, 32, 8, 1), full(16, 32, 8, 1, 32)),
    "dq unaligned": (full(16, 32, 8, 1), full(16, 32, 8, 1), full(16, 16, 4, 1, 16)),
    "dq listed distance": (full(32, 64, 8, 1), full(16, 64, 8, 1), full(16, 32, 8, 1, 32)),
    "dkdv narrow": (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(16, 32, 8, 1)),
    "stats several": (Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(32, 32, 8, 1)),
    "stats unaligned": (Config(128, 16, 8, 1),) * 3,
    "threshold narrow": (full(32, 32, 8, 1),) * 3,
}
# (architecture, bits of an element) -> "kernel" or "kernel feature" -> configurations.
TABLE: dict[tuple[int, int], dict[str, ByHeadDim]] = {
    **{(arch, 32): FP32 for arch in SHARED},
    (80, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), Config(128, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward filled": (full(64, 64, 8, 2), full(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward one": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward listed": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 1)),
        "forward heavy": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(32, 32, 4, 1)),
        "dq": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq filled": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq one": (full(64, 32, 4, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq listed": (Config(128, 64, 8, 2), full(32, 64, 8, 1), Config(16, 32, 4, 1)),
        "dq heavy": (full(32, 64, 4, 2), full(16, 64, 8, 1), Config(16, 32, 4, 1)),
        "dkdv": (full(64, 64, 4, 2), Config(64, 64, 8, 2), full(64, 16, 8, 2)),
        "dkdv one": (Config(32, 64, 4, 2), Config(64, 64, 8, 2), full(64, 16, 8, 2)),
        "dkdv listed": (Config(32, 64, 4, 2), Config(64, 64, 8, 2), full(64, 16, 8, 2)),
        "dkdv heavy": (Config(32, 64, 4, 2), Config(64, 32, 8, 2), full(64, 16, 8, 2)),
        "stats": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 8, 2)),
        "threshold": (full(128, 64, 8, 1), Config(128, 64, 8, 1), full(128, 32, 8, 2)),
        "threshold several": (full(128, 64, 8, 1), Config(128, 64, 8, 1), full(128, 32, 8, 2)),
        "forward several": (Config(128, 32, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq several": (full(64, 32, 4, 1), Config(32, 64, 8, 1), Config(32, 64, 8, 1)),
        "dkdv several": (Config(32, 64, 4, 1), Config(64, 32, 8, 2), full(64, 16, 8, 2)),
        "forward listed several": (
            Config(128, 64, 8, 2),
            Config(64, 64, 8, 2),
            Config(16, 32, 4, 1),
        ),
        "dkdv listed several": (Config(32, 64, 4, 1), Config(64, 32, 8, 2), full(64, 16, 8, 2)),
        "dq listed several": (Config(32, 64, 4, 1), Config(32, 64, 8, 1), Config(16, 32, 4, 1)),
    },
    (90, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(128, 64, 8, 2)),
        "forward filled": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "forward listed": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 32, 4, 1)),
        "forward heavy": (Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
        "dq": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 1)),
        "dq one": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "dq filled": (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(128, 32, 8, 1)),
        "dq listed": (full(128, 64, 8, 2), full(128, 64, 8, 2), Config(64, 32, 4, 1)),
        "dq heavy": (Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(128, 16, 8, 1)),
        "dkdv": (Config(64, 64, 4, 2), Config(64, 64, 4, 2), turned(128, 32, 8, 1)),
        "dkdv one": (Config(64, 64, 4, 2), Config(32, 64, 4, 2), turned(128, 32, 8, 1)),
        "dkdv listed": (Config(64, 64, 4, 2), Config(32, 64, 4, 2), turned(128, 32, 8, 1)),
        "dkdv heavy": (Config(32, 64, 4, 2), Config(32, 64, 4, 1), turned(128, 16, 8, 1)),
        "stats": (Config(128, 128, 8, 2),) * 3,
        "threshold": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), full(128, 32, 8, 1)),
        "forward several": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "dq several": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "dkdv several": (Config(32, 64, 4, 2), turned(128, 32, 8, 2), turned(128, 16, 8, 1)),
        "dkdv listed several": (
            Config(32, 64, 4, 2),
            turned(128, 16, 8, 2),
            full(64, 16, 8, 2),
        ),
        "dq distance": (Config(128, 32, 8, 2), Config(128, 32, 8, 2), Config(128, 16, 8, 2)),
        "dq listed several": (
            Config(128, 64, 8, 2),
            Config(128, 64, 8, 2),
            Config(128, 32, 8, 2),
        ),
    },
    (100, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 4, 2)),
        "forward one": (Config(64, 64, 4, 2), full(128, 64, 8, 2), Config(64, 64, 8, 2)),
        "forward filled": (Config(128, 128, 8, 2), full(128, 64, 8, 2), Config(64, 64, 8, 2)),
        "dq": (full(128, 64, 8, 2), full(128, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward listed": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 4, 1)),
        "forward heavy": (Config(64, 64, 4, 1), Config(64, 64, 4, 2), full(64, 64, 4, 1)),
        "dq listed": (full(128, 64, 8, 2), full(128, 64, 8, 2), Config(64, 32, 4, 1)),
        "dq heavy": (full(64, 64, 4, 1), Config(64, 64, 4, 2), Config(64, 64, 8, 1)),
        "dkdv": (full(64, 128, 8, 2), full(64, 128, 8, 2), Config(64, 64, 8, 1)),
        "dkdv listed": (full(64, 64, 4, 2), full(64, 64, 4, 2), turned(64, 16, 4, 1)),
        "dkdv heavy": (full(32, 64, 4, 2), full(32, 64, 4, 2), full(64, 32, 8, 1)),
        "stats": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 8, 2)),
        "threshold": (full(128, 64, 8, 1), full(128, 64, 8, 1), full(128, 32, 8, 1)),
        "forward several": (full(128, 64, 8, 2), full(128, 64, 8, 2), Config(64, 64, 8, 2)),
        "dq several": (full(128, 64, 8, 1), Config(128, 64, 8, 2), Config(64, 64, 8, 1)),
        "dkdv several": (
            full(64, 64, 4, 2, turned=True),
            full(32, 64, 4, 2),
            turned(64, 32, 8, 1),
        ),
        "dkdv listed several": (full(32, 64, 4, 2), full(32, 64, 4, 2), full(64, 16, 8, 1)),
        "dq distance": (full(64, 64, 8, 2), full(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "dkdv distance": (turned(64, 64, 8, 2), full(32, 64, 4, 2), turned(64, 32, 8, 1)),
    },
}

# Entries for Triton before SINCE: (architecture, bits) -> "kernel feature" -> limit of the head
# dimension -> configuration. With the entry of TABLE, a kernel would spill registers. An entry
# for "threshold" has the tile of TABLE, because `map_tile` must not depend on the version. On
# sm_80, D = 128, it spills 8 bytes if an operand does not start at a multiple of 16 bytes.
SINCE = (3, 9)
OLDER: dict[tuple[int, int], dict[str, dict[int, Config]]] = {
    (80, 32): {"dq several": {128: full(32, 32, 8, 1, 16)}},
    (90, 32): {"forward several": {128: full(16, 32, 8, 1, 32)}},
    (100, 32): {
        "forward several": {128: full(16, 32, 8, 1, 32)},
        "dq listed": {64: full(16, 32, 4, 1)},
    },
    (80, 16): {
        "dq several": {
            64: full(64, 16, 4, 2),
            128: Config(32, 64, 8, 2),
            256: Config(16, 32, 4, 2),
        },
        "dq listed several": {64: full(32, 64, 4, 1)},
        "dkdv listed several": {64: Config(64, 32, 8, 2)},
        "dq narrow": {64: full(16, 64, 4, 2)},
        "dq unaligned": {128: full(16, 32, 8, 1, 32)},
        "dkdv one": {128: Config(64, 64, 8, 1)},
        "threshold": {
            128: full(128, 64, 8, 1, 32),
            256: full(128, 32, 8, 2, 64),
        },
        "threshold several": {
            128: full(128, 64, 8, 1, 64),
            256: full(128, 32, 8, 2, 64),
        },
    },
    (90, 16): {
        "dq": {256: Config(128, 16, 8, 2)},
        "dq one": {256: Config(128, 16, 8, 2)},
        "dq filled": {256: Config(128, 16, 8, 2)},
        "dq listed": {256: Config(64, 32, 8, 2)},
        "dq heavy": {128: Config(64, 32, 8, 2), 256: Config(64, 32, 8, 2)},
        "dq several": {
            64: Config(128, 32, 8, 2),
            128: Config(128, 32, 8, 2),
            256: Config(64, 32, 8, 2),
        },
        "dq listed several": {
            64: Config(128, 32, 8, 2),
            128: full(64, 32, 8, 2),
            256: Config(64, 32, 8, 2),
        },
        "dq distance": {128: Config(128, 16, 8, 2), 256: full(64, 16, 8, 2)},
        "dq narrow": {64: full(16, 64, 8, 1), 256: full(16, 32, 8, 2, 32)},
        "dq unaligned": {128: Config(16, 32, 8, 1)},
        "dkdv": {128: turned(128, 64, 8, 2)},
        "dkdv one": {128: turned(128, 32, 8, 2)},
        "dkdv heavy": {128: turned(128, 32, 8, 2)},
        "dkdv narrow": {256: full(64, 16, 8, 1)},
        "threshold": {256: full(128, 32, 8, 1, 64)},
    },
    (100, 16): {
        "forward one": {256: full(64, 64, 8, 1)},
        "forward filled": {256: full(64, 64, 8, 2)},
        "forward several": {256: full(64, 64, 8, 1)},
        "dq listed": {256: full(64, 32, 4, 1)},
        "dq several": {
            64: Config(128, 32, 8, 2),
            128: Config(128, 32, 8, 2),
            256: full(64, 32, 8, 2),
        },
        "dq unaligned": {128: Config(16, 32, 8, 2)},
        "dkdv listed": {64: Config(64, 64, 4, 1), 128: Config(32, 64, 4, 2)},
        "dkdv heavy": {128: full(32, 64, 4, 1)},
        "dkdv several": {128: turned(64, 64, 4, 2)},
    },
}

# The features whose entries replace a missing one, before that of "". fp32 has no "narrow".
REPLACED = {
    "heavy": ("listed",),
    "listed several": ("several",),
    "distance": ("several",),
    "listed distance": ("listed several", "several"),
    "narrow": ("several",),
    "unaligned": ("narrow", "several"),
    "listed unaligned": ("unaligned", "narrow", "several"),
}

# For the interpreter: small blocks, so that a short sequence has several blocks. Products in fp32
# above D = 128 are computed in parts.
INTERPRETED_PART = 64
INTERPRETED = {
    "forward": Config(64, 32, 1, 1),
    "dq": Config(32, 64, 1, 1),
    "dkdv": Config(32, 64, 1, 1),
    "dkdv turned": Config(64, 32, 1, 1, turned=True),
    "stats": Config(64, 64, 1, 1),
    "threshold": Config(128, 64, 1, 1),  # the largest tile of a block map
}


def of_dim(configs: ByHeadDim, head_dim: int) -> Config:
    if head_dim > LIMITS[-1]:
        raise ValueError(f"head dimension must be at most {LIMITS[-1]}, got {head_dim}")
    return next(config for config, limit in zip(configs, LIMITS) if head_dim <= limit)


def known(arch: int) -> int:
    """The architecture whose entries are used for ``arch``."""
    return arch // 10 * 10 if arch // 10 in (9, 10) else 80


@cache
def is_older() -> bool:
    """Whether the installed Triton needs the entries in `OLDER`."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < SINCE


def find(kernel: str, arch: int, bits: int, feature: str) -> ByHeadDim:
    machine = known(arch), bits
    table, features = TABLE[machine], (feature, *REPLACED.get(feature, ()), "")
    name = next(x for x in (f"{kernel} {name}".strip() for name in features) if x in table)
    older = OLDER.get(machine, {}).get(name) if is_older() else None
    if older is None:
        return table[name]
    return tuple(older.get(limit, config) for limit, config in zip(LIMITS, table[name]))


def pick(kernel: str, arch: int, bits: int, head_dim: int, feature: str) -> Config:
    """The configuration for a call.

    ``arch``: 10 · major + minor, or 0 for the interpreter. ``feature``: see the module docstring.
    """
    if arch == 0:
        part = INTERPRETED_PART if bits == 32 and head_dim > 128 else None
        # Both orientations of dK/dV are tested.
        config = INTERPRETED["dkdv turned" if kernel == "dkdv" and bits == 32 else kernel]
        return config._replace(part=part)
    return of_dim(find(kernel, arch, bits, feature), head_dim)


def map_tile(head_dim: int, bits: int, small: bool) -> tuple[int, int]:
    """Return the numbers of queries and keys in one tile of the block map.

    The block map lists the tiles with nonzero weights of a threshold form. The tile determines the
    size of the map, so the tile must not depend on the device. The tile size is the block size of
    the "threshold" entries, which is the same on all architectures.
    """
    config = of_dim(find("threshold", 80, bits, "narrow" if small else ""), head_dim)
    return config.block_m, config.block_n


# Kernels of linear forms, by architecture and bits of a feature. block_m: tokens per chunk, equal
# for all kernels of a call. block_n: features per block. The longer the chunks, the fewer states
# are written and read, which is most of the memory traffic. Chunks of fp32 are shorter: a tf32x3
# product keeps its left operand twice, and the weights of a longer chunk do not fit in registers.
LINEAR_KERNELS = ("states", "states back", "output", "dx", "dy", "dv")
LINEAR_CHUNK = {16: 128, 32: 32}
INTERPRETED_CHUNK = 32
# Largest number of columns of values per pass. Each pass recomputes the denominators.
LINEAR_WIDEST = {16: 128, 32: 64}
LINEAR_FP32 = {
    **dict.fromkeys(LINEAR_KERNELS, Config(32, 32, 8, 1)),
    **dict.fromkeys(("output", "dx", "dy"), Config(32, 16, 8, 1)),
    "states back": full(32, 32, 8, 1),
}
LINEAR: dict[tuple[int, int], dict[str, Config]] = {
    **{(arch, 32): LINEAR_FP32 for arch in SHARED},
    **{(arch, 16): dict.fromkeys(LINEAR_KERNELS, full(128, 64, 8, 2)) for arch in SHARED},
    (80, 16): {
        **dict.fromkeys(LINEAR_KERNELS, full(128, 32, 8, 2)),
        "output": full(128, 16, 8, 2),
    },
}


def linear_config(kernel: str, arch: int, bits: int) -> Config:
    if arch == 0:
        return Config(INTERPRETED_CHUNK, 16, 1, 1)
    return LINEAR[known(arch), bits][kernel]


# Kernels of `decode`, by bits of an element. Reading the keys takes most of the time, so several
# blocks are loaded ahead. The entry "safe" is used for a dense mask, a mask that differs between
# heads, two or more features of "one", strides that allow no wide loads, and tiles of many rows.
DECODE: dict[int, dict[str, ByHeadDim]] = {
    16: {
        "": (full(16, 128, 8, 3), Config(16, 64, 4, 3), Config(16, 32, 4, 3)),
        "safe": (Config(64, 64, 8, 2), full(64, 16, 8, 2), full(64, 16, 8, 1, 32)),
    },
    32: {
        "": (full(16, 64, 4, 2), Config(16, 32, 4, 2), full(16, 16, 4, 2, 32)),
        "safe": (full(32, 32, 8, 1, 32), full(32, 16, 8, 1, 32), full(32, 16, 8, 1, 32)),
    },
}


def decode_config(arch: int, bits: int, head_dim: int, safe: bool) -> Config:
    if arch == 0:
        return Config(16, 32, 1, 1)
    return of_dim(DECODE[bits]["safe" if safe else ""], head_dim)
