"""Prints the tables of results at the end of a study, and with --verbose all of them."""

from __future__ import annotations

import math
import shutil
import sys

from evals.reporting.shown import ShownGroup
from evals.reporting.tables import EFFECTIVE, EFFECTIVE_NOTE, score_table
from evals.results.summary import failures, version_warnings

FEW = 5  # without --verbose, at most this many failures are listed


def print_group(shown: ShownGroup, verbose: bool) -> None:
    """Print the main tables of a group, or with ``verbose`` all tables and all failures."""
    group = shown.group
    tables = [*shown.tables, *shown.theory_tables]
    if shown.is_task:
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        if max(map(len, tables[0].text().splitlines()[2:])) > room:
            tables[0] = score_table(shown.summary, errors=False)
    else:
        print(f"\n{group.title}")
    for table in tables if verbose else tables[: shown.printed]:
        print(f"\n{table.text()}")
        if EFFECTIVE in table.header:
            print(f"{EFFECTIVE}: {EFFECTIVE_NOTE}")
    if verbose and shown.is_task:
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
    if not (verbose or shown.is_task) and len(tables) > shown.printed:
        print(f"The report and --verbose show {len(tables) - shown.printed} more tables.")
