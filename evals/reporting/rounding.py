"""Tables about rounding to bfloat16: Table 1 of Veličković et al. beside our models in two
arithmetics and the ceiling, parts of a model, and a pretrained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commandline.table import Table, read_tables
from evals.reporting.tables import BARE, HALF, NONE, entry
from evals.results.pretrained import RISE
from evals.results.summary import Series
from evals.results.summary_csv import Summary, read_summary
from evals.tasks.max_retrieval import PUBLISHED

NAME = "rounding"
# The name of a summary in docs/results, by the arithmetic of its products.
ARITHMETICS = {"fp32": "max-retrieval.paper", "bfloat16": "max-retrieval.bfloat16"}

# What is rounded in a model of max-retrieval: the name of a summary and a variant in it.
PARTS = {
    "nothing": ("max-retrieval.rounded-scores", "softmax"),
    "q and k in q·k": ("max-retrieval.rounded-scores", "bfloat16_scores"),
    "the inputs": ("max-retrieval.rounded-inputs", "softmax"),
    "the operands of all products but q·k": ("max-retrieval.rounded-products", "exact_scores"),
    "the operands of all products": ("max-retrieval.rounded-products", "softmax"),
}
PRETRAINED = "pretrained.rounding"
# Series of that summary that have a name of their own in its table.
_NAMES = {"bfloat16_logits": "`softmax`, logits in bfloat16"}
_COLUMNS = {  # metrics and titles
    "retrieval": "right, %",
    "retrieval_logprob": "log p",
    "max_weight": "largest weight",
    "entropy": "H/log n",
    "needle_weight_max": "weight on the needle",
}


def parts(folder: Path) -> Table:
    """The accuracy of models of which only a part is rounded."""
    summaries = {name: read_summary(folder / f"{name}.csv") for name, _ in PARTS.values()}
    (xs,) = {tuple(summary.xs) for summary in summaries.values()}
    rows = []
    for label, (name, variant) in PARTS.items():
        summary = summaries[name]
        cells = [entry(summary, Series(variant), x, summary.task.score, HALF) for x in xs]
        rows.append([label, *cells])
    return Table("", ["rounded to bfloat16", *(f"n = {x}" for x in xs)], rows)


def pretrained(folder: Path) -> Table:
    """Measures of a pretrained model by length and arithmetic. Only the rise of the loss has its
    spread: it is paired by sample, while the other measures differ more between samples."""
    summary = read_summary(folder / f"{PRETRAINED}.csv")
    metrics = {metric.name: metric for metric in summary.task.metrics}
    rows = []
    for x in summary.xs:
        for series in summary.lines:
            cells = [entry(summary, series, x, summary.task.score, HALF, RISE)]
            cells += [entry(summary, series, x, metrics[name], BARE) for name in _COLUMNS]
            if cells[0] != NONE:
                label = _NAMES.get(series.label, f"`{series.variant}`")
                label += f", {series.detail}" if series.detail else ""
                rows.append([str(x), label, *cells])
    return Table("", ["n", "variant", "rise of the loss", *_COLUMNS.values()], rows)


def rounding(folder: Path) -> Summary:
    """The rows of Table 1 in both arithmetics, the published ones, and the ceiling of `ties`."""
    summaries = {name: read_summary(folder / f"{file}.csv") for name, file in ARITHMETICS.items()}
    exact = summaries["fp32"]
    cells = {
        (Series(f"{variant}, {name}"), x): summary.cells[Series(variant), x]
        for variant in PUBLISHED.rows
        for name, summary in summaries.items()
        for x in PUBLISHED.lengths
    }
    (ties,) = read_tables((folder / "ties.csv").read_text())
    others = {f"{variant}, Table 1": scores for variant, scores in PUBLISHED.rows.items()}
    for name, *scores in ties.rows:
        if name.startswith("bfloat16"):
            others[f"no model: {name}"] = tuple(map(float, scores))
    for label, scores in others.items():
        for x, score in zip(PUBLISHED.lengths, scores, strict=True):
            known = {n: exact.cells[Series("softmax"), x][n] for n in ("train_length", "chance")}
            mean = {"accuracy": f"{score / 100:.6g}", "accuracy_low": ""}
            cells[Series(label), x] = {**known, **mean, "seeds": str(exact.seeds)}
    return replace(exact, cells=cells)
