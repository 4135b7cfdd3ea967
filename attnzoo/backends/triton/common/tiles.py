"""The tile of each kernel: block sizes, warps and pipeline stages.

Tiles are by kernel, bits of an element and class of head dimensions, in two tables: PLAIN, and SAFE
for calls that may need many registers; `launch.is_safe` decides. Tiles that were measured on the
GPU (see `measured`) come before those of PLAIN. Nothing is tuned at run time.

``python -m benchmarks compile`` checks all tiles, and ``python -m benchmarks tune`` tries others.
For another architecture, add its shared memory to SHARED, its number to `known`, and the tiles in
which it differs from sm_90 to OVERRIDES and LINEAR_OVERRIDES; an architecture in `known` no longer
gets the rows of 80.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple


class Config(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    part: int | None = None  # head dimensions per partial product of q kᵀ and dO vᵀ; None: all
    registers: int | None = None  # largest number per thread; None: ptxas decides
    transposed: bool = False  # rows of the tiles of dK/dV are queries, see `backward_kv`


# Largest number of registers per thread. Without a limit, ptxas may spill registers to memory so
# that more blocks run at once.
ALL = 255
full = partial(Config, registers=ALL)
transposed = partial(Config, transposed=True)

# Limit of shared memory in bytes. sm_80 also stands for consumer cards (sm_86, sm_89, sm_120), so
# their limit applies.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448}

# Classes of head dimensions, by the largest of each
LIMITS = (64, 128, 256)
# A tile per class. Classes that are left out have the tile of the next larger class.
Row = dict[int, Config]
# By kernel and bits of an element. The block sizes of "threshold" are those of the block map, see
# `map_tile`. A tf32x3 product keeps its left operand in registers twice, so tiles of fp32 are
# small, and their products are computed in parts.
SMALL, SMALLEST = full(16, 32, 8, 1, 32), full(16, 16, 8, 1, 16)
PLAIN: dict[tuple[str, int], Row] = {
    ("forward", 16): {128: Config(128, 128, 8, 2), 256: Config(128, 64, 8, 2)},
    ("dq", 16): {128: full(128, 64, 8, 2), 256: Config(128, 32, 8, 1)},
    ("dkdv", 16): {128: Config(64, 64, 4, 2), 256: transposed(128, 32, 8, 1)},
    ("dbias", 16): {128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 1)},
    ("stats", 16): {128: Config(128, 128, 8, 2), 256: Config(64, 64, 8, 2)},
    ("threshold", 16): {128: full(128, 64, 8, 1), 256: full(128, 32, 8, 1)},
    ("decode", 16): {64: full(16, 128, 8, 3), 128: Config(16, 64, 4, 3), 256: Config(16, 32, 4, 3)},
    ("forward", 32): {64: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 1, 32)},
    ("dq", 32): {128: SMALL, 256: SMALLEST},
    ("dkdv", 32): {128: Config(32, 32, 8, 1, 32), 256: SMALLEST},
    ("dbias", 32): {256: full(64, 32, 8, 1, 32)},
    ("stats", 32): {256: full(64, 32, 8, 1, 32)},
    ("threshold", 32): {64: full(64, 32, 8, 1), 256: SMALL},
    ("decode", 32): {128: Config(16, 32, 4, 2), 256: SMALLEST},
}
# Where there is no tile, that of PLAIN is used.
SAFE: dict[tuple[str, int], Row] = {
    ("forward", 16): {128: Config(64, 64, 4, 2), 256: full(64, 32, 8, 1, 64)},
    ("dq", 16): {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: full(64, 16, 8, 2, 64)},
    ("dkdv", 16): {128: Config(32, 64, 4, 2), 256: full(64, 16, 8, 2)},
    ("dbias", 16): {128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 1)},
    ("stats", 16): {256: full(64, 32, 8, 1, 64)},
    ("threshold", 16): {128: full(128, 64, 8, 1, 64), 256: full(128, 32, 8, 1, 64)},
    ("decode", 16): {128: full(64, 16, 8, 2), 256: full(64, 16, 8, 1, 32)},
    ("forward", 32): {256: SMALL},
    ("dkdv", 32): {128: SMALL},
    ("decode", 32): {128: SMALL},
}
# Rows for 16 bits in which an architecture differs from sm_90, by table and kernel. Classes above
# the last one in a row have the tile of the tables above.
OVERRIDES: dict[int, dict[tuple[str, str], Row]] = {
    80: {
        ("plain", "forward"): {128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 1)},
        ("plain", "dq"): {
            64: full(128, 64, 8, 2), 128: full(32, 64, 8, 1), 256: full(32, 32, 8, 2),
        },
        ("plain", "dkdv"): {
            64: full(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: full(64, 16, 8, 2),
        },
        ("plain", "dbias"): {128: Config(128, 32, 8, 2), 256: Config(64, 32, 8, 2, 64)},
        ("safe", "forward"): {128: full(64, 32, 8, 2)},
        ("safe", "dkdv"): {64: Config(32, 64, 4, 1), 128: Config(64, 32, 8, 2)},
        ("safe", "dq"): {64: full(32, 64, 4, 2), 128: full(16, 64, 8, 1)},
        ("safe", "dbias"): {128: Config(64, 32, 8, 2), 256: Config(64, 32, 8, 2, 64)},
    },
    100: {
        ("plain", "forward"): {
            64: full(128, 64, 8, 2), 128: full(128, 128, 8, 2), 256: Config(64, 64, 4, 2),
        },
        ("plain", "dq"): {128: full(128, 64, 8, 2), 256: Config(64, 64, 8, 1)},
        ("plain", "dkdv"): {128: full(64, 128, 8, 2), 256: Config(64, 64, 8, 1)},
        ("plain", "decode"): {64: full(16, 128, 8, 3), 128: full(16, 64, 4, 3)},
        ("safe", "dq"): {128: full(64, 32, 8, 2)},
    },
}  # fmt: skip

# For the interpreter: small blocks, so that a short sequence has several blocks
TALL, WIDE = Config(64, 32, 1, 1), Config(32, 64, 1, 1)


def known(arch: int) -> int:
    """The architecture whose tiles are used for ``arch``, which is 10 · major + minor."""
    return arch // 10 * 10 if arch // 10 in (9, 10) else 80


def limit_of(head_dim: int) -> int:
    """The largest head dimension of the class."""
    if head_dim > LIMITS[-1]:
        raise ValueError(f"head dimension must be at most {LIMITS[-1]}, got {head_dim}")
    return next(limit for limit in LIMITS if head_dim <= limit)


def tile_of_table(kernel: str, arch: int, bits: int, head_dim: int, safe: bool) -> Config:
    """The tile of the tables. ``arch``: 10 · major + minor, or 0 for the interpreter."""
    limit = limit_of(head_dim)
    if arch == 0:
        # Products in fp32 above D = 128 are computed in parts, and both forms of dK/dV are tested.
        part = 64 if bits == 32 and limit > 128 else None
        is_transposed = kernel == "dkdv" and bits == 32
        config = TALL if is_transposed or kernel in ("forward", "decode") else WIDE
        return config._replace(part=part, transposed=is_transposed)
    overrides = OVERRIDES.get(known(arch), {}) if bits == 16 else {}
    config = None
    if safe:
        row = SAFE.get((kernel, bits), {})
        config = of_class(overrides.get(("safe", kernel), {}), limit) or of_class(row, limit)
    if config is None:
        row = PLAIN[kernel, bits]
        config = of_class(overrides.get(("plain", kernel), {}), limit) or of_class(row, limit)
    assert config is not None
    return config


def of_class(row: Row, limit: int) -> Config | None:
    """The tile of the class, or of the next larger one."""
    return next((row[n] for n in LIMITS if n >= limit and n in row), None)


class MapTile(NamedTuple):
    """The numbers of queries and keys in one tile of the block map."""

    queries: int
    keys: int


def map_tile(head_dim: int, bits: int) -> MapTile:
    """Return the tile of the block map.

    The block map lists the tiles with nonzero weights of a threshold form. The tile determines the
    size of the map, so it must not depend on the device.
    """
    config = of_class(PLAIN["threshold", bits], limit_of(head_dim))
    assert config is not None
    return MapTile(config.block_m, config.block_n)


# Kernels of calls with a selection of keys, see `flash.selection`: by architecture and bits, a tile
# per class for all of them, because all have to compute the same bits of the scores. dK/dV is
# transposed, so that it computes q kᵀ too. The gradient of a table needs blocks of at most 32 keys.
SELECTION: dict[int, Row] = {
    16: {128: full(128, 32, 8, 2), 256: full(128, 32, 8, 1)},
    32: {256: SMALL},
}
SELECTION_OVERRIDES: dict[tuple[int, int], Row] = {
    (80, 16): {64: full(64, 32, 4, 2), 256: full(64, 16, 8, 1)},
    (100, 16): {128: full(64, 32, 8, 1), 256: full(64, 32, 8, 1)},
}
# Of calls with a mask or a table of biases, which the larger tile spills.
SELECTION_WITH_BIAS: dict[int, Row] = {16: {128: full(64, 32, 8, 1, 64)}}


def selection_tile(kernel: str, arch: int, bits: int, head_dim: int, biased: bool) -> Config:
    limit = limit_of(head_dim)
    of_arch = SELECTION_OVERRIDES.get((known(arch), bits), {})
    config = SELECTION_WITH_BIAS.get(bits, {}).get(limit) if biased else None
    config = config or of_arch.get(limit) or of_class(SELECTION[bits], limit)
    if arch == 0:
        config = TALL._replace(part=64 if bits == 32 and limit > 128 else None)
    assert config is not None
    if kernel != "dkdv":
        return config
    # Two stages need too many registers on sm_80, and too much shared memory on sm_100.
    stages = config.stages if known(arch) == 90 else 1
    return config._replace(stages=stages, transposed=True)


# Kernels of linear forms, by bits of a feature. block_m: tokens per chunk, equal for all kernels of
# a call. block_n: features per block. The longer the chunks, the fewer states are written and read,
# which is most of the memory traffic. Chunks of fp32 are shorter: the weights of a longer chunk do
# not fit in registers.
LINEAR_KERNELS = ("states", "states back", "output", "dx", "dy", "dv")
LINEAR = {16: full(128, 64, 8, 2), 32: full(32, 16, 8, 1)}
LINEAR_OVERRIDES = {(80, 16): full(128, 16, 8, 2)}  # by architecture too
# Largest number of columns of values per pass. Each pass recomputes the denominators.
LINEAR_WIDEST = {16: 128, 32: 64}


def linear_tile(arch: int, bits: int) -> Config:
    if arch == 0:
        return WIDE._replace(block_n=16)
    return LINEAR_OVERRIDES.get((known(arch), bits), LINEAR[bits])


# Kernels of `Shares`, by kernel and bits, with a tile per class for all calls. "dq" and "dkdv" have
# the same block_n: sums that one stores for each block of keys are read by the other.
SHARES: dict[tuple[str, int], Row] = {
    ("forward", 16): {128: full(128, 64, 8, 2), 256: full(64, 64, 8, 1)},
    ("dq", 16): {128: full(128, 32, 8, 2), 256: full(64, 32, 8, 1, 64)},
    ("dkdv", 16): {128: full(128, 32, 8, 1), 256: full(64, 32, 8, 1, 16)},
    ("forward", 32): {256: SMALL},
    ("dq", 32): {256: SMALL},
    ("dkdv", 32): {256: SMALL},
}
# By architecture too, for the class alone
SHARES_OVERRIDES: dict[tuple[int, str, int], Row] = {
    (80, "forward", 16): {128: full(64, 64, 8, 2)},
    (80, "dq", 16): {128: full(64, 32, 8, 2)},
    (80, "dkdv", 16): {256: full(32, 32, 8, 1)},
}


def shares_tile(kernel: str, arch: int, bits: int, head_dim: int) -> Config:
    limit = limit_of(head_dim)
    if arch == 0:
        part = 64 if bits == 32 and limit > 128 else None
        return (TALL if kernel == "dq" else Config(32, 32, 1, 1))._replace(part=part)
    override = SHARES_OVERRIDES.get((known(arch), kernel, bits), {}).get(limit)
    config = override or of_class(SHARES[kernel, bits], limit)
    assert config is not None
    return config
