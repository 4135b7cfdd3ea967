"""Texts as bytes, in a training part and a test part.

"python" is the default. It needs no download: it is the .py files of the running Python's standard
library in the order of their names. Tests, files written by the build of Python, and files that
repeat others (code pages, lib2to3, distutils) are left out. A package belongs to the test text if
the SHA-256 of its name ends in a hex digit below 2, otherwise to the training text. Splitting by
package keeps the overlap small: under Python 3.11, 1.3 % of the 64-byte pieces of the test text
occur in the training text. With a split by file it would be 13.5 %. The text depends on the Python
release.

Any other text is the path of a UTF-8 file, whose last tenth is the test text, or of a folder. All
files of a folder and of its subfolders are read in the order of their names, without hidden ones.
They must be UTF-8, and are split by the SHA-256 of their paths in the folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from commandline.errors import UsageError

PYTHON = "python"
_LEFT_OUT = re.compile(
    r"(^|/)(tests?|idle_test|site-packages|dist-packages|__pycache__)/"
    r"|^(_sysconfigdata|config-|encodings/|lib2to3/|distutils/)"
)


@cache
def corpus(text: str = PYTHON) -> tuple[dict[str, np.ndarray], str]:
    """The bytes of the "train" and "test" texts, and the digest of both.

    Raises:
        UsageError: ``text`` is neither "python" nor the path of a text in UTF-8; or one of the two
            texts is empty.
    """
    parts = _python() if text == PYTHON else _of_path(text)
    digest = hashlib.sha256(parts["train"] + b"\0" + parts["test"]).hexdigest()[:16]
    return {split: np.frombuffer(part, dtype=np.uint8) for split, part in parts.items()}, digest


def text_name(text: str) -> str:
    """The last part of the path of a text, also of one such as "." or "../texts/"."""
    return os.path.basename(os.path.abspath(os.path.expanduser(text)))


def _python() -> dict[str, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    files = [
        (name.split("/")[0].removesuffix(".py"), path.read_bytes())
        for name, path in sorted(names.items())
        if not _LEFT_OUT.search(name)
    ]
    parts = _split(files)
    if min(map(len, parts.values())) < 2**18:
        raise UsageError(f"text {PYTHON!r} is Python's standard library; {root} has too few files")
    return parts


def _of_path(text: str) -> dict[str, bytes]:
    path = Path(text).expanduser()
    if not text or not path.exists():
        raise UsageError(
            f"setting text must be {PYTHON!r}, or the path of a file or folder, got {text!r}, "
            "which does not exist"
        )
    if path.is_file():
        content = _read(path)
        first = len(content) - len(content) // 10
        parts = {"train": content[:first], "test": content[first:]}
    else:
        names = {x.relative_to(path).as_posix(): x for x in path.rglob("*") if x.is_file()}
        visible = [name for name in sorted(names) if not f"/{name}".count("/.")]
        parts = _split((name, _read(names[name])) for name in visible)
    if empty := [split for split, part in parts.items() if not part]:
        raise UsageError(f"setting text {text!r} is too little text: its {empty[0]} part is empty")
    return parts


def _split(files: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """The two texts from (name, content) of each file; the name decides on the part."""
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    for name, content in files:
        held_out = int(hashlib.sha256(name.encode()).hexdigest()[-1], 16) < 2
        parts["test" if held_out else "train"].append(content)
    return {split: b"\n".join(contents) for split, contents in parts.items()}


def _read(path: Path) -> bytes:
    """The content of a file in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"setting text: cannot read {path}: {error.strerror}") from error
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"setting text: {path} is not UTF-8, byte {error.start} is 0x{content[error.start]:02x}"
        ) from error
    return content
