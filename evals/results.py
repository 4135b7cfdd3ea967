"""What a run leaves beside its rows: summary.csv and pictures of each task, tables on the console,
and one report of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evals.report import report_html
from evals.store import Row, write_whole
from evals.summary import Group, csv_text
from evals.tables import cost_table, legend, score_tables


def write_results(groups: Sequence[Group], out: Path, note: str) -> None:
    """Write and print everything; the report of one task is in its own folder."""
    from evals.plots import png, task_plots  # matplotlib: not in workers

    for group in groups:
        folder = out / group.task.name
        write_whole(folder / "summary.csv", csv_text(group))
        for name, figure in task_plots(group).items():
            write_whole(folder / f"{name}.png", png(figure))
        _show(group)
        print(f"\nwritten to {folder}")
    page = out / groups[0].task.name if len(groups) == 1 else out
    write_whole(page / "report.html", report_html(groups, note))
    print(f"report: {page / 'report.html'}")


def _show(group: Group) -> None:
    print(f"\n{group.task.name}: {group.task.about}")
    for table in [*score_tables(group), cost_table(group)]:
        print(f"\n{table.text()}")
    print(f"\nschedule: {group.rows[0]['schedule']}")
    for line in [*legend(group), *failures(group), *mixtures(group.rows)]:
        print(line)


def failures(group: Group) -> list[str]:
    """Every cell that failed, in words."""
    return [
        f"failed: {point.series.label}, n = {point.length}: {message}"
        for point in group.points.values()
        for message in point.messages
    ]


def mixtures(rows: Sequence[Row]) -> list[str]:
    """Warnings where rows of several commits or versions stand side by side."""
    found = []
    for name in ("commit", "torch", "attnzoo"):
        values = sorted({str(row[name]) for row in rows})
        if len(values) > 1:
            found.append(f"warning: rows of several values of {name}: {', '.join(values)}")
    return found
