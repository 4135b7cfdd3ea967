"""Writes one report of all results, and each task's summary.csv and figures; prints the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commandline.files import write_whole
from evals.reporting.console import print_group
from evals.reporting.report import write_page
from evals.reporting.shown import ShownGroup, drawn
from evals.reporting.stored import stored
from evals.results.rows import Row
from evals.results.store import read_rows
from evals.results.summary import groups
from evals.results.summary_csv import csv_text


def write_results(rows: Sequence[Row], out: Path, note: str, verbose: bool = False) -> None:
    """Write all files and print the tables.

    The report goes into ``out``, or into the folder of the task if there is only one. ``note`` is
    printed and shown at the top of the report.
    """
    shown = [drawn(group) for group in groups(rows)]
    names = list(dict.fromkeys(one.group.task.name for one in shown))
    for name in names:
        of_task = [one for one in shown if one.group.task.name == name]
        write_group_files(of_task, out / name)
        for one in of_task:
            print_group(one, verbose)
        if verbose:
            print(f"\nrows, models, summary.csv and figures: {out / name}")
    if names:
        page = (out / names[0] if len(names) == 1 else out) / "report.html"
        print(f"\n{note}\nReport: {write_page(page, shown, note, stored([out]))}")


def write_group_files(shown: Sequence[ShownGroup], folder: Path) -> None:
    """Write summary.csv and the figures of the groups of one task."""
    write_whole(folder / "summary.csv", csv_text([one.group for one in shown]))
    for number, one in enumerate(shown, 1):
        suffix = f"-{number}" if number > 1 else ""
        for picture in one.pictures:
            write_whole(folder / f"{picture.name}{suffix}.png", picture.data)


def main(folders: Sequence[Path], out: Path | None) -> int:
    """Write a report of the results in these folders to ``out`` (default: in the first folder)."""
    shown = [drawn(group) for group in groups(read_rows(folders))]
    note = f"results of {', '.join(map(str, folders))}"
    page = out or folders[0] / "report.html"
    print(f"Report: {write_page(page, shown, note, stored(folders))}")
    return 0
