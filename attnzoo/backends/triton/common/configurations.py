"""Block sizes, warps and pipeline stages per kernel, architecture, element size and head dimension.

Each row compiles without spilled registers and within the architecture's shared memory: that is
what ``python -m benchmarks compile`` holds. Tuning prints a new table; nothing is tried out in a
user's call. What is neither Hopper nor Blackwell's data center part takes the rows of sm_80.
"""

from __future__ import annotations

from typing import NamedTuple

ALL = 255


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    split: bool = True  # without a window, blocks that are seen whole in a loop of their own
    part: int | None = None  # columns of q kᵀ and of dO vᵀ at a time, where not all
    # ALL, so that ptxas does not spill a few for more blocks at once; or it may do as it likes.
    registers: int | None = None


# Bytes of shared memory that a kernel may take. The rows of sm_80 serve consumer cards too (sm_86,
# sm_89, sm_120), so theirs is the limit.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448}

# (architecture, bits of an element) -> kernel -> rows: the head dimension up to which each holds.
Rows = tuple[tuple[int, Config], ...]
# A threshold's list of blocks, and beside it a window, a mask, ALiBi or segments.
CROWDED: dict[str, Rows] = {
    "forward crowded": ((128, Config(32, 32, 4, 1)), (256, Config(32, 32, 8, 1))),
    "dq crowded": ((256, Config(16, 32, 8, 1, registers=ALL)),),
    "dkdv crowded": ((256, Config(32, 32, 8, 1)),),
    "threshold crowded": ((256, Config(32, 32, 8, 1, registers=ALL)),),
    "forward odd": ((128, Config(16, 32, 8, 1)), (256, Config(16, 16, 8, 1))),
    "dq odd": ((128, Config(16, 32, 8, 1)), (256, Config(16, 16, 4, 1, part=32))),
    "dkdv odd": ((128, Config(32, 32, 8, 1)), (256, Config(16, 16, 8, 1))),
    "stats odd": ((256, Config(32, 32, 8, 1)),),
}
# The left operand of a product of three in tf32 is held twice: in parts, or no block size fits.
FP32: dict[str, Rows] = {
    "forward": (
        (64, Config(64, 32, 8, 2)),
        (128, Config(64, 32, 8, 1, part=32)),
        (256, Config(32, 32, 8, 1, part=32)),
    ),
    "dq": (
        (64, Config(16, 32, 8, 1)),
        (128, Config(32, 32, 8, 1, part=32)),
        (256, Config(16, 32, 8, 1, part=32)),
    ),
    "dkdv": (
        (64, Config(32, 32, 8, 2)),
        (128, Config(32, 32, 8, 1, part=32)),
        (256, Config(16, 16, 8, 1, part=16)),
    ),
    "stats": (
        (64, Config(64, 32, 8, 2)),
        (256, Config(64, 32, 8, 1, part=32)),
    ),
    "threshold": (
        (64, Config(64, 32, 8, 1, registers=ALL)),
        (128, Config(32, 32, 8, 1, part=32, registers=ALL)),
        (256, Config(16, 32, 8, 1, part=32, registers=ALL)),
    ),
    "dq mapped": (
        (64, Config(16, 32, 4, 1)),
        (128, Config(32, 32, 8, 1, part=32)),
        (256, Config(16, 32, 8, 1, part=32)),
    ),
    "forward heavy": ((256, Config(32, 32, 8, 1, part=32)),),
    "dq heavy": ((256, Config(16, 32, 8, 1, part=32)),),
    "dkdv heavy": ((128, Config(16, 32, 8, 1, part=32)), (256, Config(16, 16, 8, 1, part=16))),
    "stats heavy": ((256, Config(64, 32, 8, 1, part=32)),),
    "forward crowded": ((256, Config(16, 32, 8, 1, part=32, registers=ALL)),),
    "dq crowded": ((256, Config(16, 32, 8, 2, part=32)),),
    "dkdv crowded": ((128, Config(16, 32, 8, 1, part=32)), (256, Config(16, 16, 8, 1, part=16))),
    "threshold crowded": ((256, Config(16, 32, 8, 1, part=32, registers=ALL)),),
    "forward odd": ((256, Config(16, 32, 8, 1, part=32)),),
    "dq odd": ((256, Config(16, 16, 8, 1, part=16, registers=ALL)),),
    "dkdv odd": ((256, Config(16, 16, 8, 1, part=16)),),
    "stats odd": ((256, Config(32, 32, 8, 1, part=32)),),
}
TABLE: dict[tuple[int, int], dict[str, Rows]] = {
    (90, 16): {
        **CROWDED,
        "forward cut": ((128, Config(128, 64, 8, 2)),),
        "dq cut": ((128, Config(64, 64, 8, 2)),),
        "forward": ((128, Config(128, 128, 8, 2)), (256, Config(128, 32, 8, 2))),
        "dq": ((128, Config(128, 64, 8, 2)), (256, Config(32, 64, 8, 1))),
        "dkdv": (
            (64, Config(64, 64, 4, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "stats": ((256, Config(128, 128, 8, 2)),),
        "threshold": ((128, Config(128, 64, 8, 2)), (256, Config(64, 32, 4, 2))),
        "forward one": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(128, 64, 8, 2)),
            (256, Config(128, 32, 8, 2)),
        ),
        "dkdv one": (
            (64, Config(64, 64, 4, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "forward heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(64, 32, 8, 1)),
            (256, Config(32, 32, 8, 1)),
        ),
        "dq heavy": (
            (64, Config(32, 64, 4, 2, registers=ALL)),
            (128, Config(32, 32, 8, 1)),
            (256, Config(16, 32, 8, 1, registers=ALL)),
        ),
        "dkdv heavy": (
            (64, Config(32, 64, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 64, 8, 1)),
        ),
        "dq mapped": ((128, Config(128, 64, 8, 2)), (256, Config(16, 32, 8, 1))),
    },
    (80, 16): {
        **CROWDED,
        "dq odd": ((128, Config(16, 32, 8, 1)), (256, Config(16, 16, 8, 1, part=32))),
        "forward cut": ((128, Config(64, 64, 8, 2, registers=ALL)),),
        "forward mapped": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(64, 64, 8, 1)),
        ),
        "dkdv crowded": ((128, Config(32, 32, 8, 1)), (256, Config(32, 16, 8, 1))),
        "dq one": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "forward crowded": (
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1, registers=ALL)),
        ),
        "dq crowded": ((128, Config(16, 32, 8, 1)), (256, Config(16, 32, 8, 1, registers=ALL))),
        "forward": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(128, 64, 8, 2)),
            (256, Config(64, 64, 8, 1)),
        ),
        "dq": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "dkdv": (
            (64, Config(32, 64, 4, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "stats": ((128, Config(128, 128, 8, 2)), (256, Config(64, 64, 8, 2))),
        "threshold": (
            (64, Config(128, 64, 8, 1, registers=ALL)),
            (128, Config(128, 64, 8, 1)),
            (256, Config(64, 32, 8, 2, registers=ALL)),
        ),
        "forward one": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(64, 64, 8, 1)),
        ),
        "dq mapped": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(32, 64, 8, 1)),
            (256, Config(16, 32, 8, 1, registers=ALL)),
        ),
        "dkdv one": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "forward heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1, registers=ALL)),
        ),
        "dq heavy": (
            (64, Config(32, 64, 8, 1, registers=ALL)),
            (128, Config(32, 32, 8, 1)),
            (256, Config(16, 32, 8, 1, registers=ALL)),
        ),
        "dkdv heavy": (
            (64, Config(32, 32, 8, 1)),
            (128, Config(64, 32, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 64, 8, 1)),
        ),
    },
    (100, 16): {
        **CROWDED,
        "forward crowded": ((128, Config(32, 32, 8, 1)), (256, Config(32, 32, 8, 1))),
        "dkdv crowded": ((128, Config(32, 32, 8, 1)), (256, Config(32, 32, 8, 2))),
        "forward": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(128, 64, 8, 2, registers=ALL)),
            (256, Config(64, 64, 8, 2)),
        ),
        "dq": (
            (128, Config(128, 64, 8, 2, registers=ALL)),
            (256, Config(64, 32, 8, 2, registers=ALL)),
        ),
        "dkdv": (
            (64, Config(64, 64, 4, 2, registers=ALL)),
            (128, Config(32, 128, 8, 2, registers=ALL)),
            (256, Config(16, 64, 8, 1)),
        ),
        "stats": ((128, Config(128, 128, 8, 2)), (256, Config(64, 64, 8, 2))),
        "threshold": (
            (128, Config(128, 64, 8, 1, registers=ALL)),
            (256, Config(64, 32, 8, 1)),
        ),
        "forward heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1)),
        ),
        "dq heavy": (
            (64, Config(32, 64, 4, 2, registers=ALL)),
            (128, Config(64, 32, 8, 2, registers=ALL)),
            (256, Config(16, 32, 8, 1, part=64, registers=ALL)),
        ),
        "dkdv heavy": (
            (64, Config(64, 32, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 64, 8, 1)),
        ),
        "dq mapped": ((128, Config(128, 64, 8, 2)), (256, Config(16, 32, 8, 1))),
    },
    (90, 32): FP32,
    (80, 32): {
        **FP32,
        "dq heavy": ((256, Config(16, 32, 8, 1, part=16)),),
        "dq crowded": ((256, Config(16, 32, 8, 1, part=16)),),
        "dkdv mapped": (
            (64, Config(32, 32, 8, 2)),
            (128, Config(32, 32, 8, 1, part=16)),
            (256, Config(16, 16, 8, 1, part=16)),
        ),
    },
    (100, 32): FP32,
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


def map_tile(head_dim: int, bits: int, crowded: bool) -> tuple[int, int]:
    """Queries and keys of a tile in the map of blocks that hold weight.

    A function of the call alone, because the size of the map follows from it.
    """
    if crowded:
        return (32, 32) if bits == 16 else (16, 32)
    if bits == 16:
        return (128, 64) if head_dim <= 128 else (64, 32)
    return (64 if head_dim <= 64 else 32 if head_dim <= 128 else 16), 32


def pick(kernel: str, arch: int, bits: int, head_dim: int, load: str) -> Config:
    """The row for this call. ``arch`` is 10 · major + minor, or 0 for the interpreter.

    ``load``: "" or "mapped", "one", "heavy", "crowded", "odd", "cut", what else takes registers;
    see `launch`.
    Where a kernel has no such rows its plain ones hold.
    """
    if arch == 0:
        part = INTERPRETED_PART if bits == 32 and head_dim > 128 else None
        return INTERPRETED[kernel]._replace(part=part)
    return find(kernel, arch, bits, head_dim, load)[-1]


def find(
    kernel: str, arch: int, bits: int, head_dim: int, load: str
) -> tuple[tuple[int, int], str, int, Config]:
    """Where in the table the row is: the table's key, the rows' name, up to which dimension."""
    key = arch // 10 * 10 if arch // 10 in (9, 10) else 80, bits
    for name in (f"{kernel} {load}", kernel):
        for most, config in TABLE[key].get(name, ()):
            if head_dim <= most:
                return key, name, most, config
    raise ValueError(f"{kernel}: no configuration for a head dimension of {head_dim}")


LINEAR_KERNELS = ("states", "states back", "output", "dx", "dy", "dv")

# The kernels of linear forms, by bits of a feature: tokens in a chunk, the same for all kernels of
# a call; features in a block, warps, stages. fp32 takes shorter chunks: a product of three in tf32
# holds its operands twice, and the weights of a longer chunk fitted in no number of registers.
LINEAR_CHUNK = {16: 64, 32: 32}
INTERPRETED_CHUNK = 32
# Columns of values that are taken at once; a row's denominator is made anew for each so many.
LINEAR_WIDEST = {16: 128, 32: 64}
LINEAR: dict[int, dict[str, Config]] = {
    16: {
        **dict.fromkeys(LINEAR_KERNELS, Config(64, 64, 8, 2)),
        "states": Config(64, 64, 8, 2, registers=ALL),
    },
    32: {
        **dict.fromkeys(LINEAR_KERNELS, Config(32, 32, 8, 1)),
        **dict.fromkeys(("output", "dx", "dy"), Config(32, 16, 8, 1)),
        "states back": Config(32, 32, 8, 1, registers=ALL),
    },
}


def linear_config(kernel: str, arch: int, bits: int) -> Config:
    if arch == 0:
        return Config(INTERPRETED_CHUNK, 16, 1, 1)
    return LINEAR[bits][kernel]


# Few rows against many keys, by bits of an element: the head dimension up to which a row holds, and
# keys in a block. What is read is what it costs, so several blocks are on their way at once. Heavy
# are many rows, a dense mask or several extras; odd are strides that no wide load divides.
DECODE: dict[tuple[int, str], Rows] = {
    (16, ""): (
        (64, Config(16, 128, 4, 3)),
        (128, Config(16, 64, 4, 3)),
        (256, Config(16, 32, 4, 3)),
    ),
    (32, ""): (
        (64, Config(16, 64, 4, 2)),
        (128, Config(16, 32, 4, 2)),
        (256, Config(16, 16, 4, 2, part=32, registers=ALL)),
    ),
    (16, "heavy"): (
        (64, Config(64, 64, 8, 2)),
        (128, Config(64, 32, 8, 2)),
        (256, Config(64, 16, 8, 1, part=32)),
    ),
    (16, "odd"): ((256, Config(64, 16, 8, 1, part=32)),),
    (32, "heavy"): (
        (128, Config(32, 32, 8, 1, part=32, registers=ALL)),
        (256, Config(32, 16, 8, 1, part=32, registers=ALL)),
    ),
    (32, "odd"): ((256, Config(32, 16, 8, 1, part=32, registers=ALL)),),
}


def decode_config(arch: int, bits: int, head_dim: int, load: str) -> Config:
    if arch == 0:
        return Config(16, 32, 1, 1)
    for most, config in DECODE[bits, load]:
        if head_dim <= most:
            return config
    raise ValueError(f"decode: no configuration for a head dimension of {head_dim}")
