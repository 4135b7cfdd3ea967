"""The files and functions that a call of `attention` reaches, as a tree.

It is printed by a process of its own, because the caches of another one may know the call.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import attnzoo

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "attnzoo"
WIDTH = 100


@cache
def call_path() -> str:
    """A Markdown block with the tree of a small causal call of `ssmax` on a CPU."""
    command = [sys.executable, "-m", "scripts.call_path"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```text\n{done.stdout}```\n"


class Trace:
    """A profiler that records which file calls which functions of other files."""

    def __init__(self) -> None:
        self.depth: dict[Path, int] = {}  # by file, in the order of the first calls
        self.functions: dict[Path, list[str]] = {}  # those that other files call
        self.stack: list[tuple[FrameType, Path]] = []
        self.imported: FrameType | None = None  # a module that is imported during the call

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return":
            if self.stack and self.stack[-1][0] is frame:
                self.stack.pop()
            if self.imported is frame:
                self.imported = None
        elif event == "call" and self.imported is None:
            path = Path(frame.f_code.co_filename)
            if frame.f_code.co_name == "<module>":
                self.imported = frame
            elif path.is_relative_to(PACKAGE):
                caller = self.stack[-1][1] if self.stack else None
                self.stack.append((frame, path))
                if path != caller:
                    self.add(path, caller, frame.f_code.co_qualname)

    def add(self, path: Path, caller: Path | None, name: str) -> None:
        self.depth.setdefault(path, 0 if caller is None else self.depth[caller] + 1)
        names = self.functions.setdefault(path, [])
        name = name.partition(".__")[0]  # a class for its __init__
        if name not in names:
            names.append(name)

    def tree(self) -> str:
        """A line per file, indented by the depth of its first call, with its functions."""
        shown = {p: "  " * n + p.relative_to(PACKAGE).as_posix() for p, n in self.depth.items()}
        margin = max(map(len, shown.values())) + 2
        return "\n".join(
            textwrap.fill(
                ", ".join(self.functions[path]), WIDTH, initial_indent=f"{start:{margin}}",
                subsequent_indent=" " * margin, break_long_words=False,
            )
            for path, start in shown.items()
        )  # fmt: skip


def main() -> None:
    q, k, v = torch.zeros(3, 1, 2, 5, 4).unbind()
    trace = Trace()
    sys.setprofile(trace)
    try:
        attnzoo.attention(q, k, v, "ssmax", is_causal=True)
    finally:
        sys.setprofile(None)
    print(trace.tree())


if __name__ == "__main__":
    main()
