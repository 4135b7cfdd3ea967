"""Tables and figures of pretrained models in the documentation, from the results of a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from commandline.table import Table, markdown
from evals.reporting.readme_tables import NONE_YET, made_by
from evals.results.pretrained import RETRIEVAL, RISE

SummaryLine = Mapping[str, str]
FIGURES = {
    "loss-by-position": "Loss by position at the longest length",
    "by-length": "Loss, retrieval and weight on the needle by length",
}
# Title, metric of the summary, factor, digits, whether the sign is shown.
_BY_LENGTH = (
    ("Loss, nats per token (lower is better)", "loss", 1, 3, False),
    ("Rise of the loss above the model as loaded, nats per token", RISE, 1, 3, True),
    ("Retrieval, mean of the tasks, %", "retrieval", 100, 1, False),
    ("Log-probability of the right answers, nats per token", "retrieval_logprob", 1, 2, False),
    ("Weight on the needle, largest of all heads", "needle_weight_max", 1, 3, False),
    ("H/log n, mean over heads", "entropy", 1, 3, False),
)


def documented(folder: Path, name: str) -> str:
    """The tables of a summary in a folder of the documentation, in Markdown."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return NONE_YET
    lines: list[SummaryLine] = list(csv.DictReader(path.read_text().splitlines()))
    tables = [_by_length(lines, *columns) for columns in _BY_LENGTH]
    tables.append(_tasks(lines))
    texts = [
        f"**{table.title}**\n\n{markdown([table.header, *table.rows], right=True)}"
        for table in tables
        if table.rows
    ]
    shown = [(text, figure_path(folder, name, figure)) for figure, text in FIGURES.items()]
    pictures = [f"![{t}]({folder.name}/{file.name})\n" for t, file in shown if file.exists()]
    return "\n".join([*pictures, *texts, f"{_samples(lines)}\n{made_by(path)}"])


def figure_path(folder: Path, results: str, figure: str) -> Path:
    """The file of a figure in a folder of published results."""
    return folder / f"{results}-{figure}.png"


def _by_length(
    lines: Sequence[SummaryLine], title: str, metric: str, factor: float, digits: int, sign: bool
) -> Table:
    """A table of one metric: a row for each variant, a column for each length."""
    by_point = {(x["series"], int(x["length"])): x for x in lines if x["metric"] == metric}
    lengths = sorted({length for _, length in by_point})
    rows = [
        [f"`{name}`", *(_cell(by_point.get((name, n)), factor, digits, sign) for n in lengths)]
        for name in dict.fromkeys(name for name, _ in by_point)
    ]
    return Table(title, ["variant", *(f"n = {n}" for n in lengths)], rows)


def _tasks(lines: Sequence[SummaryLine]) -> Table:
    """The retrieval tasks at the longest length that has the most samples."""
    by_point = {
        (x["series"], int(x["length"]), x["metric"]): x for x in lines if x["metric"] in RETRIEVAL
    }
    if not by_point:
        return Table("", [], [])
    length = max((int(x["samples"]), n) for (_, n, _), x in by_point.items())[1]
    rows = [
        [f"`{name}`", *(_cell(by_point.get((name, length, task)), 100, 0) for task in RETRIEVAL)]
        for name in dict.fromkeys(name for name, _, _ in by_point)
    ]
    return Table(f"Retrieval at n = {length}, %", ["variant", *RETRIEVAL.values()], rows)


def _cell(line: SummaryLine | None, factor: float, digits: int, sign: bool = False) -> str:
    if line is None:
        return "—"
    text = f"{factor * float(line['mean']):{'+' if sign else ''}.{digits}f}"
    if not line["low"]:
        return text
    low, high = (f"{factor * float(line[end]):.{digits}f}" for end in ("low", "high"))
    return f"{text} ({low} … {high})"


def _samples(lines: Sequence[SummaryLine]) -> str:
    counts = {int(x["length"]): x["samples"] for x in lines if x["metric"] == "loss"}
    text = ", ".join(f"{count} at n = {n}" for n, count in sorted(counts.items()))
    return f"Means over samples with 95 % bootstrap intervals. Samples: {text}."
