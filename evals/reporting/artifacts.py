"""Writes one report of all tasks, and each task's summary.csv and figures; prints the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commandline.files import write_whole
from evals.reporting.console import print_group
from evals.reporting.pictures import pictures
from evals.reporting.pretrained import sections
from evals.reporting.report import ShownGroup, report_html
from evals.reporting.stored import stored
from evals.reporting.trials import write_trials
from evals.results.rows import Row, is_pretrained, is_trial
from evals.results.store import read_rows
from evals.results.summary import Group, groups
from evals.results.summary_csv import csv_text
from evals.results.trials import of_tasks
from evals.theory import trained_heads as theory


def write_results(rows: Sequence[Row], out: Path, note: str, verbose: bool = False) -> None:
    """Write all files and print the tables.

    The report goes into ``out``, or into the folder of the task if there is only one. ``note`` is
    printed and shown at the top of the report.
    """
    if trials := [row for row in rows if is_trial(row)]:
        write_trials(trials, out, note, verbose)
    rows = [row for row in rows if not is_trial(row)]
    if not rows:
        return
    shown = [_drawn(group) for group in groups(rows)]
    names = list(dict.fromkeys(x.group.task.name for x in shown))
    for name in names:
        of_task = [x for x in shown if x.group.task.name == name]
        write_whole(out / name / "summary.csv", csv_text([x.group for x in of_task]))
        for number, shown_group in enumerate(of_task, 1):
            suffix = f"-{number}" if number > 1 else ""
            for picture in shown_group.pictures:
                write_whole(out / name / f"{picture.name}{suffix}.png", picture.data)
            print_group(shown_group.group, shown_group.heads, verbose)
        if verbose:
            print(f"\nrows, models, summary.csv and figures: {out / name}")
    page = (out / names[0] if len(names) == 1 else out) / "report.html"
    write_whole(page, report_html(shown, note, stored([out])))
    print(f"\n{note}\nReport: {page}")


def main(folders: Sequence[Path], out: Path | None) -> int:
    """Write a report of the results in these folders to ``out`` (default: in the first folder)."""
    rows = read_rows(folders)
    pretrained = sections([row for row in rows if is_pretrained(row)])
    tasks = [row for row in rows if not is_pretrained(row)]
    theory_results = stored(folders)
    # Without any results, the page would be empty.
    required = not pretrained and not theory_results
    task_groups = groups(of_tasks(tasks, "report", required=required))
    page = out or folders[0] / "report.html"
    note = f"results of {', '.join(map(str, folders))}"
    shown = [_drawn(group) for group in task_groups]
    write_whole(page, report_html(shown, note, theory_results, pretrained))
    print(f"Report: {page}")
    return 0


def _drawn(group: Group) -> ShownGroup:
    heads = theory.fitted(group)
    return ShownGroup(group, heads, pictures(group, heads))
