"""Reads code, commands and links from README.md, the pages in docs/ and the notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from scripts.tables import ROOT, pages

README = ROOT / "README.md"
PAGES = [*pages(), *sorted((ROOT / "docs").glob("notebooks/*.ipynb"))]
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m ([\w.]+)((?:[ \t]+[^\s`|;&>#]+)*)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """The text of a page, or of the Markdown cells of a notebook."""
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@dataclass(frozen=True)
class Block:
    """A ``python`` block; `line` is the number of lines before it on the page."""

    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file name in the first line, ``# name.py``, if there is one."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named and named[1]


def python_blocks(text: str) -> list[Block]:
    return [
        Block(dedent(m[3]), text[: m.start(3)].count("\n"))
        for m in FENCE.finditer(text)
        if m[2] in ("python", "py")
    ]


def outputs(text: str) -> list[str]:
    """The ``text`` blocks of a page. They show the output of its code."""
    return [dedent(m[3]) for m in FENCE.finditer(text) if m[2] == "text"]


def prose(text: str) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", text)


def links(text: str) -> Iterator[str]:
    """Targets of links and images, except web addresses."""
    for target in re.findall(r"\]\(<?([^)>\s]+)", prose(text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@dataclass(frozen=True)
class Command:
    """A command ``python -m module words… options…`` on a page."""

    module: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    plugin: str | None


def commands(text: str) -> set[Command]:
    listed = set()
    for module, words in COMMAND.findall(text.replace("\\\n", " ")):
        parts = [part.rstrip(".,:)") for part in words.split()]
        first = parts[:1] if re.fullmatch(r"[a-z][a-z-]*", "".join(parts[:1])) else []
        options = {p.split("=")[0] for p in parts if re.match(r"--[a-z]", p)}
        plugin = re.search(r"--plugin[ =](\w+\.py)", words)
        file = plugin and plugin[1]
        listed.add(Command(module.rstrip("."), tuple(first), tuple(sorted(options)), file))
    return listed


def bare_options(text: str) -> set[str]:
    """Options in code spans without a command, such as `--seeds 5`."""
    return set(re.findall(r"`(--[a-z][\w-]*)", prose(text)))


def make_targets(text: str) -> set[str]:
    """The targets of ``make target`` in code spans and at the start of lines in code blocks."""
    return set(re.findall(r"(?:^|`)make +([a-z][\w-]*)", text, re.MULTILINE))


def make_variables(text: str) -> set[str]:
    lines = re.findall(r"(?:^|`)make +[a-z][^`\n#]*", text, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"\b([A-Z]+)=", line)}
