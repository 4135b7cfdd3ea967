"""Makes report.html: leaderboards, figures, tables, settings and result rows in one file that needs
no network and no server. Its markup, style and script are in ``template``."""

from __future__ import annotations

import csv
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from commandline.errors import UsageError
from commandline.files import write_whole
from commandline.table import Table, read_tables
from evals.reporting import curves, tables
from evals.reporting.figures import Picture
from evals.reporting.shown import ShownGroup
from evals.reporting.tables import (
    EFFECTIVE_NOTE,
    HALF,
    HALF_NOTE,
    NONE,
    chance_text,
    entry,
    has_effective,
)
from evals.results.rows import Row, distinct
from evals.results.summary import UNTRAINED, Group, Point, Series, at, version_warnings
from evals.results.summary_csv import Summary, number_text
from evals.theory import in_context, ranks

TEMPLATE = Path(__file__).parent / "template"
COMMANDS = {"ranks": ranks.ABOUT, in_context.NAME: in_context.ABOUT}
_OPEN = 12  # longer lists of failures start collapsed
_VERSIONS = ("schedule", "data", "torch", "attnzoo", "commit", "device")
_SETTINGS = {"train_shortest": "shortest train length", "train_longest": "train length"}


class Block(NamedTuple):
    """A part of a section: tables and figures, of which the first is open."""

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, eq=False)
class Section:
    """A section of the page. ident: its HTML id. kind: its heading in the table of contents.

    shown: only sections of groups have it. board: whether it has a leaderboard, as tasks have.
    """

    ident: str
    heading: str
    about: str
    kind: str
    blocks: Sequence[Block] = ()
    shown: ShownGroup | None = None
    board: bool = False
    notes: Sequence[str] = field(default_factory=list)

    @cached_property
    def group(self) -> Group:
        assert self.shown is not None
        return self.shown.group

    @cached_property
    def summary(self) -> Summary:
        assert self.shown is not None
        return self.shown.summary

    @property
    def settings(self) -> dict[str, str]:
        """The settings, versions and seeds of the results, by their names on the page."""
        settings = {
            _SETTINGS.get(name, name.replace("_", " ")): str(value)
            for name, value in self.group.settings.items()
        }
        versions = {name: _values(self.group.rows, name) for name in _VERSIONS}
        seeds = {"seeds": ", ".join(map(str, self.group.seeds))}
        return settings | {name: text for name, text in versions.items() if text} | seeds

    def cell(self, series: Series, x: int) -> tuple[str, float | None, float | None, str]:
        """An entry of the leaderboard: the score as shown, the score for sorting, the width of the
        bar (None if the score is not a percentage), and the HTML id of its rows."""
        score = self.group.task.score
        mean = self.summary.mean(series, x, score.name)
        percent = None
        if mean is not None and score.factor == 100 and not score.lower_is_better:
            percent = round(min(100.0, max(0.0, 100 * mean.mean)), 2)
        return (
            entry(self.summary, series, x, score, HALF, marked=True),
            None if mean is None else mean.mean, percent,
            row_ident(self.ident, self.group.points[series, x]),
        )  # fmt: skip

    def overview(self) -> list[object]:
        """The line of a task in the table of contents."""
        group, score = self.group, self.group.task.score
        best = self.summary.ranked(score)[0]
        top, value, *_ = self.cell(best, group.xs[-1])
        failed = sum(len(x) for p in group.points.values() for x in p.failures.values())
        return [
            score.title.split(":")[0], at(group.task, group.settings["train_longest"]),
            at(group.task, group.xs[-1]), len(group.series), len(group.seeds), failed or NONE,
            NONE if value is None else f"{self.summary.label(best)}: {top}",
        ]  # fmt: skip

    def how_to_read(self) -> str:
        score, seeds = self.group.task.score, len(self.group.seeds)
        better = "Lower" if score.lower_is_better else "Higher"
        means = "One seed, so there are no intervals."
        if seeds > 1:
            means = f"Over {seeds} seeds: {HALF_NOTE}, whose ends are in a table below."
        effective = f" Effective length: {EFFECTIVE_NOTE}; {NONE} for variants with {UNTRAINED}."
        return (
            f"{score.title}, by variant and eval length n. "
            f"{means} {better} is better; blind guessing reaches "
            f"{chance_text(score, self.group.chance or 0.0)}. Click on a column to sort by it, on "
            f"a score to see its result rows.{effective * has_effective(self.summary, score)}"
        )

    @property
    def _series_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.group.rows for name in row["series"]))

    @property
    def row_header(self) -> list[str]:
        metrics = [metric.name for metric in self.group.metrics]
        axis = self.group.task.axis
        return [
            "variant",
            *self._series_names,
            axis,
            "seed",
            "status",
            *metrics,
            "sequences",
            "key",
            "message",
        ]

    def rows(self) -> Iterator[tuple[str, list[Any]]]:
        """Pairs (HTML id, cells) for all rows. Only the first row of each `Point` has an id."""
        for point in self.group.points.values():
            ident = row_ident(self.ident, point)
            for row in point.rows:
                values = [row["metrics"].get(metric.name) for metric in self.group.metrics]
                cells = [
                    row["variant"], *(row["series"].get(name, "") for name in self._series_names),
                    row["x"], row["seed"], row["status"],
                    *map(number_text, values), row.get("sequences", ""), row["key"], row["message"],
                ]  # fmt: skip
                yield ident, cells
                ident = ""

    def failed(self) -> Iterator[tuple[str, str, str]]:
        """Tuples (HTML id of the rows, point, reasons) of all points with failures."""
        for point in self.group.points.values():
            if point.failures and (point.rows or self.board):
                seeds = len(self.group.seeds)
                text = ", ".join(f"{status} in {len(failed)} of {seeds} seeds"
                                 for status, failed in point.failures.items())  # fmt: skip
                messages = f": {'; '.join(point.messages)}" if point.messages else ""
                label = f"{point.series.label}, {at(self.group.task, point.x)}"
                yield row_ident(self.ident, point), label, text + messages


def row_ident(section: str, point: Point) -> str:
    """The HTML id of the first row of a point, to which the leaderboard links; "" without rows."""
    group = point.group
    ident = f"{section}-{group.series.index(point.series)}-{group.xs.index(point.x)}"
    return ident if point.rows else ""


def report_html(shown: Sequence[ShownGroup], note: str, stored: Sequence[Section] = ()) -> str:
    """The HTML of the whole page. All text from results is escaped.

    stored: results of commands such as ``ranks``, shown below the groups.
    """
    groups = [one.group for one in shown]
    sections = [*map(_section, shown, _names(groups)), *stored]
    script = (TEMPLATE / "report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"tables": tables, "curves": curves}
    environment.filters["base64"] = lambda data: b64encode(data).decode()
    failed = [(one.heading, *line) for one in sections if one.shown for line in one.failed()]
    return environment.get_template("report.html.j2").render(
        title=_title(groups),
        what_was_run=_what_was_run([group for group in groups if not group.is_pretrained]),
        note=note,
        warnings=version_warnings(groups),
        sections=sections,
        failed=failed,
        open=_OPEN,
        style=Markup((TEMPLATE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


def write_page(
    path: Path, shown: Sequence[ShownGroup], note: str, stored: Sequence[Section] = ()
) -> Path:
    """Write the page; returns its path."""
    write_whole(path, report_html(shown, note, stored))
    return path


def _names(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """The HTML id and the heading of each group. If a task has several groups, the headings name
    the settings that differ."""
    names = []
    for group in groups:
        task, of_task = group.task, [other for other in groups if other.task is group.task]
        ident, heading = re.sub(r"[^a-z0-9-]", "-", task.name.lower()), task.name
        if group.is_pretrained:
            heading += f": {group.title}"
        elif len(of_task) > 1:
            heading += f" · {group.distinction}"
        names.append((ident + f"-{of_task.index(group) + 1}" * (len(of_task) > 1), heading))
    return names


def _section(shown: ShownGroup, names: tuple[str, str]) -> Section:
    """The section of a group."""
    group = shown.group
    pictures = {kind: [x for x in shown.pictures if x.kind == kind]
                for kind in ("curve", "map")}  # fmt: skip
    notes = list(shown.notes)
    if group.is_pretrained:
        kind, notes = "Pretrained models", []
        blocks = [Block("Figures and tables", "", shown.tables, shown.pictures)]
    elif group.is_task:
        kind, maps = "Tasks", "Each variant has a map with one row for each eval length n."
        blocks = [
            Block("Length curves", "", (), pictures["curve"]),
            Block("Theory and measurement", "", shown.theory_tables),
            Block("Heat maps", maps, (), pictures["map"]),
            Block("Tables of all metrics", "", shown.tables),
        ]
    else:
        kind, notes = "Experiments", notes + group.left_out
        conditions = [list(item) for item in group.task.conditions.items()]
        meanings = Table("Conditions", ["condition", "meaning"], conditions)
        blocks = [Block("Tables", "", [*shown.tables, meanings])]
    blocks = [block for block in blocks if block.tables or block.pictures]
    return Section(*names, shown.about, kind, blocks, shown, group.is_task, notes)


def _title(groups: Sequence[Group]) -> str:
    names = {
        axis: list(dict.fromkeys(
            x.task.name for x in groups if not x.is_pretrained and (x.task.axis == "n") == axis
        ))
        for axis in (True, False)
    }  # fmt: skip
    if not names[True] and not names[False]:
        return "Attention variants in pretrained models"
    title = "Length generalization of attention variants" if names[True] else "Output layers"
    shown = names[True] or names[False]
    return title + f": {shown[0]}" * (len(shown) == 1)


def _values(rows: Sequence[Row], name: str) -> str:
    return ", ".join(map(str, distinct(rows, name)))


def _what_was_run(groups: Sequence[Group]) -> str:
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return ""
    counts = (
        (len({group.task.name for group in groups}), "task"),
        (len({row["variant"] for row in rows}), "variant"),
        (len({row["seed"] for row in rows}), "seed"),
        (len(rows), "result"),
    )
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    versions = [f"{name} {_values(rows, name)}" for name in ("attnzoo", "torch", "commit")]
    return f"{words}; {', '.join(versions)}, on {_values(rows, 'device')}."


# ---- results of the commands ``ranks`` and ``in-context``


def stored(folders: Sequence[Path]) -> list[Section]:
    """The results of the commands in these folders, in the order of `COMMANDS`.

    Each command writes its tables to a CSV file and may write a figure beside it.

    Raises:
        UsageError: a file with the name of a command's tables has other contents.
    """
    return [
        _read(folder, name, number, many=len(folders) > 1)
        for name in COMMANDS
        for number, folder in enumerate(folders, 1)
        if (folder / f"{name}.csv").is_file()
    ]


def _read(folder: Path, name: str, number: int, many: bool) -> Section:
    file, image = folder / f"{name}.csv", folder / f"{name}.png"
    try:
        tables = read_tables(file.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise UsageError(
            f"{file}: {error}; write it again with python -m evals {name} --out {folder}"
        ) from error
    title = f"Figure of {name}"
    pictures = [Picture(name, title, "curve", image.read_bytes())] if image.is_file() else []
    heading, ident = (f"{name} · {folder}", f"{name}-{number}") if many else (name, name)
    return Section(ident, heading, COMMANDS[name], "Theory", [Block("", "", tables, pictures)])
