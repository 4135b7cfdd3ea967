"""What a run leaves beside its rows: summary.csv and pictures of each task, tables on the console,
and one report of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commandline.files import write_whole
from evals.harness.store import read_rows
from evals.reporting.report import Laws, report_html
from evals.reporting.summary import Group, csv_text, failures, groups, mixtures
from evals.reporting.tables import cost_table, legend, score_tables
from evals.theory import trained_heads as theory


def write_results(found: Sequence[Group], out: Path, note: str) -> None:
    """Write and print everything; the report of one task is in its own folder."""
    from evals.reporting.plots import png, task_plots

    laws = [_laws(group) for group in found]
    for name in dict.fromkeys(group.task.name for group in found):
        mine = [(group, law) for group, law in zip(found, laws) if group.task.name == name]
        folder = out / name
        write_whole(folder / "summary.csv", csv_text([group for group, _ in mine]))
        for number, (group, law) in enumerate(mine, 1):
            pictures = {name: png(figure) for name, figure in task_plots(group).items()}
            if law.picture is not None:
                pictures["law"] = law.picture
            end = f"-{number}" if number > 1 else ""
            for picture, data in pictures.items():
                write_whole(folder / f"{picture}{end}.png", data)
            _show(group, law)
        print(f"\nwritten to {folder}")
    names = {group.task.name for group in found}
    page = out / found[0].task.name if len(names) == 1 else out
    write_whole(page / "report.html", report_html(found, note, laws))
    print(f"report: {page / 'report.html'}")


def main(folders: Sequence[Path], out: Path | None) -> int:
    """One page of the results in some folders."""
    found = groups(read_rows(folders))
    page = out or folders[0] / "report.html"
    note = f"results of {', '.join(map(str, folders))}"
    write_whole(page, report_html(found, note, [_laws(group) for group in found]))
    print(f"report: {page}")
    return 0


def _laws(group: Group) -> Laws:
    from evals.reporting.plots import png
    from evals.reporting.theory_plots import theory_plot

    heads = theory.fitted(group)
    figure = theory_plot(group, heads)
    return Laws(heads, None if figure is None else png(figure))


def _show(group: Group, law: Laws) -> None:
    apart = f" · {group.apart}" if group.apart else ""
    print(f"\n{group.task.name}{apart}: {group.task.about}")
    for table in [*score_tables(group), *theory.tables(group, law.heads), cost_table(group)]:
        print(f"\n{table.text()}")
    print(f"\nschedule: {group.rows[0]['schedule']}")
    for line in [*legend(group), *failures(group), *mixtures([group])]:
        print(line)
