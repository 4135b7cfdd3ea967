"""The files and functions that a call of `attention` reaches, as a tree.

It is printed by a process of its own, because the caches of another one may know the call.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import attnzoo

PACKAGE = Path(attnzoo.__file__).parent
WIDTH = 100


@cache
def call_path() -> str:
    """A Markdown block with the tree of a small causal call of `ssmax` on a CPU."""
    command = [sys.executable, "-m", "scripts.call_path"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return f"```text\n{done.stdout}```\n"


def callers(frame: FrameType) -> Iterator[FrameType]:
    while (back := frame.f_back) is not None and back.f_globals["__name__"] != "__main__":
        yield (frame := back)


def main() -> None:
    depth: dict[Path, int] = {}  # by file, in the order of the first calls
    functions: dict[Path, list[str]] = {}  # those that other files call

    def record(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE):
            return
        if any(one.f_code.co_name == "<module>" for one in (frame, *callers(frame))):
            return  # a module is imported during the call
        files = (Path(one.f_code.co_filename) for one in callers(frame))
        caller = next((file for file in files if file.is_relative_to(PACKAGE)), None)
        if path != caller:
            depth.setdefault(path, 0 if caller is None else depth[caller] + 1)
            name = frame.f_code.co_qualname.partition(".__")[0]  # a class for its __init__
            if name not in functions.setdefault(path, []):
                functions[path].append(name)

    q, k, v = torch.zeros(3, 1, 2, 5, 4).unbind()
    sys.setprofile(record)
    try:
        attnzoo.attention(q, k, v, "ssmax", is_causal=True)
    finally:
        sys.setprofile(None)
    starts = ["  " * n + path.relative_to(PACKAGE).as_posix() for path, n in depth.items()]
    margin = max(map(len, starts)) + 2
    for start, names in zip(starts, functions.values()):
        print(
            textwrap.fill(
                ", ".join(names), WIDTH, initial_indent=f"{start:{margin}}",
                subsequent_indent=" " * margin, break_long_words=False,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
