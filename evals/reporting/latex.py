"""Tables of scores in LaTeX: a ``tabular`` without caption, for the package booktabs."""

from __future__ import annotations

from evals.reporting.scores import ScoreLine, Scores, Value
from evals.reporting.tables import BETTER, PARTIAL, WORSE

_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "—": "---",
    "[": "{[}", "]": "{]}", "*": "{*}",  # after \\ LaTeX would read [ and * as options
}  # fmt: skip


_VERDICTS = {BETTER: "$^{+}$", WORSE: "$^{-}$"}


def escape(text: str) -> str:
    """The text on one line with LaTeX's special characters escaped; "->" becomes an arrow."""
    parts = " ".join(text.split()).split("->")
    return r"$\to$".join("".join(_ESCAPES.get(c, c) for c in part) for part in parts)


def latex_table(scores: Scores) -> str:
    """A table of mean and 95 % interval by variant and length.

    LaTeX comments above the table give the text for a caption.
    """
    count = len(scores.lengths)
    has_effective = scores.has_effective
    comments = [scores.title, *scores.notes(), r"needs \usepackage{booktabs}"]
    body = [
        rf"\begin{{tabular}}{{l{'r' * (count + has_effective)}}}",
        r"\toprule",
        rf" & \multicolumn{{{count}}}{{c}}{{Eval length $n$}}{' & Effective' * has_effective} \\",
        rf"\cmidrule(lr){{2-{count + 1}}}",
        _row(["Variant", *map(str, scores.lengths), *["length"] * has_effective]),
        r"\midrule",
        *(
            _row(
                [
                    _label(line, scores.seeds),
                    *(_cell(scores, value) for value in line.values),
                    *[_effective(line)] * has_effective,
                ]
            )
            for line in scores.lines
        ),
    ]
    if scores.chance is not None:
        body += [
            r"\midrule",
            _row(["Chance", *[scores.shown(scores.chance)] * count, *[""] * has_effective]),
        ]
    body += [r"\bottomrule", r"\end{tabular}"]
    head = [f"% {' '.join(comment.split())}" for comment in comments]
    return "\n".join([*head, *body, ""])


def _row(cells: list[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _label(line: ScoreLine, seeds: int) -> str:
    encoding = "" if line.encoding == "none" else f", {escape(line.encoding)}"
    mark = rf"$^{{\dagger\,{line.untrained}/{seeds}}}$" if line.untrained else ""
    mark += r"$^{\ddagger}$" * line.unstable
    return f"{escape(line.variant)}{encoding}{mark}"


def _effective(line: ScoreLine) -> str:
    return escape(line.effective_text).replace("≥", r"$\geq$")


def _cell(scores: Scores, value: Value) -> str:
    if value.mean is None:
        return escape(value.failed or "—")
    text = scores.shown(value.mean) + _VERDICTS.get(scores.mark(value), "")
    if value.failed:
        text += rf"\textsuperscript{{{PARTIAL}}}"
    if value.low is None or value.high is None:
        return text
    return rf"{text} {{\scriptsize [{scores.shown(value.low)}, {scores.shown(value.high)}]}}"
