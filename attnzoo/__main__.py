"""Print the versions, the devices, the backend that runs each variant, and where the docs are.

Paste the output into a report of an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

import attnzoo
from attnzoo.backends.triton.common import measured

DOCS = Path(attnzoo.__file__).parent.parent / "docs"
PACKAGES = ("transformers", "peft", "numpy")
# The backends are those of a causal call of this shape (B, H, N, D).
SHAPE = (1, 8, 1024, 64)


def main(args: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m attnzoo", description=__doc__).parse_args(args)
    print(f"attnzoo {attnzoo.__version__}, torch {torch.__version__}, {', '.join(packages())}")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    try:
        for line in devices():
            print(line)
    except ValueError as error:  # a file of measured tiles is wrong
        sys.exit(f"error: {error}")
    # The package without a clone of the repository has no docs.
    print(f"docs: {DOCS if DOCS.is_dir() else 'in the folder docs of the repository'}")


def packages() -> Iterator[str]:
    # Triton's package has several names.
    yield f"triton {measured.triton_version()}" if has_triton() else "no triton"
    for name in PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"no {name}"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def devices() -> Iterator[str]:
    """The lines about the GPUs, or about the CPU if there is no GPU.

    Raises:
        ValueError: a file of measured tiles is wrong.
    """
    if not torch.cuda.is_available():
        capability = torch.backends.cpu.get_cpu_capability()
        yield f"cpu: {capability}, number of threads: {torch.get_num_threads()}"
        yield from backends("cpu", torch.float32)
        yield f"measured tiles: {measured.user_folder()}, read only with a GPU and Triton"
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield f"cuda: {', '.join(names)}"
    yield from backends("cuda", torch.bfloat16)
    for name in dict.fromkeys(names if has_triton() else ()):
        files, tiles = measured.read(name)
        origin = " and ".join(map(str, files)) or f"no file {measured.user_file(name)}"
        yield f"measured tiles of {name}: {len(tiles)}, from {origin}"


def backends(device: str, dtype: torch.dtype) -> Iterator[str]:
    """For each backend, the variants that it runs in training."""
    q, k, v = (torch.empty(SHAPE, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    variants: dict[str, list[str]] = {}
    for name in attnzoo.list_variants():
        example = attnzoo.get_variant(name).example
        params = {} if example is None else example(SHAPE[2])
        plan = attnzoo.explain(q, k, v, name, is_causal=True, **params)
        variants.setdefault(plan.chosen or "none", []).append(name)
    sizes = ", ".join(f"{letter} = {size}" for letter, size in zip("BHND", SHAPE))
    yield f"backends of a causal call with gradients, {sizes}, {str(dtype).split('.')[1]}:"
    for backend, names in sorted(variants.items()):
        yield f"  {backend}: {', '.join(names)}"


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, closed it
        # Python flushes the output again when it exits, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
