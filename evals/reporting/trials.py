"""Tables of experiments: output layers against conditions, from the lines of a summary.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from commandline.files import write_whole
from commandline.table import Table, markdown
from evals.experiment import Experiment
from evals.reporting.readme_tables import NONE_YET
from evals.reporting.tables import ENOUGH_FOR_ERRORS, PARTIAL, chance_text
from evals.results.rows import Row
from evals.results.trials import SummaryLine, TrialGroup, summary_lines, trial_groups, trials_csv
from evals.task import Metric
from evals.tasks import EXPERIMENTS

TEMPLATE = Path(__file__).parent / "template"
CURVE_OF = "softmax"  # the documentation shows the curve of this output layer only


def _cell(line: SummaryLine, name: str, metric: Metric, sign: bool) -> str:
    """Mean and standard error; a mark if a seed has no value."""
    if not line[name]:
        return line["failed"] or "—"
    shown = f"{metric.factor * float(line[name]):{'+' if sign else ''}.{metric.digits}f}"
    if error := line[f"{name}_se"]:
        shown += f" ±{metric.factor * float(error):.{metric.digits}f}"
    return shown + PARTIAL * (line[f"{name}_seeds"] != line["seeds"])


def _crossed(
    title: str, lines: Sequence[SummaryLine], name: str, metric: Metric, sign: bool = False
) -> Table | None:
    """A table of output layers against conditions. The more numerous of both are its rows.

    Output layers and conditions without any entry are left out; None if no line has a value.
    """
    if not any(line[name] for line in lines):
        return None
    cells = {
        (line["variant"], line["condition"]): _cell(line, name, metric, sign) for line in lines
    }
    shown = {point for point, text in cells.items() if text != "—"}
    variants = [v for v in dict.fromkeys(v for v, _ in cells) if any(v == a for a, _ in shown)]
    conditions = [c for c in dict.fromkeys(c for _, c in cells) if any(c == b for _, b in shown)]
    if len(variants) >= len(conditions):
        header = ["output layer", *conditions]
        rows = [[v, *(cells.get((v, c), "—") for c in conditions)] for v in variants]
    else:
        header = ["condition", *variants]
        rows = [[c, *(cells.get((v, c), "—") for v in variants)] for c in conditions]
    return Table(title, header, rows)


def metric_tables(task: Experiment, lines: Sequence[SummaryLine]) -> list[Table]:
    """A table for each metric, and of the gain over the condition to compare with."""
    score, chance = task.score, f"; chance {chance_text(task.score, task.chance({}))}"
    tables = [
        _crossed(f"{metric.title}{chance * (metric is score)}", lines, metric.name, metric)
        for metric in task.metrics
    ]
    pairs = ", ".join(f"{name} − {other}" for name, other in task.versus.items())
    title = f"{score.title}: difference paired by seed ({pairs})"
    tables.append(_crossed(title, lines, f"{score.name}_gain", score, sign=True))
    return [table for table in tables if table is not None]


def curve_table(task: Experiment, lines: Sequence[SummaryLine]) -> Table | None:
    """The curve: a row for each output layer and condition, a column for each x."""
    drawn = [line for line in lines if line["curve"]]
    if task.curve is None or not drawn:
        return None
    points = [[pair.split(":") for pair in line["curve"].split()] for line in drawn]
    several = len({line["variant"] for line in drawn}) > 1
    rows = [
        [f"{line['variant']}, {line['condition']}" if several else line["condition"],
         *(f"{100 * float(y):.1f}" for _, y in pairs)]
        for line, pairs in zip(drawn, points, strict=True)
    ]  # fmt: skip
    return Table(task.curve, ["", *(x for x, _ in points[0])], rows)


def tables(task: Experiment, lines: Sequence[SummaryLine]) -> list[Table]:
    """All tables of an experiment."""
    curve = curve_table(task, lines)
    return [*metric_tables(task, lines), *([curve] if curve else [])]


def notes(lines: Sequence[SummaryLine]) -> list[str]:
    """The explanations of the marks in the tables."""
    seeds = int(lines[0]["seeds"])
    texts = ["one seed" if seeds == 1 else f"mean ± standard error over {seeds} seeds"]
    texts.append(f"schedule: {lines[0]['schedule']}")
    names = [name.removesuffix("_seeds") for name in lines[0] if name.endswith("_seeds")]
    if any(line[name] and line[f"{name}_seeds"] != line["seeds"]
           for line in lines for name in names):  # fmt: skip
        texts.append(f"{PARTIAL} undefined or failed in some seeds; the mean leaves them out")
    if 1 < seeds < ENOUGH_FOR_ERRORS:
        texts.append(f"with only {seeds} seeds the standard errors are themselves uncertain")
    return texts


def write_trials(rows: Sequence[Row], out: Path, note: str, verbose: bool = False) -> None:
    """Write summary.csv and report.html of each experiment, and print its tables."""
    all_groups = trial_groups(rows)
    for task in dict.fromkeys(group.task for group in all_groups):
        task_groups = [group for group in all_groups if group.task is task]
        write_whole(out / task.name / "summary.csv", trials_csv(task_groups))
        page = out / task.name / "report.html"
        write_whole(page, report_html(task_groups, note))
        for group in task_groups:
            _print(group, verbose)
        print(f"\n{note}\nReport: {page}")


def _print(group: TrialGroup, verbose: bool) -> None:
    lines = list(summary_lines(group))
    shown = tables(group.task, lines)
    distinction = f" ({group.distinction})" if group.distinction else ""
    for table in shown if verbose else shown[:1]:
        print(f"\n{group.task.name}{distinction}: {table.text()}")
    for text in (*notes(lines), *group.left_out, *failures(group)):
        print(text)
    if not verbose and len(shown) > 1:
        print(f"The report and --verbose show {len(shown) - 1} more tables.")


def failures(group: TrialGroup) -> list[str]:
    """A line for each output layer, condition and reason of a failure."""
    seeds_by_failure: dict[tuple[str, str, str], list[int]] = {}
    for (variant, condition, seed), row in group.rows.items():
        if row["status"] != "ok":
            seeds_by_failure.setdefault((variant, condition, row["message"]), []).append(seed)
    return [
        f"failed: {variant} under {condition}: {message} (seeds {', '.join(map(str, seeds))})"
        for (variant, condition, message), seeds in seeds_by_failure.items()
    ]


def report_html(groups: Sequence[TrialGroup], note: str) -> str:
    """One page of all groups of an experiment. All text from results is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = []
    for group in groups:
        lines, first = list(summary_lines(group)), next(iter(group.rows.values()))
        settings = {**group.settings, **{n: first[n] for n in ("data", "torch", "attnzoo")}}
        texts = [*notes(lines), *group.left_out, *failures(group)]
        sections.append((group.distinction, tables(group.task, lines), texts, settings))
    return environment.get_template("trials.html.j2").render(
        task=groups[0].task,
        note=note,
        sections=sections,
        style=Markup((TEMPLATE / "report.css").read_text(encoding="utf-8")),
    )


def documented(folder: Path, name: str) -> str:
    """The tables of an experiment in Markdown, from its summary in a folder of the documentation.

    The curve is shown for softmax only.
    """
    path, task = folder / f"{name}.csv", EXPERIMENTS[name]
    if not path.exists():
        return NONE_YET
    lines: list[SummaryLine] = list(csv.DictReader(path.read_text().splitlines()))
    tables = metric_tables(task, lines)
    curve = curve_table(task, [line for line in lines if line["variant"] == CURVE_OF])
    if curve is not None:
        title = f"{curve.title} ({CURVE_OF})"
        tables.append(Table(title, curve.header, curve.rows))
    texts = []
    for table in tables:
        rows = [[f"`{row[0]}`", *row[1:]] for row in table.rows]
        texts.append(f"**{table.title}**\n\n{markdown([table.header, *rows], right=True)}")
    foot = "; ".join(notes(lines)).replace(PARTIAL, f"\\{PARTIAL}")
    return "\n".join([*texts, f"{foot[0].upper()}{foot[1:]}.\n"])
