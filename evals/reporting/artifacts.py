"""What a run leaves beside its rows: summary.csv and pictures of each task, tables on the console,
and one report of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commandline.files import write_whole
from evals.reporting.pictures import pictures
from evals.reporting.report import Shown, report_html
from evals.reporting.tables import cost_table, legend, score_tables
from evals.results.rows import Row
from evals.results.store import read_rows
from evals.results.summary import Group, csv_text, failures, groups, mixtures
from evals.theory import trained_heads as theory


def write_results(rows: Sequence[Row], out: Path, note: str) -> None:
    """Write and print everything; the report of one task is in its own folder."""
    shown = [_drawn(group) for group in groups(rows)]
    names = list(dict.fromkeys(one.group.task.name for one in shown))
    for name in names:
        mine = [one for one in shown if one.group.task.name == name]
        write_whole(out / name / "summary.csv", csv_text([one.group for one in mine]))
        for number, one in enumerate(mine, 1):
            end = f"-{number}" if number > 1 else ""
            for picture in one.pictures:
                write_whole(out / name / f"{picture.name}{end}.png", picture.data)
            _print(one)
        print(f"\nwritten to {out / name}")
    page = (out / names[0] if len(names) == 1 else out) / "report.html"
    write_whole(page, report_html(shown, note))
    print(f"report: {page}")


def main(folders: Sequence[Path], out: Path | None) -> int:
    """One page of the results in some folders."""
    found = groups(read_rows(folders))
    page = out or folders[0] / "report.html"
    note = f"results of {', '.join(map(str, folders))}"
    write_whole(page, report_html([_drawn(group) for group in found], note))
    print(f"report: {page}")
    return 0


def _drawn(group: Group) -> Shown:
    heads = theory.fitted(group)
    return Shown(group, heads, pictures(group, heads))


def _print(shown: Shown) -> None:
    group = shown.group
    apart = f" · {group.apart}" if group.apart else ""
    print(f"\n{group.task.name}{apart}: {group.task.about}")
    for table in [*score_tables(group), *theory.tables(group, shown.heads), cost_table(group)]:
        print(f"\n{table.text()}")
    print(f"\nschedule: {group.rows[0]['schedule']}")
    for line in [*legend(group), *failures(group), *mixtures([group])]:
        print(line)
