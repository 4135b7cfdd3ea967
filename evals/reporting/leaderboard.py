"""The leaderboard: the first table of a task in the report."""

from __future__ import annotations

from typing import NamedTuple

from evals.reporting.scores import Value, of_group
from evals.reporting.tables import PARTIAL, verdict
from evals.results.summary import Group, Point
from evals.task import Metric


class Cell(NamedTuple):
    """A score in the leaderboard.

    text: the score as shown. span: its 95 % interval as shown. value: the score as a number, for
    sorting; None if there is none. percent: the width of the coloured bar; None if the score is
    not a percentage.
    """

    point: Point
    text: str
    span: str
    value: float | None
    percent: float | None


class LeaderboardLine(NamedTuple):
    """One series of the leaderboard.

    label: the text to sort by. name: the label with † and ‡. cells: one per
    length. effective: the effective length as shown.
    """

    label: str
    name: str
    cells: list[Cell]
    effective: str
    effective_length: int | None


class Leaderboard(NamedTuple):
    """Series by their score at the longest length, the best first, failed ones last.

    columns: pairs such as (256, "4 × train"). order: "descending", or "ascending" if lower is
    better. has_effective: whether the score has an effective length.
    """

    columns: list[tuple[int, str]]
    lines: list[LeaderboardLine]
    chance: str
    order: str
    has_effective: bool


def leaderboard(group: Group) -> Leaderboard:
    """The leaderboard of a group, with the score of its task."""
    score = group.task.score
    scores = of_group(group, score)
    score_lines = {(line.variant, line.encoding): line for line in scores.lines}
    lines = [
        LeaderboardLine(
            series.label,
            group.name(series),
            [
                _score_cell(point, score, value)
                for point, value in zip(group.of(series), score_lines[series].values, strict=True)
            ],
            score_lines[series].effective_text,
            None if (effective := score_lines[series].effective) is None else effective.length,
        )
        for series in group.series
    ]

    def rank(line: LeaderboardLine) -> tuple[bool, float]:
        value = line.cells[-1].value
        return value is None, (value or 0.0) * (1 if score.lower_is_better else -1)

    return Leaderboard(
        [(length, _distance(group, length)) for length in group.lengths],
        sorted(lines, key=rank),
        f"{score.factor * group.chance:.{score.digits}f}",
        "ascending" if score.lower_is_better else "descending",
        scores.has_effective,
    )


def _distance(group: Group, length: int) -> str:
    longest = group.settings["train_longest"]
    return "train length" if length == longest else f"{length / longest:.3g} × train"


def _score_cell(point: Point, score: Metric, value: Value) -> Cell:
    mean, failed = point.metrics.get(score.name), "+".join(point.failures)
    if mean is None:
        return Cell(point, failed or "—", "", None, None)
    text = f"{score.factor * mean.mean:.{score.digits}f}"
    text += verdict(value.p, value.difference, score) + (PARTIAL if failed else "")
    percent = None
    if score.factor == 100 and not score.lower_is_better:
        percent = round(min(100.0, max(0.0, 100 * mean.mean)), 2)
    return Cell(point, text, mean.span(score.factor, score.digits), mean.mean, percent)
