"""Markdown tables for README and documentation: the tasks, and the scores in docs/results.

TASK.csv in docs/results is the summary.csv of one task, TASK.PRESET.csv that of another preset, and
TASK.OTHER-WORDS.csv that of other variants. The JSON file of the same name says what made it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from commandline.table import markdown
from evals.reporting.scores import EFFECTIVE_SHARE, ScoreLine, Scores, Value, of_summary
from evals.reporting.tables import BETTER, PARTIAL, chance_text
from evals.results.provenance import BROKEN, sentence
from evals.results.summary import UNSTABLE, UNTRAINED
from evals.tasks import TASKS

MEASURED = Path(__file__).parents[2] / "docs" / "results"
NONE_YET = "Nothing has been measured yet.\n"


def tasks_table() -> str:
    """A list of the tasks, with descriptions and the lengths of the smallest preset that trains."""
    lines = []
    for name, task in TASKS.items():
        size = "quick" if "quick" in task.presets else "paper"
        preset = task.presets[size]
        trained, longest = preset.settings.train_longest, max(preset.lengths)
        lengths = f"{size}: train length {trained}, eval lengths up to {longest}"
        lines.append(f"- `{name}`: {task.about} ({lengths})\n")
    return "".join(lines)


def scores(folder: Path = MEASURED) -> str:
    """The Markdown tables of scores, one for each summary of a task in the folder."""
    paths = [
        path
        for name in TASKS
        for path in (folder / f"{name}.csv", *sorted(folder.glob(f"{name}.*.csv")))
        if path.exists()
    ]
    return "\n".join(_described(path) for path in paths) or NONE_YET


def _described(path: Path) -> str:
    """The Markdown table of a summary, the published scores, and what made the results."""
    task, _, name = path.stem.partition(".")
    scores = _read(path, task)
    preset = name in scores.task.presets
    if name:
        words = f"preset {name}" if preset else name.replace("-", " ")
        scores = replace(scores, distinction=words)
    text = markdown_table(scores, rounded_away(path))
    return text + (_published(scores) if preset else "") + made_by(path)


def rounded_away(path: Path) -> list[str]:
    """The labels of the rows that do not hold in the second arithmetic."""
    file = path.with_suffix(".json")
    provenance = json.loads(file.read_text()) if file.exists() else {}
    held = provenance.get("arithmetic", {}).get("holds", {})
    return [label for label, holds in held.items() if not holds]


def made_by(path: Path) -> str:
    """A paragraph that says what made a summary; empty for a file without provenance."""
    file = path.with_suffix(".json")
    if not file.exists():
        return ""
    return f"\n{sentence(json.loads(file.read_text()), f'results/{file.name}')}\n"


def _published(scores: Scores) -> str:
    """The scores of the table beside those that a paper published."""
    published = scores.task.published
    if published is None:
        return ""
    lengths = [n for n in scores.lengths if n in published.lengths]
    lines, rows = {line.variant: line for line in scores.lines}, []
    for name, paper_scores in published.rows.items():
        paper = dict(zip(published.lengths, paper_scores, strict=True))
        if name in lines:
            measured = dict(zip(scores.lengths, lines[name].values, strict=True))
            means = [measured[n].mean for n in lengths]
            here = ["—" if mean is None else scores.shown(mean) for mean in means]
            rows.append([f"`{name}`, here", *here])
        there = [f"{paper[n]}{'?' * (n in published.second_hand)}" for n in lengths]
        rows.append([f"`{name}`, paper", *there])
    header = ["variant", *(f"n = {n}" for n in lengths)]
    return f"\n{published.title}\n\n{markdown([header, *rows], right=True)}"


def overview(folder: Path = MEASURED, task: str = "max-retrieval") -> str:
    """A table of one task: variant, score at the train length, score at the longest eval length,
    and effective length."""
    scores = summary_scores(folder, task)
    if scores is None:
        return NONE_YET
    chance = scores.chance or 0.0
    seeds = "one seed" if scores.seeds == 1 else f"mean of {scores.seeds} seeds"
    name = scores.metric.title.split(":")[0].lower().replace(", %", " (%)")
    header = (
        "variant",
        f"{name} at the train length, n = {scores.train_length}",
        f"{name} at n = {scores.lengths[-1]}",
        "effective length, n",
    )
    rows = [header, *(_overview_row(scores, line) for line in scores.lines)]
    notes = [
        f"`{task}`, {seeds}, chance {chance_text(scores.metric, chance)}.",
        "Effective length: the longest n up to which the score stays above "
        f"{100 * EFFECTIVE_SHARE:g} % of its value at the train length. Variants with {UNTRAINED} "
        "have none.",
        # The overview has no intervals and no marks of tests.
        *(f"{x}." for x in scores.notes() if "interval" not in x and not x.startswith(BETTER)),
    ]
    return f"{markdown(rows, right=True)}\n{' '.join(notes)}\n"


def _overview_row(scores: Scores, line: ScoreLine) -> tuple[str, ...]:
    values = dict(zip(scores.lengths, line.values, strict=True))
    ends = (values.get(scores.train_length, Value()), line.values[-1])
    return (
        _label(line, scores.seeds),
        *("—" if value.mean is None else scores.shown(value.mean) for value in ends),
        line.effective_text,
    )


def summary_scores(folder: Path, task: str) -> Scores | None:
    """The scores in the file <task>.csv of the folder; None if there is no such file."""
    path = folder / f"{task}.csv"
    return _read(path, task) if path.exists() else None


def _read(path: Path, task: str) -> Scores:
    return of_summary(task, list(csv.DictReader(path.read_text().splitlines())))


def markdown_table(scores: Scores, broken: Sequence[str] = ()) -> str:
    """A Markdown table of scores by variant and length: mean and 95 % interval over seeds.

    The rows with labels in ``broken`` get a mark.
    """
    has_effective = scores.has_effective
    header = ("variant", *(f"n = {length}" for length in scores.lengths))
    header += ("effective length",) * has_effective
    body = [
        (
            _label(line, scores.seeds) + f" {BROKEN}" * (line.label in broken),
            *(_cell(scores, value) for value in line.values),
            *[line.effective_text] * has_effective,
        )
        for line in scores.lines
    ]
    name = scores.task.name
    title = scores.title.replace(name, f"**{name}**", 1)
    notes = " ".join(f"{note}." for note in scores.notes()).replace(f"{PARTIAL} ", f"\\{PARTIAL} ")
    table = markdown([header, *body], right=True)
    notes = f"\n{notes}\n" if notes else ""
    return f"{title} Training schedule: {scores.schedule}.\n\n{table}{notes}"


def _label(line: ScoreLine, seeds: int) -> str:
    encoding = "" if line.encoding == "none" else f" {line.encoding}"
    untrained = f" {UNTRAINED} {line.untrained}/{seeds}" if line.untrained else ""
    untrained += f" {UNSTABLE}" * line.unstable
    return f"`{' '.join(line.variant.split())}`{encoding}{untrained}"


def _cell(scores: Scores, value: Value) -> str:
    if value.mean is None:
        return value.failed or "—"
    text = scores.shown(value.mean) + scores.mark(value)
    if value.low is not None and value.high is not None:
        text += f" ({scores.shown(value.low)}–{scores.shown(value.high)})"
    return text + (PARTIAL if value.failed else "")
