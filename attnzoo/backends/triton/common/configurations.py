"""Block sizes, warps and pipeline stages per kernel, architecture, element size and head dimension.

Each row compiles without spilled registers and within the architecture's shared memory: that is
what ``python -m benchmarks compile`` holds. Tuning prints a new table; nothing is tried out in a
user's call. What is neither Hopper nor Blackwell's data center part takes the rows of sm_80.

What a call has beside the plain loop decides which of a kernel's rows it takes:

- "filled": columns that fill up a head dimension to a power of two;
- "one": one of window, ALiBi, segments and a mask of keys;
- "listed": a threshold's list of blocks, and nothing else;
- "several": more than that. A dense mask, two extras, one beside a list of blocks, further vectors
  to hold (the shape, the gradient of lse);
- "unaligned": strides that no wide load divides, so that each element has an address of its own,
  whatever else there is.

The last two are rare. Their rows are safe rather than fast: the same for all architectures, and
small enough for everything at once. Where a kernel has no rows of a name, those of "several" hold
for "unaligned" and its plain ones for the others.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    part: int | None = None  # columns of q kᵀ and of dO vᵀ at a time, where not all
    registers: int | None = None  # the most for each thread; None: as ptxas likes
    split: bool = True  # without a window, blocks that are seen whole in a loop of their own


# All registers, so that ptxas does not spill a few for more blocks at once.
ALL = 255
full = partial(Config, registers=ALL)

# Bytes of shared memory that a kernel may take. The rows of sm_80 serve consumer cards too (sm_86,
# sm_89, sm_120), so theirs is the limit.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448}

# For head dimensions of up to 64, 128 and 256.
Rows = tuple[Config, ...]
# The left operand of a product of three in tf32 is held twice: in parts, or no block size fits.
FP32: dict[str, Rows] = {
    "forward": (Config(64, 32, 8, 2), Config(64, 32, 8, 1, 32), Config(32, 32, 8, 1, 32)),
    "dq": (Config(16, 32, 8, 1), Config(32, 32, 8, 1, 32), Config(16, 32, 8, 1, 32)),
    "dq listed": (Config(16, 32, 4, 1), Config(32, 32, 8, 1, 32), Config(16, 32, 8, 1, 32)),
    "dkdv": (Config(32, 32, 8, 2), Config(32, 32, 8, 1, 32), Config(16, 16, 8, 1, 16)),
    "dkdv listed": (Config(32, 32, 8, 2), Config(32, 32, 8, 1, 16), Config(16, 16, 8, 1, 16)),
    "stats": (Config(64, 32, 8, 2), Config(64, 32, 8, 1, 32), Config(64, 32, 8, 1, 32)),
    "threshold": (full(64, 32, 8, 1), full(32, 32, 8, 1, 32), full(16, 32, 8, 1, 32)),
    "forward several": (Config(16, 32, 8, 1, 32),) * 3,
    "dq several": (Config(16, 32, 8, 1, 32), Config(16, 32, 8, 1, 32), full(16, 16, 8, 1, 16)),
    "dkdv several": (Config(16, 32, 8, 1, 32), Config(16, 32, 8, 1, 32), Config(16, 32, 8, 1, 16)),
    "stats several": (Config(64, 32, 8, 1, 32),) * 3,
    "threshold several": (full(16, 32, 8, 1, 32),) * 3,
}
SAFE: dict[str, Rows] = {
    "forward several": (Config(64, 64, 8, 2), Config(32, 32, 4, 1), Config(16, 32, 8, 1)),
    "forward unaligned": (Config(16, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 16, 8, 1, 64)),
    "dq several": (full(32, 64, 8, 1), full(16, 32, 8, 1), full(16, 32, 8, 1, 32)),
    "dq unaligned": (full(16, 32, 8, 1), full(16, 32, 8, 1), Config(16, 16, 4, 1, 16)),
    "dkdv several": (Config(32, 32, 8, 1), Config(64, 32, 8, 2), Config(32, 16, 8, 1)),
    "stats several": (Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(32, 32, 8, 1)),
    "threshold several": (full(32, 32, 8, 1),) * 3,
}
# (architecture, bits of an element) -> the kernel and what is beside its plain loop -> rows.
TABLE: dict[tuple[int, int], dict[str, Rows]] = {
    **{(arch, 32): FP32 for arch in SHARED},
    (80, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), Config(128, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward filled": (full(64, 64, 8, 2), full(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward one": (Config(128, 128, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "forward listed": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 1)),
        "dq": (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 8, 1)),
        "dq filled": (Config(64, 64, 8, 1), Config(64, 64, 8, 2), Config(32, 32, 8, 1)),
        "dq one": (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 8, 1)),
        "dq listed": (Config(128, 64, 8, 2), Config(32, 64, 8, 1), full(16, 32, 8, 1)),
        "dkdv": (Config(32, 64, 4, 2), Config(64, 64, 8, 2), Config(32, 32, 8, 2)),
        "dkdv one": (Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(32, 32, 8, 2)),
        "stats": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 8, 2)),
        "threshold": (full(128, 64, 8, 1), Config(128, 64, 8, 1), full(64, 32, 8, 2)),
    },
    (90, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(128, 32, 8, 2)),
        "forward filled": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "forward one": (Config(128, 128, 8, 2), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        "dq": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq filled": (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 8, 1)),
        "dq listed": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(16, 32, 8, 1)),
        "dkdv": (Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(32, 32, 8, 2)),
        "dkdv one": (Config(64, 64, 4, 2), Config(32, 64, 8, 2), Config(32, 32, 8, 2)),
        "stats": (Config(128, 128, 8, 2),) * 3,
        "threshold": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
    },
    (100, 16): {
        **SAFE,
        "forward": (Config(128, 128, 8, 2), full(128, 64, 8, 2), Config(64, 64, 8, 2)),
        "dq": (full(128, 64, 8, 2), full(128, 64, 8, 2), full(64, 32, 8, 2)),
        "dq listed": (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(16, 32, 8, 1)),
        "dkdv": (full(64, 64, 4, 2), full(32, 128, 8, 2), Config(16, 64, 8, 1)),
        "stats": (Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 8, 2)),
        "threshold": (full(128, 64, 8, 1), full(128, 64, 8, 1), Config(64, 32, 8, 1)),
    },
}

# The interpreter: small, so that short sequences have many blocks. fp32 beyond 128 goes in parts.
INTERPRETED_PART = 64
INTERPRETED = {
    "forward": Config(64, 32, 1, 1),
    "dq": Config(32, 64, 1, 1),
    "dkdv": Config(64, 32, 1, 1),
    "stats": Config(64, 64, 1, 1),
    "threshold": Config(128, 64, 1, 1),  # the map's
}


def of_dim(rows: Rows, head_dim: int) -> Config:
    if head_dim > 256:
        raise ValueError(f"no configuration for a head dimension of {head_dim}")
    return rows[0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]


def find(kernel: str, arch: int, bits: int, beside: str) -> Rows:
    table = TABLE[arch // 10 * 10 if arch // 10 in (9, 10) else 80, bits]
    rows = table.get(f"{kernel} {beside}")
    if rows is None and beside == "unaligned":
        rows = table.get(f"{kernel} several")
    return rows or table[kernel]


def pick(kernel: str, arch: int, bits: int, head_dim: int, beside: str) -> Config:
    """The row for this call. ``arch`` is 10 · major + minor, or 0 for the interpreter.

    ``beside``: "", "filled", "one", "listed", "several" or "unaligned".
    """
    if arch == 0:
        part = INTERPRETED_PART if bits == 32 and head_dim > 128 else None
        return INTERPRETED[kernel]._replace(part=part)
    return of_dim(find(kernel, arch, bits, beside), head_dim)


def map_tile(head_dim: int, bits: int, several: bool) -> tuple[int, int]:
    """Queries and keys of a tile in the map of blocks that hold weight.

    A function of the call alone, because the size of the map follows from it: that of the rows of
    "threshold", which all architectures have in common.
    """
    config = of_dim(TABLE[80, bits]["threshold several" if several else "threshold"], head_dim)
    return config.block_m, config.block_n


# The kernels of linear forms, by bits of a feature: tokens in a chunk, the same for all kernels of
# a call; features in a block, warps, stages. fp32 takes shorter chunks: a product of three in tf32
# holds its operands twice, and the weights of a longer chunk fitted in no number of registers.
LINEAR_KERNELS = ("states", "states back", "output", "dx", "dy", "dv")
LINEAR_CHUNK = {16: 64, 32: 32}
INTERPRETED_CHUNK = 32
# Columns of values that are taken at once; a row's denominator is made anew for each so many.
LINEAR_WIDEST = {16: 128, 32: 64}
LINEAR: dict[int, dict[str, Config]] = {
    16: {**dict.fromkeys(LINEAR_KERNELS, Config(64, 64, 8, 2)), "states": full(64, 64, 8, 2)},
    32: {
        **dict.fromkeys(LINEAR_KERNELS, Config(32, 32, 8, 1)),
        **dict.fromkeys(("output", "dx", "dy"), Config(32, 16, 8, 1)),
        "states back": full(32, 32, 8, 1),
    },
}


def linear_config(kernel: str, arch: int, bits: int) -> Config:
    if arch == 0:
        return Config(INTERPRETED_CHUNK, 16, 1, 1)
    return LINEAR[bits][kernel]


# Few queries against many keys, by bits of an element. What is read is what it costs, so several
# blocks are on their way at once. "safe" is what would be "several" or "unaligned" above, a mask of
# its own for each head, and many rows in a tile.
DECODE: dict[int, dict[str, Rows]] = {
    16: {
        "": (Config(16, 128, 4, 3), Config(16, 64, 4, 3), Config(16, 32, 4, 3)),
        "safe": (Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(64, 16, 8, 1, 32)),
    },
    32: {
        "": (Config(16, 64, 4, 2), Config(16, 32, 4, 2), full(16, 16, 4, 2, 32)),
        "safe": (full(32, 32, 8, 1, 32), full(32, 16, 8, 1, 32), full(32, 16, 8, 1, 32)),
    },
}


def decode_config(arch: int, bits: int, head_dim: int, safe: bool) -> Config:
    if arch == 0:
        return Config(16, 32, 1, 1)
    return of_dim(DECODE[bits]["safe" if safe else ""], head_dim)
