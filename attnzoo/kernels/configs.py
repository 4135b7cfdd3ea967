"""Block sizes, warps and pipeline stages per kernel, architecture, element size and head dimension.

Each row compiles without spilled registers and within the architecture's shared memory: that is
what ``python -m benchmarks compile`` holds. Tuning prints a new table; nothing is tried out in a
user's call. What is neither Hopper nor Blackwell's data center part takes the rows of sm_80.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    split: bool = True  # without a window, blocks that are seen whole in a loop of their own


# Bytes of shared memory that a kernel may take. The rows of sm_80 serve consumer cards too (sm_86,
# sm_89, sm_120), so theirs is the limit.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448}

# (architecture, bits of an element) -> kernel -> rows: the head dimension up to which each holds.
Rows = tuple[tuple[int, Config], ...]
# A threshold's list of blocks, and beside it a window, a mask, ALiBi or segments.
CROWDED: dict[str, Rows] = {
    "forward crowded": ((128, Config(32, 32, 4, 1)), (256, Config(32, 32, 8, 1))),
    "dq crowded": ((64, Config(32, 32, 8, 1)), (256, Config(16, 32, 8, 1))),
    "dkdv crowded": ((256, Config(32, 32, 8, 1)),),
    "threshold crowded": ((256, Config(32, 32, 8, 1)),),
}
# Above 128 every block size spills: a product of three in tf32 keeps its operand twice.
FP32: dict[str, Rows] = {
    "forward": ((64, Config(64, 32, 8, 2)), (128, Config(16, 32, 4, 1))),
    "dq": ((128, Config(16, 32, 8, 1)),),
    "dq mapped": ((128, Config(16, 32, 4, 1)),),
    "dkdv": ((64, Config(32, 32, 8, 2)), (128, Config(16, 16, 8, 1))),
    "stats": ((64, Config(64, 32, 8, 2)), (128, Config(16, 64, 8, 1))),
    "threshold": ((64, Config(64, 32, 8, 1)), (128, Config(16, 32, 8, 1))),
    "forward heavy": ((64, Config(16, 32, 4, 1)), (128, Config(16, 16, 4, 1))),
    "dq heavy": ((128, Config(16, 16, 8, 1)),),
    "dkdv heavy": ((128, Config(16, 16, 8, 1)),),
    "stats heavy": ((128, Config(16, 16, 8, 1)),),
    "forward crowded": ((64, Config(16, 16, 8, 1)),),
    "dq crowded": ((64, Config(16, 16, 8, 1)),),
    "dkdv crowded": ((64, Config(16, 16, 8, 1)),),
    "threshold crowded": ((64, Config(16, 16, 8, 1)),),
}
TABLE: dict[tuple[int, int], dict[str, Rows]] = {
    (90, 16): {
        **CROWDED,
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
            (64, Config(32, 64, 4, 2)),
            (128, Config(32, 32, 8, 1)),
            (256, Config(16, 32, 8, 1)),
        ),
        "dkdv heavy": (
            (64, Config(32, 64, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 64, 8, 1)),
        ),
        "dq mapped": ((128, Config(128, 64, 8, 2)), (256, Config(16, 32, 8, 1))),
    },
    (80, 16): {
        **CROWDED,
        "dq crowded": ((128, Config(32, 32, 8, 1)), (256, Config(16, 32, 8, 1))),
        "threshold crowded": (
            (64, Config(32, 32, 8, 1)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1)),
        ),
        "forward": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(128, 64, 8, 2)),
            (256, Config(64, 64, 8, 1)),
        ),
        "dq": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(64, 32, 8, 1)),
        ),
        "dkdv": (
            (64, Config(64, 64, 4, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "stats": ((128, Config(128, 128, 8, 2)), (256, Config(64, 64, 8, 2))),
        "threshold": ((128, Config(128, 64, 8, 1)), (256, Config(64, 32, 8, 2))),
        "forward one": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(64, 64, 8, 1)),
        ),
        "dq mapped": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(32, 64, 8, 1)),
            (256, Config(16, 32, 8, 1)),
        ),
        "dkdv one": (
            (64, Config(64, 64, 4, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 2)),
        ),
        "forward heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1)),
        ),
        "dq heavy": (
            (64, Config(32, 64, 8, 1)),
            (128, Config(32, 32, 8, 1)),
            (256, Config(16, 32, 8, 1)),
        ),
        "dkdv heavy": (
            (64, Config(32, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 64, 8, 1)),
        ),
    },
    (100, 16): {
        **CROWDED,
        "dkdv crowded": ((128, Config(32, 32, 8, 1)), (256, Config(32, 32, 8, 2))),
        "forward": (
            (64, Config(128, 128, 8, 2)),
            (128, Config(128, 64, 8, 2)),
            (256, Config(64, 64, 8, 2)),
        ),
        "dq": ((128, Config(128, 64, 8, 2)), (256, Config(64, 32, 8, 2))),
        "dkdv": (
            (64, Config(64, 64, 4, 2)),
            (128, Config(32, 128, 8, 2)),
            (256, Config(32, 64, 8, 1)),
        ),
        "stats": ((128, Config(128, 128, 8, 2)), (256, Config(64, 64, 8, 2))),
        "threshold": ((128, Config(128, 64, 8, 1)), (256, Config(64, 32, 8, 1))),
        "forward heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 32, 4, 1)),
            (256, Config(32, 32, 8, 1)),
        ),
        "dq heavy": (
            (64, Config(32, 64, 4, 2)),
            (128, Config(64, 32, 8, 2)),
            (256, Config(16, 32, 8, 1)),
        ),
        "dkdv heavy": (
            (64, Config(64, 64, 8, 2)),
            (128, Config(32, 64, 8, 2)),
            (256, Config(32, 32, 8, 1)),
        ),
        "stats heavy": (
            (64, Config(128, 64, 8, 2)),
            (128, Config(64, 64, 8, 2)),
            (256, Config(32, 64, 8, 1)),
        ),
        "dq mapped": ((128, Config(128, 64, 8, 2)), (256, Config(16, 32, 8, 1))),
    },
    (90, 32): FP32,
    (80, 32): FP32,
    (100, 32): FP32,
}

# The interpreter: small, so that short sequences have many blocks.
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
        return (32, 32) if bits == 16 else (16, 16)
    if bits == 16:
        return (128, 64) if head_dim <= 128 else (64, 32)
    return (64, 32) if head_dim <= 64 else (16, 32)


def pick(kernel: str, arch: int, bits: int, head_dim: int, load: str) -> Config:
    """The row for this call. ``arch`` is 10 · major + minor, or 0 for the interpreter.

    ``load``: "", "mapped", "one", "heavy" or "crowded", what else takes registers; see `launch`.
    Where a kernel has no such rows its plain ones hold.
    """
    if arch == 0:
        return INTERPRETED[kernel]
    listed = arch // 10 * 10 if arch // 10 in (9, 10) else 80
    table = TABLE[listed, bits]
    for most, config in table.get(f"{kernel} {load}", table[kernel]):
        if head_dim <= most:
            return config
    raise ValueError(f"{kernel}: no configuration for a head dimension of {head_dim}")
