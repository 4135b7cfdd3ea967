"""Tables for the console and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table with strings as cells. The first column is left-aligned, the others right-aligned.

    ``note`` is a sentence that explains the table.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def text(self) -> str:
        """The table as aligned lines."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        out = [self.title, *([self.note] if self.note else [])]
        return "\n".join([*out, *(aligned(line, widths) for line in lines)])


def aligned(cells: Sequence[str], widths: Sequence[int], left: Collection[int] = (0,)) -> str:
    """One line of a table. Columns whose index is in ``left`` are left-aligned, others right."""
    parts = [
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()


def markdown(rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """A table in Markdown. The first row is the header. With ``right``, all columns but the first
    are right-aligned."""
    head, *body = rows
    rulers = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, rulers, *body))
    return "".join(f"| {line} |\n" for line in lines)
