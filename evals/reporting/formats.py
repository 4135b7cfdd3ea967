"""Tables of one metric as Markdown, CSV and LaTeX, for the documentation and for papers.

A LaTeX table is a ``tabular`` without caption, for the package booktabs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commandline.table import markdown
from evals.reporting import curves
from evals.reporting.tables import (
    BETTER,
    EFFECTIVE,
    HALF,
    NONE,
    PARTIAL,
    RANGE,
    WORSE,
    entry,
    has_effective,
    heads,
    is_partial,
    notes,
    number,
    ranked_rows,
    short_lengths,
    title_of,
    verdict,
)
from evals.results.provenance import BROKEN
from evals.results.summary import Series
from evals.results.summary_csv import Summary, difference, number_text, numbers
from evals.task import Metric

CSV_HEADER = (
    "task", "settings", "variant", "position_encoding", "length", "metric", "mean",
    "standard_error", "interval_low", "interval_high", "seeds", "failed", "untrained_seeds",
    "chance", "train_length", "effective_length", "drops", "difference_from_softmax", "p_holm",
    "unstable", "tuned",
)  # fmt: skip


def csv_tables(tables: Sequence[tuple[Summary, Metric]]) -> str:
    """CSV text with a line per task, variant, position encoding, length and metric. Scores are not
    scaled to percent. The column ``drops`` is 0 if the effective length is a lower bound.

    The length of an experiment is its condition; the position encoding of a pretrained model is the
    layers.
    """
    rows = []
    for summary, metric in tables:
        score = metric is summary.task.score
        for series in summary.ranked(metric):
            line = summary.lines[series]
            effective = summary.effective(series, metric) or ("", "")
            for x in summary.xs:
                value = summary.mean(series, x, metric.name)
                versus = summary.mean(series, x, difference(summary.task)) if score else None
                rows.append([
                    summary.task.name, summary.distinction, series.variant,
                    series.detail or "none", x, metric.name, *numbers(value),
                    0 if value is None else value.count, summary.failed.get((series, x), ""),
                    line.untrained, number_text(summary.chance if score else None),
                    summary.train_length, *(n if n == "" else int(n) for n in effective),
                    number_text(versus.mean if versus else None),
                    number_text(summary.p.get((series, x)) if score else None),
                    int(line.unstable), line.tuned,
                ])  # fmt: skip
    import pandas as pd

    frame = pd.DataFrame(rows, columns=CSV_HEADER, dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


# ---- Markdown


def markdown_table(summary: Summary, metric: Metric, broken: Sequence[str] = ()) -> str:
    """A Markdown table by variant and length: mean and 95 % interval over seeds, the best first.

    The rows with labels in ``broken`` get a mark.
    """
    header = [*heads(summary.task, summary.xs), *[EFFECTIVE] * has_effective(summary, metric)]
    rows = ranked_rows(summary, metric, lambda series: code_label(summary, series, broken),
                       lambda s, x: entry(summary, s, x, metric, RANGE, marked=True))  # fmt: skip
    name = summary.task.name
    title = title_of(summary, metric).replace(name, f"**{name}**", 1)
    title += f" Training schedule: {summary.schedule}." * bool(summary.schedule)
    lines = " ".join(f"{note}." for note in notes(summary, metric))
    end = f"\n{escaped(lines)}\n" if lines else ""
    return f"{title}\n\n{markdown([header, *rows], right=True)}{end}"


def short_table(summary: Summary, broken: Sequence[str] = ()) -> str:
    """A Markdown table of the score with at most six columns of numbers, and a curve in each row.

    The rows are numbered, the best first.
    """
    score, lengths = summary.task.score, short_lengths(summary)
    header = ["variant", *(f"n = {x} <small>{distance}</small>" for x, distance in lengths)]
    header += ["effective <small>length</small>"] * has_effective(summary, score)
    rows = ranked_rows(summary, score, lambda series: code_label(summary, series, broken),
                       lambda s, x: entry(summary, s, x, score, HALF, marked=True),
                       [x for x, _ in lengths])  # fmt: skip
    drawn = [
        [f"{rank + 1}. {row[0]}", *row[1:], curves.sparkline(summary, rank, series)]
        for rank, (series, row) in enumerate(zip(summary.ranked(score), rows, strict=True))
    ]
    return markdown([[*header, "curve"], *drawn], right=True)


def code_label(summary: Summary, series: Series, broken: Sequence[str] = ()) -> str:
    """The name of a line in Markdown, with its marks."""
    detail = f" {series.detail}" if series.detail else ""
    marks = summary.lines[series].marks(summary.seeds) + f" {BROKEN}" * (series.label in broken)
    return f"`{' '.join(series.variant.split())}`{detail}{marks}"


def escaped(text: str) -> str:
    """Notes in which Markdown reads no mark as emphasis."""
    return text.replace(f"{PARTIAL} ", f"\\{PARTIAL} ")


# ---- LaTeX

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", NONE: "---",
    "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ LaTeX would read [ and * as options
}  # fmt: skip
_VERDICTS = {BETTER: "$^{+}$", WORSE: "$^{-}$", "": ""}


def escape(text: str) -> str:
    """The text on one line with LaTeX's special characters escaped; "->" becomes an arrow."""
    parts = " ".join(text.split()).split("->")
    return r"$\to$".join("".join(_ESCAPES.get(c, c) for c in part) for part in parts)


def latex_table(summary: Summary, metric: Metric) -> str:
    """A table of mean and 95 % interval by variant and length.

    LaTeX comments above the table give the text for a caption.
    """
    count, extra = len(summary.xs), has_effective(summary, metric)
    comments = [title_of(summary, metric), *notes(summary, metric), r"needs \usepackage{booktabs}"]
    over = "Eval length $n$" if summary.task.axis == "n" else summary.task.axis.capitalize()
    body = [
        rf"\begin{{tabular}}{{l{'r' * (count + extra)}}}",
        r"\toprule",
        rf" & \multicolumn{{{count}}}{{c}}{{{over}}}{' & Effective' * extra} \\",
        rf"\cmidrule(lr){{2-{count + 1}}}",
        _row(["Variant", *(escape(str(x)) for x in summary.xs), *["length"] * extra]),
        r"\midrule",
    ]
    rows = ranked_rows(summary, metric, lambda series: _label(summary, series),
                       lambda s, x: _cell(summary, s, x, metric))  # fmt: skip
    for label, *cells in rows:
        cells = [*cells[:count], *(escape(x).replace("≥", r"$\geq$") for x in cells[count:])]
        body.append(_row([label, *cells]))
    if summary.chance is not None and metric is summary.task.score:
        chance = [number(metric, summary.chance)] * count
        body += [r"\midrule", _row(["Chance", *chance, *[""] * extra])]
    body += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*(f"% {' '.join(comment.split())}" for comment in comments), *body, ""])


def _row(cells: list[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _label(summary: Summary, series: Series) -> str:
    line, detail = summary.lines[series], f", {escape(series.detail)}" if series.detail else ""
    mark = rf"$^{{\dagger\,{line.untrained}/{summary.seeds}}}$" if line.untrained else ""
    return f"{escape(series.variant)}{detail}{mark}" + r"$^{\ddagger}$" * line.unstable


def _cell(summary: Summary, series: Series, x: Any, metric: Metric) -> str:
    value = summary.mean(series, x, metric.name)
    if value is None:
        return escape(summary.failed.get((series, x), NONE))
    mark = verdict(summary, series, x) if metric is summary.task.score else ""
    text = number(metric, value.mean) + _VERDICTS[mark]
    text += rf"\textsuperscript{{{PARTIAL}}}" * is_partial(summary, value)
    if value.interval is None:
        return text
    low, high = (number(metric, end) for end in value.interval)
    return rf"{text} {{\scriptsize [{low}, {high}]}}"


FORMATS = {
    "csv": (".csv", csv_tables),
    "latex": (".tex", lambda tables: "\n".join(latex_table(*table) for table in tables)),
    "markdown": (".md", lambda tables: "\n".join(markdown_table(*table) for table in tables)),
}
