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
from evals.reporting import compare, pretrained_plots
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
    args = parser.parse_args(arguments)
    try:
        for path in publish(args):
            print(f"written: {path}")
    except (UsageError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def publish(args: argparse.Namespace) -> list[Path]:
    """Write the files and return their paths."""
    if (args.against is None) != (args.environment is None):
        raise UsageError("--against and --environment must be given together")
    rows = read_rows([args.folder])
    if len(tasks := sorted({row["task"] for row in rows})) > 1:
        raise UsageError(f"DIR must have results of one task, got {', '.join(tasks)}")
    made = provenance(rows, args.command, args.note)
    if not any(row["status"] == "ok" for row in rows if not is_validation(row)):
        raise UsageError("DIR must have at least one score, got none")
    if _of_lengths(rows):
        made["scores"] = _scores(groups(rows))
    if args.against is not None:
        if shared := _files(args.folder) & _files(args.against):
            raise UsageError(f"--against must have other results than DIR, both have {min(shared)}")
        made["arithmetic"] = {
            "environment": args.environment,
            **_second_run(rows, read_rows([args.against])),
        }
    name = args.name or tasks[0]
    if not re.fullmatch(rf"{re.escape(tasks[0])}(\.[a-z0-9-]+)?", name):
        raise UsageError(f"--name must be {tasks[0]} or {tasks[0]}.OTHER-WORDS, got {name!r}")
    written: dict[Path, str | bytes] = {
        args.to / f"{name}.csv": _summary(rows),
        args.to / f"{name}.json": _json(made),
    }
    old: set[Path] = set()
    if is_pretrained(rows[0]):
        old = {figure_path(args.to, name, figure) for figure in FIGURES}
        for figure, _, drawn in pretrained_plots.figures(groups(rows)[0]):
            if figure in FIGURES:
                written[figure_path(args.to, name, figure)] = png(drawn)
    for path, content in written.items():
        write_whole(path, content)
    for path in old - set(written):  # the documentation would show it above the new table
        path.unlink(missing_ok=True)
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


def _of_lengths(rows: Sequence[Row]) -> bool:
    """Whether the rows are those of a task, which has a score for each length."""
    return not is_pretrained(rows[0]) and not is_trial(rows[0])


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
    """Whether each row of the table holds in other results, by its label; and their scores."""
    if not _of_lengths(rows):
        raise UsageError("--against compares results of tasks only")
    ours, theirs = groups(rows), [x for x in groups(others) if x.task.name == rows[0]["task"]]
    if not theirs:
        raise UsageError(f"--against must have results of {rows[0]['task']}, got none")
    changes = compare.changes(ours, theirs)  # raises if a side has several groups
    _check_same_settings(ours[0], theirs[0])
    if same := _arithmetic(ours[0]) & _arithmetic(theirs[0]):
        raise UsageError(
            f"--against must be of another arithmetic than DIR, both have {', '.join(same)}"
        )
    holds: dict[str, bool] = {}
    for change in changes:
        label = change.series.label
        holds[label] = holds.get(label, True) and compare.holds(change)
    scores = _scores(theirs)
    return {"holds": holds, "scores": {label: scores[label] for label in holds}}


def _arithmetic(group: Group) -> set[str]:
    """The vector instructions of the CPU that made these rows. Older rows do not name them."""
    rows = [row for row in group.rows if row["device"] == "cpu"]
    return {row["arithmetic"] for row in rows if row.get("arithmetic")}


def _check_same_settings(group: Group, other: Group) -> None:
    """Raise unless the second run has the settings of the first one, and all its rows."""
    for name, value in group.settings.items():
        if other.settings.get(name) != value:
            raise UsageError(
                f"--against must have the settings of DIR, {name} = {value}, got "
                f"{other.settings.get(name)}"
            )
    for (series, length), point in group.points.items():
        same = other.points.get((series, length))
        if same is None or not same.rows:
            raise UsageError(
                f"--against must have every row of DIR, it lacks {series.label} at n = {length}"
            )
        a, b = group.tuned(series)["values"], other.tuned(series)["values"]
        if a != b:
            raise UsageError(
                f"--against must have the tuned values of DIR, {series.label} has {b} for {a}"
            )
        sizes = {row["sequences"] for row in (*point.rows, *same.rows)}
        if len(sizes) > 1:
            raise UsageError(
                "--against must have as many test sequences as DIR, "
                f"{series.label} at n = {length} has {' and '.join(map(str, sorted(sizes)))}"
            )


if __name__ == "__main__":
    sys.exit(main())
