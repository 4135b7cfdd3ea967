"""Results of the commands `ranks` and `in-context` in a results folder, for the report.

Each command writes its tables to a CSV file and may write a figure beside it. The report shows
them below the other results if they are in a folder that it reads.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from commandline.errors import UsageError
from commandline.table import read_tables
from evals.reporting.pictures import Picture
from evals.reporting.report import Block, Section
from evals.theory import in_context, ranks

COMMANDS = {"ranks": ranks.ABOUT, in_context.NAME: in_context.ABOUT}


def stored(folders: Sequence[Path]) -> list[Section]:
    """The results of the commands in these folders, in the order of `COMMANDS`.

    Raises:
        UsageError: a file with the name of a command's tables has other contents.
    """
    return [
        _read(folder, name, number, many=len(folders) > 1)
        for name in COMMANDS
        for number, folder in enumerate(folders, 1)
        if (folder / f"{name}.csv").is_file()
    ]


def _read(folder: Path, name: str, number: int, many: bool) -> Section:
    file, image = folder / f"{name}.csv", folder / f"{name}.png"
    try:
        tables = read_tables(file.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise UsageError(
            f"{file}: {error}; write it again with python -m evals {name} --out {folder}"
        ) from error
    title = f"Figure of {name}"
    pictures = [Picture(name, title, "theory", image.read_bytes())] if image.is_file() else []
    heading, ident = (f"{name} · {folder}", f"{name}-{number}") if many else (name, name)
    return Section(ident, heading, COMMANDS[name], "Theory", [Block("", "", tables, pictures)])
