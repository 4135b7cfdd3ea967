"""Makes report.html: leaderboards, figures, tables, settings and result rows in one file that needs
no network and no server. Its markup, style and script are in ``template``."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from commandline.table import Table
from evals.reporting.leaderboard import Leaderboard, leaderboard
from evals.reporting.pictures import Picture
from evals.reporting.scores import EFFECTIVE_SHARE
from evals.reporting.stored import StoredResults
from evals.reporting.tables import (
    chance_text,
    cost_table,
    learned_table,
    legend,
    more_tables,
    score_tables,
    settings_table,
)
from evals.results.rows import Row
from evals.results.summary import UNTRAINED, Group, Point, version_warnings
from evals.theory import trained_heads as theory

TEMPLATE = Path(__file__).parent / "template"
_OPEN = 12  # longer lists of failures start collapsed
_VERSIONS = ("schedule", "data", "torch", "attnzoo", "commit", "device")
_SETTINGS = {"train_shortest": "shortest train length", "train_longest": "train length"}


@dataclass(frozen=True, eq=False)
class ShownGroup:
    """A group with its fitted heads and its pictures."""

    group: Group
    heads: Sequence[theory.Heads]
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, eq=False)
class Section:
    """The section of the page about one group. ident: its HTML id."""

    shown: ShownGroup
    ident: str
    heading: str

    @property
    def group(self) -> Group:
        return self.shown.group

    def _pictures(self, kind: str) -> list[Picture]:
        return [picture for picture in self.shown.pictures if picture.kind == kind]

    @property
    def curves(self) -> list[Picture]:
        return self._pictures("curve")

    @property
    def theory(self) -> list[Picture]:
        return self._pictures("theory")

    @property
    def maps(self) -> list[Picture]:
        return self._pictures("map")

    @cached_property
    def board(self) -> Leaderboard:
        return leaderboard(self.group)

    @property
    def legend(self) -> list[str]:
        return legend(self.group)

    @property
    def theory_tables(self) -> list[Table]:
        return theory.tables(self.group, self.shown.heads)

    @property
    def tables(self) -> list[Table]:
        scores, makers = score_tables(self.group), (settings_table, learned_table)
        optional = [table for make_table in makers if (table := make_table(self.group)) is not None]
        return [*scores, *more_tables(self.group), *optional, cost_table(self.group)]

    @property
    def settings(self) -> dict[str, str]:
        """The settings, versions and seeds of the results, by their names on the page."""
        group_settings = self.group.settings.items()
        settings = {
            _SETTINGS.get(name, name.replace("_", " ")): str(value)
            for name, value in group_settings
        }
        versions = {name: _values(self.group.rows, name) for name in _VERSIONS}
        return settings | versions | {"seeds": ", ".join(map(str, self.group.seeds))}

    def overview(self) -> list[object]:
        """The group's line in the table of contents."""
        group, best = self.group, self.board.lines[0]
        score, longest = group.task.score, group.lengths[-1]
        top = best.cells[-1]
        failed = sum(sum(point.failures.values()) for point in group.points.values())
        return [
            score.title.split(":")[0], f"n = {group.settings['train_longest']}", f"n = {longest}",
            len(group.series), len(group.seeds), failed or "—",
            "—" if top.value is None else f"{best.name}: {top.text}",
        ]  # fmt: skip

    def how_to_read(self) -> str:
        score, seeds = self.group.task.score, len(self.group.seeds)
        better = "Lower" if score.lower_is_better else "Higher"
        means = "One seed, so there are no intervals."
        if seeds > 1:
            means = f"Large numbers: mean over {seeds} seeds; small: its 95 % bootstrap interval."
        effective = (
            " Effective length: the longest n up to which the score stays above "
            f"{100 * EFFECTIVE_SHARE:g} % of its value at the train length; — for variants with "
            f"{UNTRAINED}."
        )
        return (
            f"{score.title}, by variant and eval length n. "
            f"{means} {better} is better; blind guessing reaches "
            f"{chance_text(score, self.group.chance)}. Click on a column to sort by it, on a score "
            f"to see its result rows.{effective * self.board.has_effective}"
        )

    def point_ident(self, point: Point) -> str:
        """The HTML id of the first row of one variant at one length; the leaderboard links here."""
        return f"{self.ident}-{self.group.series.index(point.series)}-{point.length}"

    @property
    def row_header(self) -> list[str]:
        metrics = [metric.name for metric in self.group.metrics]
        start = ["variant", "position encoding", "n", "seed", "status"]
        return [*start, *metrics, "sequences", "key", "message"]

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Pairs (HTML id, cells) for all rows. Only the first row of each `Point` has an id."""
        metrics = [metric.name for metric in self.group.metrics]
        for point in self.group.points.values():
            ident = self.point_ident(point)
            for row in sorted(point.rows, key=lambda row: row["seed"]):
                start = [row[name] for name in ("variant", "positions", "length", "seed", "status")]
                row_metrics = row["metrics"]
                figures = [
                    f"{row_metrics[name]:.6g}" if name in row_metrics else "" for name in metrics
                ]
                yield ident, [*start, *figures, row["sequences"], row["key"], row["message"]]
                ident = ""


def report_html(
    shown: Sequence[ShownGroup],
    note: str,
    theory_results: Sequence[StoredResults] = (),
    pretrained: Sequence[StoredResults] = (),
) -> str:
    """The HTML of the whole page. All text from results is escaped.

    theory_results: stored results of commands such as ``ranks``, shown below the tasks.
    pretrained: results of pretrained models, shown below these.
    """
    groups = [x.group for x in shown]
    sections = _sections(shown)
    tasks = list(dict.fromkeys(group.task.name for group in groups))
    script = (TEMPLATE / "report.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: b64encode(data).decode()
    return environment.get_template("report.html.j2").render(
        title=_title(tasks),
        what_was_run=_what_was_run(groups) if groups else "",
        note=note,
        warnings=version_warnings(groups),
        sections=sections,
        stored=theory_results,
        pretrained=pretrained,
        failed=_failed(sections),
        open=_OPEN,
        style=Markup((TEMPLATE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


def _title(tasks: Sequence[str]) -> str:
    if not tasks:
        return "Attention variants in pretrained models"
    return "Length generalization of attention variants" + f": {tasks[0]}" * (len(tasks) == 1)


def _sections(shown: Sequence[ShownGroup]) -> list[Section]:
    """A section for each group. If a task has several groups, the headings name the settings that
    differ."""
    sections = []
    for shown_group in shown:
        task = shown_group.group.task
        ident, heading = re.sub(r"[^a-z0-9-]", "-", task.name.lower()), task.name
        of_task = [other for other in shown if other.group.task is task]
        if len(of_task) > 1:
            ident += f"-{of_task.index(shown_group) + 1}"
            heading += f" · {shown_group.group.distinction}"
        sections.append(Section(shown_group, ident, heading))
    return sections


def _values(rows: Sequence[Row], name: str) -> str:
    return ", ".join(sorted({str(row[name]) for row in rows}))


def _what_was_run(groups: Sequence[Group]) -> str:
    rows = [row for group in groups for row in group.rows]
    all_series = {series for group in groups for series in group.series}
    counts = (
        (len({group.task.name for group in groups}), "task"),
        (len({series.variant for series in all_series}), "variant"),
        (len({row["seed"] for row in rows}), "seed"),
        (len(rows), "result"),
    )
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    versions = [f"{name} {_values(rows, name)}" for name in ("attnzoo", "torch", "commit")]
    return f"{words}; {', '.join(versions)}, on {_values(rows, 'device')}."


def _failed(sections: Sequence[Section]) -> list[tuple[Section, Point, str]]:
    """Tuples (section, point, reasons) of all points with failed or missing seeds."""
    failed = []
    for section in sections:
        seeds = len(section.group.seeds)
        for point in section.group.points.values():
            if point.failures:
                counts = point.failures.items()
                text = ", ".join(f"{status} in {n} of {seeds} seeds" for status, n in counts)
                messages = f": {'; '.join(point.messages)}" if point.messages else ""
                failed.append((section, point, text + messages))
    return failed
