"""Publishes results of the evals in docs/results, for the tables of the documentation.

    python -m evals max-retrieval --record
    python -m scripts.publish results/quick/max-retrieval \\
        --command "python -m evals max-retrieval --record"

writes max-retrieval.csv, the summary, and max-retrieval.json: the command, commit, versions, seeds,
settings and the score of each seed. For pretrained models it also writes the figures that the
documentation shows. `make tables` then fills the tables of the documentation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.files import write_whole
from evals.reporting import compare
from evals.reporting.figures import pretrained_figures
from evals.reporting.pages import FIGURES, figure_path
from evals.reporting.plots import png
from evals.results.provenance import provenance
from evals.results.rows import Row, is_pretrained, is_trial, is_validation
from evals.results.store import read_rows
from evals.results.summary import Group, groups
from evals.results.summary_csv import csv_text
from scripts.tables import RESULTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="Publish the results in DIR, of one task")
    add("--command", required=True, help="The command that made them, without --out")
    text = "What else a reader must know, in sentences; needed for changes that are not committed"
    add("--note", metavar="TEXT", help=text)
    add("--name", help="Name of the files: TASK, TASK.PRESET or TASK.OTHER-WORDS (default: TASK)")
    text = "Results of the same command in another arithmetic: store which rows hold there"
    add("--against", type=Path, metavar="DIR", help=text)
    add("--environment", metavar="NAME=VALUE", help="The environment variable that chose it")
    text = "Write to DIR (default: docs/results)"
    add("--to", type=Path, default=RESULTS, metavar="DIR", help=text)
    try:
        for path in publish(**vars(parser.parse_args(arguments))):
            print(f"written: {path}")
    except (UsageError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def publish(
    folder: Path,
    command: str,
    to: Path,
    note: str | None = None,
    name: str | None = None,
    against: Path | None = None,
    environment: str | None = None,
) -> list[Path]:
    """Write the files and return their paths."""
    if (against is None) != (environment is None):
        raise UsageError("--against and --environment must be given together")
    rows = read_rows([folder])
    if len(tasks := sorted({row["task"] for row in rows})) > 1:
        raise UsageError(f"DIR must have results of one task, got {', '.join(tasks)}")
    made = provenance(rows, command, note)
    if not any(row["status"] == "ok" for row in rows if not is_validation(row)):
        raise UsageError("DIR must have at least one score, got none")
    of_lengths = not is_pretrained(rows[0]) and not is_trial(rows[0])
    if of_lengths:
        made["scores"] = _scores(groups(rows))
    if against is not None:
        if not of_lengths:
            raise UsageError("--against compares results of tasks only")
        if shared := _files(folder) & _files(against):
            raise UsageError(f"--against must have other results than DIR, both have {min(shared)}")
        second = _second_run(rows, read_rows([against]))
        made["arithmetic"] = {"environment": environment, **second}
    name = name or str(tasks[0])
    if not re.fullmatch(rf"{re.escape(tasks[0])}(\.[a-z0-9-]+)?", name):
        raise UsageError(f"--name must be {tasks[0]} or {tasks[0]}.OTHER-WORDS, got {name!r}")
    written: dict[Path, str | bytes] = {
        to / f"{name}.csv": _summary(rows),
        to / f"{name}.json": _json(made),
    }
    figures = {figure: figure_path(to, name, figure) for figure in FIGURES}
    if is_pretrained(rows[0]):
        for figure, _, drawn in pretrained_figures(groups(rows)[0]):
            if figure in figures:
                written[figures.pop(figure)] = png(drawn)
        for path in figures.values():  # the documentation would show it above the new table
            path.unlink(missing_ok=True)
    for path, content in written.items():
        write_whole(path, content)
    return list(written)


def _files(folder: Path) -> set[Path]:
    """The files that `read_rows` reads."""
    return {path.resolve() for part in ("", "*/") for path in folder.glob(f"{part}rows*.jsonl")}


def _summary(rows: Sequence[Row]) -> str:
    """The CSV of the rows, which must have equal settings."""
    several = groups(rows)
    if len(several) > 1:
        titles = (x.title if x.is_pretrained else x.distinction for x in several)
        raise UsageError(
            f"DIR must have results with equal settings, got {len(several)} groups: "
            f"{'; '.join(titles)}"
        )
    return csv_text(several)


def _json(made: dict[str, Any]) -> str:
    """JSON with the scores of all seeds at a length on one line."""
    text = json.dumps(made, indent=1, ensure_ascii=False)
    scores = re.compile(r'\{\s*("\d+": [-+.e\d]+(?:,\s*"\d+": [-+.e\d]+)*)\s*\}')
    return scores.sub(lambda match: "{" + " ".join(match[1].split()) + "}", text) + "\n"


def _scores(task_groups: Sequence[Group]) -> dict[str, dict[str, dict[str, float]]]:
    """The score by label of the row, length and seed. Seeds without a score are left out."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for group in task_groups:
        name = group.task.score.name
        for (series, length), point in group.points.items():
            scores.setdefault(series.label, {})[str(length)] = {
                str(row["seed"]): float(f"{row['metrics'][name]:.6g}")
                for row in point.rows
                if row["status"] == "ok" and name in row["metrics"]
            }
    return scores


def _second_run(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """The scores of the rows in other results, from which tables tell whether they hold there.

    The other results may have fewer seeds. The rows are compared over these seeds.
    """
    task = rows[0]["task"]
    theirs = groups([row for row in others if row["task"] == task])
    if not theirs:
        raise UsageError(f"--against must have results of {task}, got none")
    seeds, every = ({row["seed"] for row in side if row["task"] == task and not is_validation(row)}
                    for side in (others, rows))  # fmt: skip
    if extra := sorted(seeds - every):
        raise UsageError(f"--against must have seeds of DIR only, got also {extra[0]}")
    ours = groups([row for row in rows if row["seed"] in seeds or is_validation(row)])
    compared = compare.changes(ours, theirs)  # raises if a side has several groups
    if difference := _difference(ours[0], theirs[0]):
        raise UsageError(f"--against must have {difference}")
    compare.check_seeds(ours, theirs)
    scores = _scores(theirs)
    labels = dict.fromkeys(change.label for change in compared)
    return {"seeds": sorted(seeds), "scores": {label: scores[label] for label in labels}}


def _difference(group: Group, other: Group) -> str:
    """What the second run lacks: the settings of the first one, all its rows, other arithmetic."""
    for name, value in group.settings.items():
        if other.settings.get(name) != value:
            return f"the settings of DIR, {name} = {value}, got {other.settings.get(name)}"
    for (series, length), point in group.points.items():
        label, same = series.label, other.points.get((series, length))
        if same is None or not same.rows:
            return f"every row of DIR, it lacks {label} at n = {length}"
        a, b = group.tuned(series)["values"], other.tuned(series)["values"]
        if a != b:
            return f"the tuned values of DIR, {label} has {b} for {a}"
        sizes = sorted({row["sequences"] for row in (*point.rows, *same.rows)})
        if len(sizes) > 1:
            shown = " and ".join(map(str, sizes))
            return f"as many test sequences as DIR, {label} at n = {length} has {shown}"
    # The vector instructions of the CPU that made the rows.
    ours, theirs = (
        {row["arithmetic"] for row in one.rows if row["device"] == "cpu" and row.get("arithmetic")}
        for one in (group, other)
    )
    same = ", ".join(ours & theirs)
    return f"another arithmetic than DIR, both have {same}" if same else ""


if __name__ == "__main__":
    sys.exit(main())
