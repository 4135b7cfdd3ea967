"""Tables and the report of `python -m evals pretrained`, from its result rows.

Each number is a mean over samples with its 95 % bootstrap interval. All variants read the same
samples, so differences from the model as loaded are paired by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from commandline.files import write_whole
from commandline.table import Table
from evals.measures.sparsity import TITLES
from evals.reporting import adapt
from evals.reporting.pictures import Picture
from evals.reporting.plots import png
from evals.reporting.pretrained_plots import figures
from evals.reporting.report import report_html
from evals.reporting.stored import StoredResults
from evals.results.pretrained import BASELINE, RETRIEVAL, PretrainedGroup, groups, summary_csv
from evals.results.rows import PRETRAINED, Row
from evals.results.summary import Estimate

NAME = PRETRAINED
_PRINTED = 3  # without --verbose, only the first tables are printed


def _cell(mean: Estimate | None, factor: float, digits: int, sign: bool = False) -> str:
    if mean is None:
        return "—"
    text = f"{factor * mean.mean:{'+' if sign else ''}.{digits}f}"
    return text if mean.interval is None else f"{text} ({mean.span(factor, digits)})"


def _by_length(
    group: PretrainedGroup,
    title: str,
    metric: str,
    factor: float = 1.0,
    digits: int = 3,
    note: str = "",
    paired: bool = False,
) -> Table | None:
    """A table of one metric: a row for each series, a column for each length."""
    mean_of: Callable[[str, int, str], Estimate | None] = group.gain if paired else group.mean
    rows = []
    for series in group.series:
        means = [mean_of(series, n, metric) for n in group.lengths]
        if any(mean is not None for mean in means):
            rows.append([series, *(_cell(mean, factor, digits, paired) for mean in means)])
    header = ["variant", *(f"n = {n}" for n in group.lengths)]
    return Table(title, header, rows, note) if rows else None


def _positions(group: PretrainedGroup, length: int, rise: bool) -> Table | None:
    """The loss at each bin of positions, or its rise above the model as loaded."""
    names = [series for series in group.series if not (rise and series == BASELINE)]
    bins_by_series = {series: group.by_position(series, length, rise) for series in names}
    bins_by_series = {series: bins for series, bins in bins_by_series.items() if bins}
    if not bins_by_series:
        return None
    spans = list(dict.fromkeys((b, e) for bins in bins_by_series.values() for b, e, _ in bins))
    rows = []
    for series, bins in bins_by_series.items():
        means = {(b, e): mean for b, e, mean in bins}
        style = "+.3f" if rise else ".3f"
        rows.append([series, *(f"{means[s].mean:{style}}" if s in means else "—" for s in spans)])
    header = ["variant", *(f"{begin}–{end - 1}" for begin, end in spans)]
    what = "Rise of the loss" if rise else "Loss"
    return Table(f"{what} by position at n = {length}, nats per token", header, rows)


def _tasks(
    group: PretrainedGroup, length: int, end: str, title: str, factor: float
) -> Table | None:
    """The scores of each retrieval task at one length."""
    rows = []
    for series in group.series:
        means = [group.mean(series, length, name + end) for name in RETRIEVAL]
        if any(mean is not None for mean in means):
            digits = 0 if factor == 100 else 2
            rows.append([series, *(_cell(mean, factor, digits) for mean in means)])
    return (
        Table(f"{title} at n = {length}", ["variant", *RETRIEVAL.values()], rows) if rows else None
    )


def tables(group: PretrainedGroup) -> list[Table]:
    """All tables of a group; those without any number are left out."""
    over = "Mean over samples (95 % bootstrap interval). Planted sentences do not count."
    paired = f"Minus the loss of the model {BASELINE}, paired by sample."
    exact = "Share of answers that greedy decoding would give exactly."
    all_tables = [
        _by_length(group, "Loss, nats per token (lower is better)", "loss", note=over),
        _by_length(group, "Rise of the loss, nats per token", "loss", note=paired, paired=True),
        _by_length(group, "Retrieval, mean of the tasks, %", "retrieval", 100, 1, exact),
        _by_length(group, "Loss of the last quarter of the positions", "loss_end"),
        *(_positions(group, n, rise) for n in group.lengths for rise in (False, True)),
        *(_tasks(group, n, "", "Retrieval, %", 100) for n in group.lengths),
        _by_length(group, "Log-probability of the right answers, nats per token",
                   "retrieval_logprob", digits=2),
        *(_tasks(group, n, "_logprob", "Log-probability of the right answers", 1)
          for n in group.lengths),
        _by_length(group, "Retrieval by greedy decoding, % of the values", "retrieval_greedy",
                   100, 1),
        *(_tasks(group, n, "_greedy", "Retrieval by greedy decoding, %", 100)
          for n in group.lengths),
        _by_length(group, "Weight on the needle, mean over heads", "needle_weight", digits=4),
        _by_length(group, "Weight on the needle, largest of all heads", "needle_weight_max"),
        _by_length(group, "H/log n at the question for the needle", "needle_entropy"),
        _by_length(group, "Largest weight, mean over heads", "max_weight"),
        *(_by_length(group, f"{title}, mean over heads", name) for name, title in TITLES.items()),
    ]  # fmt: skip
    all_tables += adapt.tables(group)
    return [table for table in [*all_tables, _costs(group)] if table is not None]


def _costs(group: PretrainedGroup) -> Table:
    """Mean CPU seconds of a context, without intervals: they depend on the machine."""
    rows = []
    for series in group.series:
        seconds = [[row["cpu_seconds"] for row in group.samples(series, n).values()]
                   for n in group.lengths]  # fmt: skip
        rows.append([series, *(f"{sum(x) / len(x):.1f}" if x else "—" for x in seconds)])
    return Table("CPU seconds per context", ["variant", *(f"n = {n}" for n in group.lengths)], rows)


def notes(group: PretrainedGroup) -> list[str]:
    """Lines about samples, lengths beyond the trained context, and failures."""
    counts = {n: max(len(group.samples(s, n)) for s in group.series) for n in group.lengths}
    lines = ["samples: " + ", ".join(f"{count} at n = {n}" for n, count in counts.items())]
    if beyond := group.beyond():
        lengths = ", ".join(map(str, beyond))
        lines.append(f"n = {lengths}: beyond the trained context of {group.first['limit']} tokens")
    return [*lines, *group.failed()]


def print_tables(rows: Sequence[Row], verbose: bool) -> None:
    """Print the main tables, or all of them."""
    for group in groups(rows):
        print(f"\n{group.title}")
        all_tables = tables(group)
        for table in all_tables if verbose else all_tables[:_PRINTED]:
            print(f"\n{table.text()}")
        for line in notes(group):
            print(line)
        if not verbose and len(all_tables) > _PRINTED:
            print(f"The report and --verbose show {len(all_tables) - _PRINTED} more tables.")


def sections(rows: Sequence[Row]) -> list[StoredResults]:
    """A section of the report for each group."""
    sections = []
    for number, group in enumerate(groups(rows), 1):
        pictures = [
            Picture(f"{name}-{number}", title, "curve", png(figure))
            for name, title, figure in (*figures(group), *adapt.figures(group))
        ]
        about = (
            f"{group.title}. Attention variants are substituted at inference"
            f"{_trained(group)}. "
            f"{'; '.join(notes(group))}."
        )
        ident, heading = f"{NAME}-{number}", f"{NAME}: {group.title}"
        sections.append(StoredResults(ident, heading, about, tables(group), pictures))
    return sections


def _trained(group: PretrainedGroup) -> str:
    return ", without training" * (not adapt.trainings(group))


def write_report(rows: Sequence[Row], out: Path) -> Path:
    """Write report.html, summary.csv and the figures into a folder; returns the page."""
    report_sections = sections(rows)
    write_whole(out / "summary.csv", summary_csv(groups(rows)))
    for section in report_sections:
        for picture in section.pictures:
            write_whole(out / f"{picture.name.removesuffix('-1')}.png", picture.data)
    page = out / "report.html"
    write_whole(page, report_html([], "", pretrained=report_sections))
    return page
