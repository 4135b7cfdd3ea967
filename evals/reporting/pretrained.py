"""Shows the results of `python -m evals pretrained` and `adapt`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evals.reporting.artifacts import write_group_files
from evals.reporting.console import print_group
from evals.reporting.report import write_page
from evals.reporting.shown import ShownGroup, drawn
from evals.results.rows import PRETRAINED, Row
from evals.results.summary import groups

NAME = PRETRAINED


def print_tables(rows: Sequence[Row], verbose: bool) -> None:
    """Print the main tables, or all of them."""
    for group in groups(rows):
        print_group(ShownGroup(group), verbose)


def write_report(rows: Sequence[Row], out: Path) -> Path:
    """Write report.html, summary.csv and the figures into a folder; returns the page."""
    shown = [drawn(group) for group in groups(rows)]
    write_group_files(shown, out)
    return write_page(out / "report.html", shown, "")
