"""Tables and figures in README and documentation: the tasks, and the results in docs/results.

NAME.csv in docs/results is the summary.csv of one task, experiment or pretrained model,
NAME.PRESET.csv that of another preset, and NAME.OTHER-WORDS.csv that of other variants. The JSON
file of the same name says what made it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from commandline.table import Table, markdown
from evals.reporting import curves, rounding
from evals.reporting.formats import code_label, escaped, markdown_table, short_table
from evals.reporting.pretrained_tables import published_tables, samples_text
from evals.reporting.tables import (
    BETTER,
    EFFECTIVE_NOTE,
    HALF_NOTE,
    MOST_LENGTHS,
    chance_text,
    notes,
    notes_of_experiment,
    published_table,
    ranked_rows,
    shown,
    tables_of_experiment,
)
from evals.results.provenance import holds, sentence
from evals.results.summary import UNTRAINED, task_of
from evals.results.summary_csv import read_summary
from evals.tasks import EXPERIMENTS, TASKS

MEASURED = Path(__file__).parents[2] / "docs" / "results"
FOLDED = "All lengths, intervals, notes and settings"
NONE_YET = "Nothing has been measured yet.\n"
OVERVIEW = "max-retrieval"  # the task of the README
CURVE_OF = "softmax"  # the documentation shows the curve of this output layer only
FIGURES = {  # of pretrained models
    "loss-by-position": "Loss by position at the longest length",
    "by-length": "Loss, retrieval and weight on the needle by length",
}


def tasks_table() -> str:
    """A list of the tasks, with descriptions and the lengths of the preset quick."""
    lines = []
    for name, task in TASKS.items():
        preset = task.presets["quick"]
        trained, longest = preset.settings.train_longest, max(preset.lengths)
        lengths = f"quick: train length {trained}, eval lengths up to {longest}"
        lines.append(f"- `{name}`: {task.about} ({lengths})\n")
    return "".join(lines)


def scores(folder: Path = MEASURED) -> str:
    """A heading for each task and each other summary of it in the folder, with tables of scores."""
    paths = [
        path
        for name in TASKS
        for path in (folder / f"{name}.csv", *sorted(folder.glob(f"{name}.*.csv")))
        if path.exists()
    ]
    return "\n".join(map(_scores, paths)) or NONE_YET


def _scores(path: Path) -> str:
    """A summary: the figure and the short table, and folded the table of all lengths with its
    notes, the published scores and what made the results."""
    summary, name = read_summary(path), path.stem.partition(".")[2]
    task, score, preset = summary.task, summary.task.score, name in summary.task.presets
    heading = f"### {task.name}"
    if name:
        words = f"preset {name}" if preset else name.replace("-", " ")
        summary = replace(summary, distinction=words)
        heading = f"#### {task.name}: {words}"
    broken = _broken(path)
    details = markdown_table(summary, score, broken)
    if preset and (table := published_table(summary, code="`")) is not None:
        details += f"\n{table.title}\n\n{_markdown(table)}"
    seeds = "One seed" if summary.seeds == 1 else f"{summary.seeds} seeds"
    chance = chance_text(score, summary.chance or 0.0)
    data = f"results/{path.name}"
    parts = [
        heading,
        f"{score.title}. {seeds}, train length n = {summary.train_length}, chance {chance}.",
        f"<!-- curves: {path.stem} -->" * bool(curves.figure(summary)),
        _short(short_table(summary, broken), more=" with-curves"),
        _folded(FOLDED, details + made_by(path)),
        f"All metrics: {{download}}`{path.name} <{data}>`",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _broken(path: Path) -> list[str]:
    """The labels of the rows of a summary that do not hold in its second arithmetic."""
    if "arithmetic" not in (made := _made(path)):
        return []
    held = holds(made, task_of(path.stem.split(".")[0]))
    return [label for label, holds in held.items() if not holds]


def with_curves(text: str, folder: Path = MEASURED) -> str:
    """The text of a page in which the marks that `_scores` left are replaced by figures.

    GitHub shows the page without figures, because it removes SVG but not the text inside.
    """

    def drawn(match: re.Match[str]) -> str:
        name = match[1]
        summary = rounding.rounding(folder) if name == rounding.NAME else None
        return curves.figure(summary or read_summary(folder / f"{name}.csv"))

    return re.sub(r"<!-- curves: (\S+) -->\n", drawn, text)


def table_1(folder: Path = MEASURED) -> str:
    """The figure and the tables of `rounding`."""
    summary = rounding.rounding(folder)
    rows = ranked_rows(summary, summary.task.score, lambda series: series.label,
                       lambda s, x: shown(summary.mean(s, x, summary.task.score.name),
                                          summary.task.score))  # fmt: skip
    header = ["variant", *(f"n = {x}" for x in summary.xs), "effective length"]
    return "\n".join([
        f"<!-- curves: {rounding.NAME} -->\n",
        _short(short_table(summary), more=" with-curves"),
        _folded("All lengths", _markdown(Table("", header, rows))),
        made_by(folder / f"{rounding.ARITHMETICS['bfloat16']}.csv"),
    ])  # fmt: skip


def rounded_parts(folder: Path = MEASURED) -> str:
    """The table of `rounding.parts`."""
    names = dict.fromkeys(name for name, _ in rounding.PARTS.values())
    made = "".join(made_by(folder / f"{name}.csv") for name in names)
    return f"{_short(_markdown(rounding.parts(folder)))}{made}"


def rounded_pretrained(folder: Path = MEASURED) -> str:
    """The figure and the table of `rounding.pretrained`."""
    name, figure = rounding.PRETRAINED, "loss-by-position"
    file = figure_path(folder, name, figure)
    samples = samples_text(read_summary(folder / f"{name}.csv"))
    foot = (
        "Means over samples; the rise of the loss above the model as loaded in fp32, nats per "
        f"token: {HALF_NOTE}; the share of right answers in the retrieval task, and the "
        f"log-probability of the right answers. Samples: {samples}.\n"
    )
    return "\n".join([
        f"![{FIGURES[figure]}]({folder.name}/{file.name})\n",
        _short(_markdown(rounding.pretrained(folder))),
        f"{foot}{made_by(folder / f'{name}.csv')}",
    ])  # fmt: skip


def _made(path: Path) -> dict[str, Any]:
    file = path.with_suffix(".json")
    return json.loads(file.read_text()) if file.exists() else {}


def made_by(path: Path) -> str:
    """A paragraph that says what made a summary; empty for a file without provenance."""
    made, file = _made(path), f"results/{path.stem}.json"
    return f"\n{sentence(made, file, bool(_broken(path)))}\n" if made else ""


def overview(folder: Path = MEASURED) -> str:
    """A table of `OVERVIEW`: variant, score at the train length, score at the longest eval length,
    and effective length."""
    path = folder / f"{OVERVIEW}.csv"
    if not path.exists():
        return NONE_YET
    summary, broken = read_summary(path), _broken(path)
    cells = {place: line for place, line in summary.cells.items() if place[0].label not in broken}
    if not cells:
        return f"No row of `{OVERVIEW}` holds on another CPU.\n"
    summary = replace(summary, cells=cells)
    score, ends = summary.task.score, (summary.train_length, summary.xs[-1])
    name = score.title.split(":")[0].lower().replace(", %", " (%)")
    header = ["variant", f"{name} at the train length, n = {ends[0]}", f"{name} at n = {ends[1]}",
              "effective length, n"]  # fmt: skip
    rows = ranked_rows(summary, score, lambda series: code_label(summary, series),
                       lambda s, x: shown(summary.mean(s, x, score.name), score), ends)  # fmt: skip
    seeds = "one seed" if summary.seeds == 1 else f"mean of {summary.seeds} seeds"
    lines = [
        f"`{OVERVIEW}`, {seeds}, chance {chance_text(score, summary.chance or 0.0)}.",
        f"Effective length: {EFFECTIVE_NOTE}. Variants with {UNTRAINED} have none.",
        *[f"Left out, because it does not hold on another CPU: `{x}`." for x in broken],
        *(f"{x}." for x in notes(summary, score) if x[0] != BETTER),  # it has no marks of tests
    ]
    return f"{_markdown(Table('', header, rows))}\n{' '.join(lines)}\n"


def legend(folder: Path = MEASURED) -> str:
    """The names of the numbered lines of a figure, in one paragraph."""
    summary = read_summary(folder / f"{OVERVIEW}.csv")
    ranked = summary.ranked(summary.task.score)
    return " · ".join(f"{n}\u00a0`{series.label}`" for n, series in enumerate(ranked, 1)) + "\n"


def documented(folder: Path, name: str) -> str:
    """The tables of an experiment or of pretrained models in Markdown, with figures if there are
    any, from a summary in a folder of the documentation."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return NONE_YET
    summary, pictures = read_summary(path), []
    if name in EXPERIMENTS:
        tables = tables_of_experiment(summary, curve_of=CURVE_OF)
        text = escaped("; ".join(notes_of_experiment(summary)))
        foot = f"{text[0].upper()}{text[1:]}.\n"
    else:
        tables = published_tables(summary)
        files = [(text, figure_path(folder, name, figure)) for figure, text in FIGURES.items()]
        pictures = [f"![{t}]({folder.name}/{file.name})\n" for t, file in files if file.exists()]
        foot = (
            f"Over samples: {HALF_NOTE}. Both ends of each interval: "
            f"{{download}}`{path.name} <{folder.name}/{path.name}>`. "
            f"Samples: {samples_text(summary)}.\n{made_by(path)}"
        )
    texts = [
        _short(_titled(table))
        if len(table.header) <= MOST_LENGTHS + 2
        else _folded(table.title, _titled(table))
        for table in tables
    ]
    return "\n".join([*pictures, *texts, foot])


def _titled(table: Table) -> str:
    """A table with its title, in which the first column is code."""
    coded = Table("", table.header, [[f"`{row[0]}`", *row[1:]] for row in table.rows])
    return f"**{table.title}**\n\n{_markdown(coded)}"


def _short(text: str, more: str = "") -> str:
    """A table that fits into the page. more: other classes of its style."""
    return f"<div class='short{more}'>\n\n{text}\n</div>\n"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n\n{text}\n</details>\n"


def _markdown(table: Table) -> str:
    return markdown([table.header, *table.rows], right=True)


def figure_path(folder: Path, results: str, figure: str) -> Path:
    """The file of a figure in a folder of published results."""
    return folder / f"{results}-{figure}.png"
