"""A table for the console."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right-aligned.

    ``note`` says how to read them.
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
        for line in lines:
            first = line[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            out.append("  ".join([first, *rest]).rstrip())
        return "\n".join(out)
