"""The README's tables of evals: what the tasks are, and the scores in docs/evals, which are the
summary.csv of runs."""

from __future__ import annotations

import csv
from pathlib import Path

from commandline.errors import UsageError
from commandline.table import markdown
from evals.reporting.tables import FEW_SEEDS, LEGEND, MANY, PARTIAL
from evals.results.summary import UNTRAINED
from evals.task import Metric
from evals.tasks import TASKS

MEASURED = Path(__file__).parents[2] / "docs" / "evals"
NONE_YET = "Nothing has been measured yet.\n"

Line = dict[str, str]


def tasks_table() -> str:
    """Each task, what it asks, and the lengths of its quick preset."""
    lines = []
    for name, task in TASKS.items():
        quick = task.presets["quick"]
        trained, longest = quick.settings.train_longest, max(quick.lengths)
        lengths = f"quick: train length {trained}, eval length up to {longest}"
        lines.append(f"- `{name}`: {task.about} ({lengths})\n")
    return "".join(lines)


def scores(folder: Path = MEASURED) -> str:
    """A table for each summary that is there."""
    parts = [
        task_scores(task.name, list(csv.DictReader(path.read_text().splitlines())))
        for task in TASKS.values()
        if (path := folder / f"{task.name}.csv").exists()
    ]
    return "\n".join(parts) if parts else NONE_YET


def task_scores(name: str, lines: list[Line]) -> str:
    """Score by variant and length: mean and 95 % bootstrap interval over seeds."""
    task = TASKS[name]
    score = task.score
    if len(several := {line.get("settings") or "" for line in lines}) > 1:
        raise UsageError(
            f"the summary of {name} has several settings: {'; '.join(sorted(several))}"
        )
    lengths = sorted({int(line["length"]) for line in lines})
    series = dict.fromkeys((line["variant"], line["positions"]) for line in lines)
    cells = {(line["variant"], line["positions"], int(line["length"])): line for line in lines}
    train_length, first = int(lines[0]["train_length"]), lines[0]
    seeds = max(int(line["seeds"]) for line in lines)

    def mean(one: tuple[str, str], length: int) -> float:
        return float(cells[*one, length][score.name] or "nan")

    best_first = not score.lower_is_better
    order = sorted(series, key=lambda one: mean(one, lengths[-1]), reverse=best_first)
    rows: list[tuple[str, ...]] = [("variant", *(f"n = {n}" for n in lengths))]
    for variant, positions in order:
        untrained = int(cells[variant, positions, train_length]["untrained"])
        label = f"`{variant}`" + (f" {positions}" if positions != "none" else "")
        label += f" {UNTRAINED} {untrained}/{seeds}" if untrained else ""
        rows.append((label, *(_cell(cells[variant, positions, n], score) for n in lengths)))
    chance = score.factor * float(first["chance"])
    title = (
        f"**{name}**: {score.title}, mean of {seeds} seeds (95 % bootstrap interval); train length "
        f"n = {train_length}, chance {chance:.{score.digits}f}; {first['schedule']}.\n\n"
    )
    notes = []
    if any(UNTRAINED in row[0] for row in rows[1:]):
        words = LEGEND[UNTRAINED].format(bar=task.trained_score, length=train_length)
        notes.append(f"{UNTRAINED} {words}.")
    if any(PARTIAL in cell for row in rows[1:] for cell in row[1:]):
        notes.append(f"{PARTIAL} {LEGEND[PARTIAL]}.")
    if 1 < seeds < MANY:
        notes.append(f"{FEW_SEEDS.format(count=seeds)}.")
    return title + markdown(rows, right=True) + (f"\n{' '.join(notes)}\n" if notes else "")


def _cell(line: Line, score: Metric) -> str:
    if not line[score.name]:
        return line["failed"] or "—"
    digits = score.digits
    mean, low, high = (line[f"{score.name}{end}"] for end in ("", "_low", "_high"))
    text = f"{score.factor * float(mean):.{digits}f}"
    if low:
        text += f" ({score.factor * float(low):.{digits}f}–{score.factor * float(high):.{digits}f})"
    return text + (PARTIAL if line["failed"] else "")
