"""Prints the tables of results, and writes one report of all results and each task's summary.csv
and figures. The command ``report`` writes one of several folders."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commandline.arguments import add_plugin
from commandline.files import write_whole
from evals.reporting.report import stored, write_page
from evals.reporting.shown import ShownGroup, drawn
from evals.reporting.tables import EFFECTIVE, EFFECTIVE_NOTE, score_table
from evals.results.rows import Row
from evals.results.store import read_rows
from evals.results.summary import failures, groups, version_warnings
from evals.results.summary_csv import csv_text

NAME = "report"
FEW = 5  # without --verbose, at most this many failures are listed


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
        print(f"\n{note}")
        if len(names) == 1 and shown[0].pictures:
            print(f"Figure: {out / names[0] / shown[0].pictures[0].name}.png")
        print(f"Report: {write_page(page, shown, note, stored([out]))}")


def scores_so_far(rows: Sequence[Row]) -> str:
    """The tables of scores of tasks; "" if the rows have none."""
    summaries = [ShownGroup(group).summary for group in groups(rows) if group.is_task]
    return "\n\n".join(score_table(summary, errors=False).text() for summary in summaries)


def write_pretrained(
    rows: Sequence[Row], others: Sequence[Row], out: Path, verbose: bool = False
) -> None:
    """Print the tables of rows of pretrained models, and write the report, summary.csv and figures
    of these and other rows."""
    for group in groups(rows):
        print_group(ShownGroup(group), verbose)
    shown = [drawn(group) for group in groups([*others, *rows])]
    write_group_files(shown, out)
    print(f"\nReport: {write_page(out / 'report.html', shown, '')}")


def write_group_files(shown: Sequence[ShownGroup], folder: Path) -> None:
    """Write summary.csv and the figures of the groups of one task."""
    write_whole(folder / "summary.csv", csv_text([one.group for one in shown]))
    for number, one in enumerate(shown, 1):
        suffix = f"-{number}" if number > 1 else ""
        for picture in one.pictures:
            write_whole(folder / f"{picture.name}{suffix}.png", picture.data)


def add_parser(commands: Any) -> None:
    text = "Write one HTML report of several results folders"
    parser = commands.add_parser(NAME, help=text, description=f"{text}.")
    text = "Read results from DIR"
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help=text)
    text = "Write the report to FILE (default: report.html in the first DIR)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_plugin(parser, " or tasks")


def main(args: argparse.Namespace) -> int:
    """Write a report of the results in some folders."""
    folders = args.folders
    shown = [drawn(group) for group in groups(read_rows(folders))]
    note = f"results of {', '.join(map(str, folders))}"
    page = args.out or folders[0] / "report.html"
    print(f"Report: {write_page(page, shown, note, stored(folders))}")
    return 0


def print_group(shown: ShownGroup, verbose: bool) -> None:
    """Print the main tables of a group, or with ``verbose`` all tables and all failures."""
    group = shown.group
    tables = [*shown.tables, *shown.theory_tables]
    if group.is_task:
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        if max(map(len, tables[0].text().splitlines()[2:])) > room:
            tables[0] = score_table(shown.summary, errors=False)
    else:
        print(f"\n{group.title}")
    for table in tables if verbose else tables[: shown.printed]:
        print(f"\n{table.text()}")
        if EFFECTIVE in table.header:
            print(f"{EFFECTIVE}: {EFFECTIVE_NOTE}")
    if verbose and group.is_task:
        print(f"\nschedule: {shown.summary.schedule}")
    for line in shown.notes:
        print(line)
    failed = failures(group)
    for line in failed if verbose else failed[:FEW]:
        print(line)
    if len(failed) > FEW and not verbose:
        print(f"failed: {len(failed) - FEW} more; --verbose lists all")
    for line in version_warnings([group]):
        print(line)
    if not (verbose or group.is_task) and len(tables) > shown.printed:
        print(f"The report and --verbose show {len(tables) - shown.printed} more tables.")
