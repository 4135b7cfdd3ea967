"""What a run leaves beside its rows: summary.csv and pictures of each task, tables on the console,
and one report of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evals import theory
from evals.report import report_html
from evals.store import read_rows, write_whole
from evals.summary import Group, csv_text, failures, groups, mixtures
from evals.tables import Table, cost_table, legend, score_tables


def write_results(found: Sequence[Group], out: Path, note: str) -> None:
    """Write and print everything; the report of one task is in its own folder."""
    from evals.plots import png, task_plots  # matplotlib: not in workers
    from evals.theory_plots import theory_plot

    heads = [theory.fitted(group) for group in found]
    for group, mine in zip(found, heads, strict=True):
        folder = out / group.task.name
        write_whole(folder / "summary.csv", csv_text(group))
        figures = {**task_plots(group), "law": theory_plot(group, mine)}
        for name, figure in figures.items():
            if figure is not None:
                write_whole(folder / f"{name}.png", png(figure))
        _show(group, theory.tables(group, mine))
        print(f"\nwritten to {folder}")
    page = out / found[0].task.name if len(found) == 1 else out
    write_whole(page / "report.html", report_html(found, note, heads))
    print(f"report: {page / 'report.html'}")


def main(folders: Sequence[Path], out: Path | None) -> int:
    """One page of the results in some folders."""
    found = groups(read_rows(folders))
    page = out or folders[0] / "report.html"
    write_whole(page, report_html(found, f"results of {', '.join(map(str, folders))}"))
    print(f"report: {page}")
    return 0


def _show(group: Group, laws: Sequence[Table]) -> None:
    print(f"\n{group.task.name}: {group.task.about}")
    for table in [*score_tables(group), *laws, cost_table(group)]:
        print(f"\n{table.text()}")
    print(f"\nschedule: {group.rows[0]['schedule']}")
    for line in [*legend(group), *failures(group), *mixtures([group])]:
        print(line)
