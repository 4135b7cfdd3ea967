"""How the commands ``laws``, ``ranks`` and ``in-context`` show their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from commandline.files import write_whole
from commandline.table import Table, tables_csv


def show(
    name: str,
    tables: Sequence[Table],
    out: Path | None,
    *,
    note: str = "",
    csv: str | None = None,
    png: Callable[[], bytes] | None = None,
) -> None:
    """Print the tables and the note; with ``out``, write NAME.csv and NAME.png there.

    csv: the text of the CSV file; None writes the tables, which a report reads back.
    png: returns the picture; None writes none.
    """
    for table in tables:
        print(f"{table.text()}\n")
    if note:
        print(note)
    if out is not None:
        files = {f"{name}.csv": tables_csv(tables) if csv is None else csv}
        data = files | ({f"{name}.png": png()} if png else {})
        for file, content in data.items():
            write_whole(out / file, content)
        print(f"written: {out}/{', '.join(data)}")
