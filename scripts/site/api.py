"""Puts tables of names into the API pages, and each name of a long page on a page of its own.

The pages in ``docs/api`` list their names with the directives of autodoc. A short page gets a table
of its names on top. A page of `SPLIT` has a table in place of the directives of each section, and
each directive is on a page in ``docs/api/names``, which is written before Sphinx reads the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from types import UnionType
from typing import Any, NamedTuple

from commandline.table import markdown
from scripts import variant_facts as facts

FOLDER = "api"
NAMES = "names"
# Pages that would be higher than 10,000 pixels
SPLIT = {"attention", "evals", "losses", "nn", "variants"}
BLOCK = re.compile(r"^```\{eval-rst\}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"^\.\. (?:current)?module:: (\S+)\n", re.MULTILINE)
ENTRY = re.compile(r"^\.\. (auto\w+|data):: (\S+)\n((?:[ \t]+.*\n|\n(?=[ \t]))*)", re.MULTILINE)


class Entry(NamedTuple):
    """One directive: of a function, a class, a module or data."""

    directive: str
    module: str
    name: str
    content: str

    @property
    def full_name(self) -> str:
        return self.name if self.directive == "automodule" else f"{self.module}.{self.name}"

    @property
    def page(self) -> str:
        """The text of its page, in reST."""
        title = f"{self.full_name}\n{'=' * len(self.full_name)}\n"
        body = f".. {self.directive}:: {self.name}\n{self.content}"
        return f"{title}\n.. currentmodule:: {self.module}\n\n{body}"

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, or of the text of data, in Markdown."""
        described = locate(self.full_name)
        if isinstance(described, UnionType):
            return " or ".join(f"`{kind.__name__}`" for kind in described.__args__) + "."
        text = self.content if self.directive == "data" else inspect.getdoc(described) or ""
        paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
        sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0]
        # What follows a colon is a detail, unless only a name stands before it.
        start, _, _ = sentence.partition(": ")
        shown = start if " " in start else sentence
        return facts.prose(shown.rstrip(".:") + ".")


def entries(block: str, module: str) -> list[Entry]:
    return [Entry(m[1], module, m[2], m[3]) for m in ENTRY.finditer(block)]


def blocks(text: str) -> Iterator[tuple[re.Match[str], str, list[Entry]]]:
    """The blocks of directives of a page, each with its module and its entries."""
    module = ""
    for block in BLOCK.finditer(text):
        if named := MODULE.search(block[1]):
            module = named[1]
        yield block, module, entries(block[1], module)


def table(listed: list[Entry]) -> str:
    rows = [("name", "summary")]
    for entry in listed:
        role = "{py:mod}`" if entry.directive == "automodule" else "{py:obj}`~"
        rows.append((f"{role}{entry.full_name}`", entry.summary))
    return markdown(rows) + "\n"


def summarized(text: str) -> str:
    """A short page with a table of its names before the first directive."""
    listed = [entry for _, _, names in blocks(text) for entry in names]
    if not listed:
        return text
    start = min(i for mark in ("\n## ", "\n```{eval-rst}\n") if (i := text.find(mark)) > 0)
    return f"{text[:start]}\n{table(listed)}{text[start:]}"


def split(text: str) -> str:
    """A long page with a table in place of each block of directives."""
    listed: list[str] = []

    def replaced(block: re.Match[str]) -> str:
        (names,) = (x for match, _, x in blocks(text) if match.start() == block.start())
        listed.extend(f"{NAMES}/{entry.full_name}" for entry in names)
        declared = "".join(m[0] for m in MODULE.finditer(block[1]) if m[0].startswith(".. module"))
        return f"```{{eval-rst}}\n{declared}```\n\n" * bool(declared) + table(names)

    pages = BLOCK.sub(replaced, text)
    return f"{pages}\n```{{toctree}}\n:hidden:\n\n" + "\n".join(listed) + "\n```\n"


def write(folder: Path) -> None:
    """Write the pages of the names, and remove those of names that no longer exist."""
    files = {}
    for stem in SPLIT:
        for _, _, names in blocks((folder / f"{stem}.md").read_text()):
            files |= {f"{entry.full_name}.rst": entry.page for entry in names}
    target = folder / NAMES
    target.mkdir(exist_ok=True)
    for path in target.glob("*.rst"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        path = target / name
        # Unchanged pages are not written, so that Sphinx does not read them again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def on_read(app: Any, docname: str, source: list[str]) -> None:
    folder, _, stem = docname.rpartition("/")
    if folder != FOLDER:
        return
    for _, _, names in blocks(source[0]):
        for entry in names:  # the table changes with the docstring
            module = inspect.getmodule(locate(entry.full_name))
            app.env.note_dependency(inspect.getfile(module or type(app)))
    source[0] = split(source[0]) if stem in SPLIT else summarized(source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / FOLDER))
    app.connect("source-read", on_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
