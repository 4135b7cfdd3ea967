"""Tables for the console, in Markdown and in CSV files."""

from __future__ import annotations

import csv
import io
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
    sides = ("<" if i in left else ">" for i in range(len(cells)))
    parts = (f"{x:{side}{n}}" for x, side, n in zip(cells, sides, widths, strict=True))
    return "  ".join(parts).rstrip()


def markdown(rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """A table in Markdown. The first row is the header. With ``right``, all columns but the first
    are right-aligned."""
    head, *body = rows
    rulers = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, rulers, *body))
    return "".join(f"| {line} |\n" for line in lines)


def tables_csv(tables: Sequence[Table]) -> str:
    """Tables as CSV, one below the other: a line with the title, the header, the rows, and a line
    with the note."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for table in tables:
        note = " ".join(table.note.split())
        writer.writerows([[table.title], table.header, *table.rows, [note]])
    return file.getvalue()


def read_tables(text: str) -> list[Table]:
    """The tables in the text that `tables_csv` returned. A line break in a note is read as a space.

    Raises:
        ValueError: the text is not of this form.
    """
    tables: list[Table] = []
    lines: list[list[str]] = []
    for line in csv.reader(io.StringIO(text)):
        lines.append(line)
        if len(line) == 1 and len(lines) > 1:  # the note ends a table
            title, *inner, note = lines
            widths = {len(row) for row in inner}
            if len(title) != 1 or len(widths) != 1 or min(widths) < 2:
                raise ValueError(f"the table {title} must have a title, a header and rows as long")
            tables.append(Table(title[0], inner[0], inner[1:], note[0]))
            lines = []
    if lines:
        raise ValueError(f"the table {lines[0][:1]} has no note after its rows")
    return tables
