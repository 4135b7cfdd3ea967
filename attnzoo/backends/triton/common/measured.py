"""Tiles that were measured on the GPU, as ``python -m benchmarks tune --device cuda`` writes them.

A file holds the tiles for one name of a GPU and one version of Triton. There may be one in the
user's cache folder, $XDG_CACHE_HOME/attnzoo or ~/.cache/attnzoo, whose tiles come first, and one in
the folder SHIPPED. They are read once per process, when a kernel first needs a tile.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attnzoo.backends.triton.common import tiles as tables
from attnzoo.backends.triton.common.tiles import Config

SHIPPED = Path(__file__).parent / "measured"
# (kernel, bits of an element, largest head dimension of the class) -> tile of plain calls
Tiles = dict[tuple[str, int, int], Config]


def tile_of_kernel(
    kernel: str, arch: int, bits: int, head_dim: int, safe: bool, device: torch.device
) -> Config:
    """The tile of a kernel: measured, or of the tables."""
    if arch and device.type == "cuda" and not safe:
        tiles = read(torch.cuda.get_device_name(device))[1]
        if (tile := tiles.get((kernel, bits, tables.limit_of(head_dim)))) is not None:
            return tile
    return tables.tile_of_table(kernel, arch, bits, head_dim, safe)


def triton_version() -> str:
    import triton

    return triton.__version__


def user_folder() -> Path:
    # `Path.home` raises for a user without a home folder, and `expanduser` does not.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "attnzoo"


def user_file(device: str) -> Path:
    return user_folder() / file_name(device)


def file_name(device: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{slug}.triton-{triton_version()}.json"


@cache
def read(device: str) -> tuple[list[Path], Tiles]:
    """The files with tiles of a GPU, and their tiles. The user's tiles replace the shipped ones.

    Raises:
        ValueError: a file is malformed.
    """
    files, tiles = [], {}
    for file in (SHIPPED / file_name(device), user_file(device)):
        if (of_file := parsed(file, device)) is not None:
            files.append(file)
            tiles |= of_file
    return files, tiles


def parsed(file: Path, device: str) -> Tiles | None:
    """The tiles in a file; None if it cannot be read, or is for another GPU or another Triton."""
    try:
        text = file.read_bytes()
    except OSError:  # most users have no file, and some have no folder that they may read
        return None
    try:
        document = json.loads(text)
        if (document["device"], document["triton"]) != (device, triton_version()):
            return None
        return dict(_entry(**row) for row in document["tiles"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} must hold tiles as `python -m benchmarks tune --device cuda` writes them, got "
            f"{type(error).__name__}: {error}. Write it again or delete it"
        ) from error


def _entry(
    kernel: str, bits: int, head_dim: int, **tile: Any
) -> tuple[tuple[str, int, int], Config]:
    config = Config(**tile)
    blocks = config.block_m, config.block_n, config.part or 16
    numbers = (*blocks, config.warps, config.stages)
    # The keys of a decode call are split in units of 128.
    largest = 128 if kernel == "decode" else 256
    valid = (
        (kernel, bits) in tables.PLAIN and head_dim in tables.LIMITS
        and all(type(n) is int for n in numbers) and config.block_n <= largest
        and all(n in (16, 32, 64, 128, 256) for n in blocks) and config.warps in (1, 2, 4, 8, 16)
        and config.stages in range(1, 9) and config.registers in (None, tables.ALL)
        and isinstance(config.transposed, bool)
    )  # fmt: skip
    if not valid:
        raise ValueError(f"a tile of {kernel!r}, {bits} bits, head dimension {head_dim}: {tile}")
    return (kernel, bits, head_dim), config


def write(file: Path, device: str, tiles: Tiles) -> None:
    rows = [
        {"kernel": kernel, "bits": bits, "head_dim": limit, **config._asdict()}
        for (kernel, bits, limit), config in sorted(tiles.items())
    ]
    document = {"device": device, "triton": triton_version(), "tiles": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as out:
        out.write(json.dumps(document, indent=1) + "\n")
    Path(out.name).replace(file)
