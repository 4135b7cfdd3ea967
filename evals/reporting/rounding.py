"""Table 1 of Veličković et al. beside our models in two arithmetics and the ceiling in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commandline.table import read_tables
from evals.results.summary import Series
from evals.results.summary_csv import Summary, read_summary
from evals.tasks.max_retrieval import PUBLISHED

NAME = "rounding"
# The name of a summary in docs/results, by the arithmetic of its products.
ARITHMETICS = {"fp32": "max-retrieval.paper", "bfloat16": "max-retrieval.bfloat16"}


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
