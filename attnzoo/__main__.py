"""Print the versions of attnzoo, torch and Triton, and the files of measured tiles."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

import torch

import attnzoo
from attnzoo.backends.triton.common import measured


def main(args: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m attnzoo", description=__doc__).parse_args(args)
    triton = importlib.util.find_spec("triton")
    version = "no Triton" if triton is None else f"Triton {measured.triton_version()}"
    print(f"attnzoo {attnzoo.__version__}, torch {torch.__version__}, {version}")
    if triton is None or not torch.cuda.is_available():
        print(f"measured tiles: {measured.user_folder()}, not read without a GPU and Triton")
        return
    for device in dict.fromkeys(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))):
        try:
            files, tiles = measured.read(device)
        except ValueError as error:
            sys.exit(f"error: {error}")
        names = " and ".join(map(str, files)) or f"no file {measured.user_file(device)}"
        print(f"measured tiles of {device}: {len(tiles)}, from {names}")


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
