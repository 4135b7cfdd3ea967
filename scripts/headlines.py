"""The table of docs/headlines.md: the claims of headlines.toml beside figures of stored results.

A cell has fields in braces, which are replaced by figures when the table is made:

    {FILE; ROW; COLUMN}           the score of a row in docs/results/FILE.csv at a length or under a
                                  condition, with half the width of its 95 % interval; or a cell of
                                  a file with tables, such as ranks.csv
    {FILE; ROW; COLUMN; METRIC}   the same of another metric; a difference has a sign
    {FILE; A − B; COLUMN}         the difference of two scores, paired by seed
    {FILE; ROW; tests}            where the score differs significantly from that of softmax
    {FILE; command}               the command that made the file
    {FILE; ROW; BASELINE}         how many times faster a row of benchmarks/results/FILE.json is
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from commandline.table import markdown, read_tables
from evals.reporting.pages import MEASURED
from evals.reporting.tables import BARE, BETTER, HALF, WORSE, shown, verdict
from evals.results.pretrained import MODELS
from evals.results.statistics import estimate
from evals.results.summary_csv import Summary, read_summary
from scripts.benchmark_tables import RESULTS as TIMES
from scripts.variant_facts import linked

CLAIMS = Path(__file__).with_suffix(".toml")
HEADER = ("source", "claim", "ours", "command", "verdict")
FIELD = re.compile(r"\{([^{}]+)\}")
MINUS = " − "


def headlines_table(path: Path = CLAIMS) -> str:
    """A Markdown table of the claims. Each verdict is a link to the evidence."""
    rows: list[tuple[str, ...]] = [HEADER]
    for claim in tomllib.loads(path.read_text())["claim"]:
        source, about, ours = linked(claim["source"]), claim["claim"], filled(claim["ours"])
        commands = "; ".join(f"`{filled(command)}`" for command in claim["commands"])
        rows.append((source, about, ours, commands, f"[{claim['verdict']}]({claim['evidence']})"))
    return markdown(rows)


def filled(text: str, results: Path = MEASURED, times: Path = TIMES) -> str:
    """The text with its fields replaced.

    Raises:
        UsageError: there is no result for a field.
    """

    def replaced(field: re.Match[str]) -> str:
        file, *place = field[1].split("; ")
        path = results / f"{file}.csv"
        try:
            if path.exists():
                return figure(path, *place)
            return times_faster(json.loads((times / f"{file}.json").read_text()), *place)
        except (LookupError, StopIteration, OSError) as error:
            raise UsageError(f"headlines.toml: no result for {field[0]}: {error!r}") from error

    return FIELD.sub(replaced, text)


def figure(path: Path, *place: str) -> str:
    """The text of a field about a CSV file and the JSON file beside it."""
    made_by = path.with_suffix(".json")
    if place == ("command",):
        return json.loads(made_by.read_text())["command"]
    row, column, *metric = place
    first = path.read_text().partition("\n")[0]
    if not first.startswith(("task,", "model,")):
        return table_cell(path.read_text(), row, column)
    if MINUS in row:
        scores = json.loads(made_by.read_text())["scores"]
        return paired(read_summary(path), *(scores[one][column] for one in row.split(MINUS)))
    return mean(read_summary(path), row, column, *metric)


def mean(summary: Summary, label: str, column: str, name: str = "") -> str:
    """The mean of a metric, or the lengths at which the score has marks of tests."""
    task = summary.task
    series = next(one for one in summary.lines if one.label == label)
    if column == "tests":
        return marks(summary, series)
    x = int(column) if task.axis == "n" else column
    metric = next((one for one in task.metrics if one.name == name), task.score)
    # The stored intervals of pretrained models are of another kind than those of the tasks.
    spread = BARE if task is MODELS else HALF
    value = summary.means[series, x, name or metric.name]
    return shown(value, metric, spread, sign=name not in ("", metric.name))


def marks(summary: Summary, series: Any) -> str:
    words = []
    for mark, word in ((BETTER, "better"), (WORSE, "worse")):
        if lengths := [str(x) for x in summary.xs if verdict(summary, series, x) == mark]:
            words.append(f"significantly {word} at n = {', '.join(lengths)}")
    return " and ".join(words) or "not significantly different at any length"


def paired(summary: Summary, ours: Mapping[str, float], others: Mapping[str, float]) -> str:
    """The mean difference of scores by seed."""
    differences = [score - others[seed] for seed, score in ours.items() if seed in others]
    return shown(estimate(differences), summary.task.score, HALF, sign=True)


def table_cell(text: str, row: str, column: str) -> str:
    """The cell in the first table with such a row and column."""
    for table in read_tables(text):
        for name, *cells in table.rows:
            if name == row and column in table.header[1:]:
                return cells[table.header.index(column) - 1]
    raise KeyError(row)


def times_faster(document: Mapping[str, Any], name: str, other: str = "") -> str:
    """How much faster the first row with this name is than the other, or than the baseline of its
    command: the median of the ratios within the rounds, with quartiles."""
    row = next(one for one in document["rows"] if name in (one.get("name"), one.get("algorithm")))
    spread = row["ratios"][other] if other else row["speedup"]
    median, *ends = (spread[part] for part in ("median", "lower", "upper"))
    if other:  # a ratio of times, not a speed-up
        median, *ends = 1 / median, *(1 / end for end in reversed(ends))
    return "{:#.3g} ({:#.3g}–{:#.3g})".format(median, *ends)
