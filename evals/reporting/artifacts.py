"""Writes one report of all tasks, and each task's summary.csv and figures; prints the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commandline.files import write_whole
from evals.reporting.console import print_group
from evals.reporting.pictures import pictures
from evals.reporting.pretrained import sections
from evals.reporting.report import Shown, report_html
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
    names = list(dict.fromkeys(one.group.task.name for one in shown))
    for name in names:
        mine = [one for one in shown if one.group.task.name == name]
        write_whole(out / name / "summary.csv", csv_text([one.group for one in mine]))
        for number, one in enumerate(mine, 1):
            end = f"-{number}" if number > 1 else ""
            for picture in one.pictures:
                write_whole(out / name / f"{picture.name}{end}.png", picture.data)
            print_group(one.group, one.heads, verbose)
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
    others = bool(pretrained or theory_results)  # without any of them, the page would be empty
    found = groups(of_tasks(tasks, "report", required=not others))
    page = out or folders[0] / "report.html"
    note = f"results of {', '.join(map(str, folders))}"
    shown = [_drawn(group) for group in found]
    write_whole(page, report_html(shown, note, theory_results, pretrained))
    print(f"Report: {page}")
    return 0


def _drawn(group: Group) -> Shown:
    heads = theory.fitted(group)
    return Shown(group, heads, pictures(group, heads))
