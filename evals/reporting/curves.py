"""Curves of the score against n as inline SVG: one large figure of a table, and one in each row.

Softmax and the axes have the colour of the text. The other colours have a contrast of at least 3 to
a white and to a dark page. A row of the table and its curve have the same number and colour, so the
table is the legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from evals.results.summary import BASELINE, Series
from evals.results.summary_csv import Summary

COLOURS = ("#1b7fc4", "#d55e00", "#00966c", "#b75a9c", "#a67c00", "#7a6fd0", "#c8453b", "#7f7f7f")
FEWEST_ROWS = 3  # a smaller table has no figure
_TICKS = 4  # of the y axis, besides the lowest
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 480, 300, 40, 448, 256, 8


def _look(rank: int, series: Series) -> str:
    """The attributes of a line. After all colours were used, lines are dashed."""
    if series.variant == BASELINE:
        return "stroke='currentColor' stroke-width='2.5'"
    dashes = " stroke-dasharray='5 3'" if rank // len(COLOURS) % 2 else ""
    return f"stroke='{COLOURS[rank % len(COLOURS)]}' stroke-width='1.5'{dashes}"


def _range(summary: Summary) -> tuple[float, float]:
    """The ends of the y axis: 0 and 1 for a percentage, otherwise the least and largest mean."""
    score = summary.task.score
    if score.factor == 100:
        return 0.0, 1.0
    means = [m.mean for (_, _, name), m in summary.means.items() if name == score.name]
    low = min(means, default=0.0)
    return low, max([*means, low + 1e-9])


def _points(summary: Summary, series: Series, box: Sequence[float]) -> list[tuple[float, float]]:
    """The means of a row as points in a box (left, right, bottom, top), with a log axis of n."""
    left, right, bottom, top = box
    (low, high), score, ends = _range(summary), summary.task.score, (summary.xs[0], summary.xs[-1])
    span = math.log(ends[1] / ends[0]) or 1.0
    return [
        (left + (right - left) * math.log(x / ends[0]) / span,
         bottom + (top - bottom) * (min(high, max(low, mean.mean)) - low) / (high - low))
        for x in summary.xs
        if (mean := summary.mean(series, x, score.name)) is not None
    ]  # fmt: skip


def _line(points: Sequence[tuple[float, float]], look: str, title: str = "") -> str:
    text = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    inside = f"<title>{escape(title)}</title>" * bool(title)
    return f"<polyline points='{text}' {look}>{inside}</polyline>"


def sparkline(summary: Summary, rank: int, series: Series) -> str:
    """The curve of one row, as high as a line of text."""
    line = _line(_points(summary, series, (1, 63, 17, 1)), _look(rank, series))
    size = "viewBox='0 0 64 18' width='64' height='18'"
    return f"<svg {size} fill='none' aria-hidden='true'>{line}</svg>"


def figure(summary: Summary) -> str:
    """The curves of all rows; empty for a table with few rows. Numbers at their ends are those of
    the rows."""
    ranked, score = summary.ranked(summary.task.score), summary.task.score
    if len(ranked) < FEWEST_ROWS or len(summary.xs) < 2:
        return ""
    box, (low, high) = (_LEFT, _RIGHT, _BOTTOM, _TOP), _range(summary)
    parts = []
    for k in range(_TICKS + 1):
        y = _BOTTOM + (_TOP - _BOTTOM) * k / _TICKS
        text = f"{score.factor * (low + (high - low) * k / _TICKS):.3g}"
        parts.append(_line([(_LEFT, y), (_RIGHT, y)], "stroke='currentColor' opacity='.2'"))
        parts.append(_text(_LEFT - 6, y + 4, text, "text-anchor='end'"))
    step, span = 1 + len(summary.xs) // 10, math.log(summary.xs[-1] / summary.xs[0])
    for n in summary.xs[::step]:
        x = _LEFT + (_RIGHT - _LEFT) * math.log(n / summary.xs[0]) / span
        parts.append(_text(x, _BOTTOM + 18, str(n), "text-anchor='middle'"))
    middle = (_LEFT + _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 6, "n (log scale)", "text-anchor='middle'"))
    if summary.chance is not None and low <= summary.chance <= high:
        y = _BOTTOM + (_TOP - _BOTTOM) * (summary.chance - low) / (high - low)
        parts.append(_line([(_LEFT, y), (_RIGHT, y)], "stroke='currentColor' "
                           "stroke-dasharray='2 3' opacity='.7'", "chance"))  # fmt: skip
    lines = {series: _points(summary, series, box) for series in ranked}
    ends = sorted((points[-1][1], rank, points[-1][0])
                  for rank, points in enumerate(lines.values()) if points)  # fmt: skip
    gap = min(14.0, (_BOTTOM - _TOP) / max(1, len(ends)))
    heights = apart([y for y, _, _ in ends], gap, _TOP, _BOTTOM)
    for (y, rank, x), height in zip(ends, heights, strict=True):
        series = ranked[rank]
        colour = _look(rank, series).split("'")[1]
        leader = f"stroke='{colour}' opacity='.5'"
        parts.append(_line(lines[series], _look(rank, series), f"{rank + 1}. {series.label}"))
        parts.append(_line([(x, y), (_RIGHT + 12, height)], leader))
        parts.append(_text(_RIGHT + 14, height + 4, str(rank + 1), f"fill='{colour}'"))
    label = f"{score.title} against n, a line for each row of the table"
    return (
        f"<figure class='curves'><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' fill='none' role='img' "
        f"aria-label='{escape(label)}'>\n" + "\n".join(parts) + "\n</svg></figure>\n"
    )


def _text(x: float, y: float, text: str, look: str) -> str:
    fill = "" if "fill" in look else " fill='currentColor'"
    return f"<text x='{x:.4g}' y='{y:.4g}' {look}{fill}>{escape(text)}</text>"


def apart(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Increasing heights, moved so that the names at these heights do not touch."""
    moved: list[float] = []
    for height in reversed(heights):
        moved.append(min(height, moved[-1] - gap if moved else high))
    placed: list[float] = []
    for height in reversed(moved):
        placed.append(max(height, placed[-1] + gap if placed else low))
    return placed
