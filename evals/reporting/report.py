"""report.html: leaderboards, length curves, heat maps, tables, settings and rows in one file that
needs nothing else, no network and no server."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from typing import NamedTuple

from evals.harness.store import Row
from evals.reporting.drawings import WEIGHTS, curves, heat_maps, name_html
from evals.reporting.page import SCRIPT, STYLE
from evals.reporting.summary import Group, Point, Series, mixtures
from evals.reporting.tables import (
    PARTIAL,
    Table,
    chance_text,
    cost_table,
    learned_table,
    legend,
    more_tables,
    name_of,
    score_tables,
)
from evals.theory import trained_heads as theory

_FEW = 12  # so many failed cells are listed openly
_VERSIONS = ("schedule", "data", "torch", "attnzoo", "commit", "device")


class Laws(NamedTuple):
    """The heads of a group, fitted, and a picture of them (PNG)."""

    heads: Sequence[theory.Heads]
    picture: bytes | None = None


def report_html(groups: Sequence[Group], note: str, laws: Sequence[Laws] | None = None) -> str:
    """The page; every text is escaped. laws: one for each group, made here where not given."""
    laws = [Laws(theory.fitted(group)) for group in groups] if laws is None else laws
    names = _idents(groups)
    tasks = list(dict.fromkeys(group.task.name for group in groups))
    title = "Attention normalizers as length grows" + f": {tasks[0]}" * (len(tasks) == 1)
    hashed = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    # Should an escape ever be missed, the browser still runs only our script and fetches nothing.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{hashed}'"
    )
    body = [
        f"<header><h1>{escape(title)}</h1>{_what_was_run(groups)}{_notes(groups, note)}",
        _overview(groups, names),
        _failed(groups, names),
        "</header><main>",
        *(
            _section(group, name, heading, mine)
            for group, (name, heading), mine in zip(groups, names, laws)
        ),
        "</main>",
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _idents(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Each group's id and heading; groups of one task are told apart by what differs."""
    found = []
    for i, group in enumerate(groups):
        ident = re.sub(r"[^a-z0-9-]", "-", group.task.name.lower())
        same = [j for j, other in enumerate(groups) if other.task is group.task]
        heading = group.task.name
        if len(same) > 1:
            ident += f"-{same.index(i) + 1}"
            heading += f" · {group.apart}"
        found.append((ident, heading))
    return found


def _values(rows: Sequence[Row], name: str) -> str:
    return ", ".join(sorted({str(row[name]) for row in rows}))


def _facts(group: Group) -> dict[str, str]:
    """What the figures depend on, and where they come from."""
    settings = {name: str(value) for name, value in group.settings.items()}
    return settings | {name: _values(group.rows, name) for name in _VERSIONS}


def _what_was_run(groups: Sequence[Group]) -> str:
    rows = [row for group in groups for row in group.rows]
    series = {one for group in groups for one in group.series}
    counts = (
        (len({group.task.name for group in groups}), "task"),
        (len({one.variant for one in series}), "variant"),
        (len({row["seed"] for row in rows}), "seed"),
        (len(rows), "row"),
    )
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)
    versions = [f"{name} {_values(rows, name)}" for name in ("attnzoo", "torch", "commit")]
    versions.append(f"on {_values(rows, 'device')}")
    return f"<p class='soft'>{escape(words)}; {escape(', '.join(versions))}.</p>"


def _notes(groups: Sequence[Group], note: str) -> str:
    lines = [f"<p class='note'>{escape(note)}</p>"] if note else []
    warnings = mixtures(groups)
    lines += [f"<p class='note warning'>{escape(warning)}</p>" for warning in warnings]
    return "".join(lines)


def _wide(head: str, body: str, foot: str = "", kind: str = "") -> str:
    """A table that scrolls sideways by itself, and not the page."""
    return (
        f"<div class='wide' tabindex='0' role='group' aria-label='table'><table{kind}><thead><tr>"
        f"{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>"
    )


def _overview(groups: Sequence[Group], names: Sequence[tuple[str, str]]) -> str:
    header = ["task", "score", "trained to", "tested to", "series", "seeds", "failed", "best there"]
    body = []
    for group, (ident, heading) in zip(groups, names):
        best, longest = ranked(group)[0], group.lengths[-1]
        point = group.points[best, longest]
        found = point.metrics.get(group.task.score.name)
        top = f"{name_of(group, best)}: {_shown(group, point)}" if found else "—"
        failed = sum(sum(p.failures.values()) for p in group.points.values())
        cells = [
            group.task.score.title.split(":")[0], f"n = {group.settings['train_longest']}",
            f"n = {longest}", len(group.series), len(group.seeds), failed or "—", top,
        ]  # fmt: skip
        first = f"<th scope='row'><a href='#{ident}'>{escape(heading)}</a></th>"
        rest = "".join(f"<td class='text'>{escape(str(cell))}</td>" for cell in cells)
        body.append(f"<tr>{first}{rest}</tr>")
    head = "".join(f"<th scope='col' class='text'>{escape(cell)}</th>" for cell in header)
    return f"<nav aria-label='Contents'><h3>Tasks</h3>{_wide(head, ''.join(body))}</nav>"


def _failed(groups: Sequence[Group], names: Sequence[tuple[str, str]]) -> str:
    lines = []
    for group, (ident, heading) in zip(groups, names):
        for point in group.points.values():
            if not point.failures:
                continue
            words = f"{point.series.label}, n = {point.length}"
            where = escape(words)
            if point.rows:
                where = f"<a href='#{_cell_ident(group, ident, point)}'>{where}</a>"
            what = ", ".join(f"{name} in {n} of {len(group.seeds)} seeds"
                             for name, n in point.failures.items())  # fmt: skip
            more = f": {'; '.join(point.messages)}" if point.messages else ""
            lines.append(f"<li>{escape(heading)}: {where} — {escape(what + more)}</li>")
    if not lines:
        return ""
    plural = "s" * (len(lines) != 1)
    return (
        f"<details class='print' id='failed'{' open' * (len(lines) <= _FEW)}><summary>{len(lines)} "
        f"cell{plural} failed or missing</summary><ul class='soft'>{''.join(lines)}</ul></details>"
    )


def _cell_ident(group: Group, ident: str, point: Point) -> str:
    return f"{ident}-{group.series.index(point.series)}-{point.length}"


def ranked(group: Group) -> list[Series]:
    """The series by their score at the longest length, the best first, failed ones last."""
    score = group.task.score

    def place(series: Series) -> tuple[bool, float]:
        found = group.points[series, group.lengths[-1]].metrics.get(score.name)
        if found is None:
            return True, 0.0
        return False, found.mean if score.lower_is_better else -found.mean

    return sorted(group.series, key=place)


def _shown(group: Group, point: Point) -> str:
    score = group.task.score
    return f"{score.factor * point.metrics[score.name].mean:.{score.digits}f}"


def _distance(group: Group, length: int) -> str:
    longest = group.settings["train_longest"]
    if length == longest:
        return "in distribution"
    return "in training" if length < longest else f"× {length / longest:.3g}"


def _leaderboard(group: Group, ident: str, order: Sequence[Series]) -> str:
    score, ends = group.task.score, group.lengths[-1]
    first = "ascending" if score.lower_is_better else "descending"
    head = "<th scope='col' data-first='ascending'><button type='button'>series</button></th>"
    for length in group.lengths:
        now = f" aria-sort='{first}'" if length == ends else ""
        head += (
            f"<th scope='col' data-first='{first}'{now}><button type='button'>{length}</button>"
            f"<small>{escape(_distance(group, length))}</small></th>"
        )
    body = "".join(
        f"<tr><th scope='row' data-value='{escape(one.label, quote=True)}'>"
        f"{name_html(group, one)}</th>"
        + "".join(_score_cell(group, ident, point) for point in group.of(one))
        + "</tr>"
        for one in order
    )
    chance = f"{score.factor * group.chance:.{score.digits}f}"
    foot = f"<tfoot><tr><th scope='row'>chance</th>{f'<td>{chance}</td>' * len(group.lengths)}"
    return _wide(head, body, foot + "</tr></tfoot>", " class='sortable'")


def _score_cell(group: Group, ident: str, point: Point) -> str:
    score = group.task.score
    found, failed = point.metrics.get(score.name), "+".join(point.failures)
    text = failed or "—"
    attributes = span = ""
    if found is not None:
        text = _shown(group, point) + (PARTIAL if failed else "")
        attributes = f" data-value='{found.mean:.9g}'"
        if score.factor == 100 and not score.lower_is_better:
            attributes += f" style='--part:{min(100.0, max(0.0, 100 * found.mean)):.4g}%'"
        if found.interval is not None:
            span = f"<small>{escape(found.span(score.factor, score.digits))}</small>"
    shown = escape(text)
    if point.rows:
        shown = f"<a href='#{_cell_ident(group, ident, point)}'>{shown}</a>"
    return f"<td{attributes}>{shown}{span}</td>"


def _heading(text: str, ident: str) -> str:
    return f"<h3>{escape(text)}<a class='rows' href='#{ident}-rows'>rows</a></h3>"


def _section(group: Group, ident: str, heading: str, laws: Laws) -> str:
    score, order = group.task.score, ranked(group)
    better = "lower" if score.lower_is_better else "higher"
    means = (
        f"Mean over {len(group.seeds)} seeds, and its 95 % bootstrap interval over them"
        if len(group.seeds) > 1
        else "One seed, so without intervals"
    )
    words = (
        f"{score.title}, by length n. {means}; {better} is better; chance is {chance_text(group)}. "
        "A column's head sorts by it, a figure leads to its rows."
    )
    marks = "".join(f"<p class='soft'>{escape(line)}</p>" for line in legend(group))
    return "\n".join(
        [
            f"<section id='{ident}'><h2>{escape(heading)}</h2><p>{escape(group.task.about)}</p>",
            f"{_heading('Leaderboard', ident)}<p class='soft'>{escape(words)}</p>",
            _leaderboard(group, ident, order),
            marks,
            _heading("Length curves", ident),
            curves(group, order),
            _theory(group, ident, laws),
            _maps(group, ident, order),
            _tables(group, ident),
            f"<h3>Settings, versions and rows</h3>{_settings(group)}{_rows(group, ident)}",
            "</section>",
        ]
    )


def _theory(group: Group, ident: str, laws: Laws) -> str:
    shown = "".join(map(_table, theory.tables(group, laws.heads)))
    if laws.picture is not None:
        words = (
            "The largest weight of each series' sharpest head against n, and the law fitted to it"
        )
        data = b64encode(laws.picture).decode()
        shown += f"<p><img alt='{escape(words, True)}' src='data:image/png;base64,{data}'></p>"
    return f"{_heading('Theory beside measurement', ident)}{shown}" if shown else ""


def _folded(title: str, content: str, kind: str = "") -> str:
    return f"<details{kind}><summary>{escape(title)}</summary>{content}</details>"


def _maps(group: Group, ident: str, order: Sequence[Series]) -> str:
    def ranks(count: int) -> list[str]:
        return [str(i + 1) for i in range(count)]

    def head_names(count: int) -> list[str]:
        return theory.head_names(count, group.settings.get("heads", count))

    over = ", mean over seeds" * (len(group.seeds) > 1)
    found = [
        (f"Mean weight of the closest keys, by rank, the true key first{over}",
         heat_maps(group, "best_keys", order, ranks, WEIGHTS)),
        (f"Bits per byte along the sequence, by sixteenth{over}",
         heat_maps(group, "bits_by_position", order, ranks, None)),
        (f"Largest weight of each head, by layer and head{over}",
         heat_maps(group, "head_peak", order, head_names, WEIGHTS)),
    ]  # fmt: skip
    shown = "".join(_folded(title, drawn) for title, drawn in found if drawn)
    words = "<p class='soft'>A small map for each series, a line for each length n.</p>"
    return f"{_heading('Heat maps', ident)}{words}{shown}" if shown else ""


def _table(table: Table) -> str:
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    note = f"<p class='soft'>{escape(table.note)}</p>" if table.note else ""
    return _folded(table.title, note + _wide(head, body), " class='print'")


def _tables(group: Group, ident: str) -> str:
    learned = learned_table(group)
    tables = [*score_tables(group), *more_tables(group), *([learned] if learned else [])]
    shown = "".join(_table(table) for table in [*tables, cost_table(group)])
    return f"{_heading('Tables', ident)}{shown}"


def _settings(group: Group) -> str:
    facts = _facts(group) | {"seeds": ", ".join(map(str, group.seeds))}
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    return _folded("Settings and versions", f"<dl>{listed}</dl>", " class='print'")


def _rows(group: Group, ident: str) -> str:
    """The raw rows; the first of each cell is what the leaderboard's figures lead to."""
    metrics = [metric.name for metric in group.task.metrics]
    header = [
        "variant",
        "positions",
        "n",
        "seed",
        "status",
        *metrics,
        "sequences",
        "key",
        "message",
    ]
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in header)
    body = []
    for point in group.points.values():
        mark = f" id='{_cell_ident(group, ident, point)}'"
        for row in sorted(point.rows, key=lambda row: row["seed"]):
            figures = [f"{row['metrics'][m]:.6g}" if m in row["metrics"] else "" for m in metrics]
            cells = [row["positions"], row["length"], row["seed"], row["status"], *figures]
            cells += [row["sequences"], row["key"]]
            rest = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
            body.append(
                f"<tr{mark}><th scope='row'>{escape(row['variant'])}</th>{rest}"
                f"<td class='text'>{escape(row['message'])}</td></tr>"
            )
            mark = ""
    table = _wide(head, "\n".join(body))
    return _folded(f"Rows ({len(group.rows)})", table, f" id='{ident}-rows'")
