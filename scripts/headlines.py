"""The sections of docs/headlines.md: the claims of headlines.toml beside figures of stored results.

A text has fields in braces, which are replaced by figures when the page is made:

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

import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from operator import itemgetter
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
# A verdict is one of these, in the order of the overview.
VERDICTS = ("reproduced", "partly", "not shown", "small tasks only", "needs a GPU")
FIELD = re.compile(r"\{([^{}]+)\}")
MINUS = " − "


def headlines_sections(path: Path = CLAIMS) -> str:
    """A table of the verdicts in Markdown, and a section for each source."""
    claims = tomllib.loads(path.read_text())["claim"]
    overview = [("verdict", "claims of")]
    for name in VERDICTS:
        titles = [title(claim["source"]) for claim in claims if claim["verdict"] == name]
        if titles:
            links = (f"[{one}](#{anchor(one)})" for one in dict.fromkeys(titles))
            overview.append((f"{name} ({len(titles)})", ", ".join(links)))
    sections = [markdown(overview), "## The claims\n"]
    for source, of_source in itertools.groupby(claims, key=itemgetter("source")):
        paper = source.partition(": ")[2]
        sections.append(f"### {title(source)}\n\n{linked(paper)}\n")
        sections.extend(map(claim_text, of_source))
    return "\n".join(sections)


def title(source: str) -> str:
    return source.partition(": ")[0]


def anchor(heading: str) -> str:
    """The part of an address that leads to a heading, as on GitHub and on the site."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def claim_text(claim: Mapping[str, Any]) -> str:
    commands = "\n".join(wrapped(filled(command)) for command in claim["commands"])
    return (
        f"**Claim:** {claim['claim']}\n\n"
        f"**Here:** {filled(claim['ours'])} → [{claim['verdict']}]({claim['evidence']})\n\n"
        f"```\n{commands}\n```\n"
    )


def wrapped(command: str, width: int = 88) -> str:
    r"""The command with line breaks before options, where it is too long.

    >>> print(wrapped("python -m evals mqar --sweep none --lengths 64,256", width=40))
    python -m evals mqar --sweep none \
        --lengths 64,256
    """
    first, *options = re.split(r" (?=--)", command)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 3 > width:  # with a space before and " \\" after it
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return " \\\n".join(lines)


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
