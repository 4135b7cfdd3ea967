"""Figures of a group: metrics against n, and heat maps of values by n and key, head or position.

Most colours are from the palette of Okabe and Ito, for readers with colour blindness. Markers tell
the variants apart without colour, and each line is named at its end.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from evals.reporting.curves import apart
from evals.results.summary import BASELINE, Group
from evals.task import Metric

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#882255")
_STYLES = ("-", "--", "-.", (0, (1, 1.2)))
_MARKERS = "osD^vP*X<>"
_FAINT = 1e-3  # weights at or below this have the darkest colour of a heat map
_MAP = "cividis"
_NAMED = 8  # a heat map with at most this many columns names each column and shows each value
_DPI = 150


def png(figure: Figure, dpi: int = _DPI) -> bytes:
    """The figure as the bytes of a PNG file."""
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # 256 colours shrink a file to a third; a report embeds dozens of figures.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(buffer, "png")
    return buffer.getvalue()


def vector(figure: Figure, kind: str) -> bytes:
    """The figure as an SVG file with selectable text or a PDF file with TrueType fonts.

    The same figure gives the same bytes.
    """
    buffer, date = io.BytesIO(), {"svg": "Date", "pdf": "CreationDate"}[kind]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnzoo", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata={date: None})
    return buffer.getvalue()


def looks_of(variants: list[str]) -> dict[str, dict[str, Any]]:
    """Matplotlib options for the line of each variant: colour, style, marker. Softmax is black."""
    colours, markers, looks, used = cycle(_COLOURS), cycle(_MARKERS), {}, 0
    for variant in variants:
        if variant.split(" · ")[0] == BASELINE:
            looks[variant] = {"color": "black", "linestyle": "-", "marker": "o", "linewidth": 2.2}
            continue
        style = _STYLES[1] if "->" in variant else _STYLES[0]
        if used >= len(_COLOURS):
            style = _STYLES[2 + used // len(_COLOURS) % 2]
        marker = next(markers)
        looks[variant] = {"color": next(colours), "linestyle": style, "marker": marker}
        used += 1
    return looks


def tidy(axes: Axes) -> None:
    """Light grid lines behind the data, and no frame at the top and the right."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_line(axes: Axes, x: Any, y: Any, low: Any, high: Any, alpha: float, **look: Any) -> None:
    """A line with a band from ``low`` to ``high``."""
    axes.plot(x, y, **{"linewidth": 1.6, **look})
    axes.fill_between(x, low, high, color=look["color"], alpha=alpha, linewidth=0)


def add_legend(figure: Figure, *sources: Axes, columns: int = 3) -> None:
    """A legend below the axes, with the lines of these axes; a name is shown once."""
    pairs = [axes.get_legend_handles_labels() for axes in sources]
    entries = {label: handle for pair in pairs for handle, label in zip(*pair, strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns,
                  frameon=False, fontsize=9)  # fmt: skip


def _darker(colour: str) -> str:
    """Mix the colour with black, because thin letters need more contrast than lines."""
    parts = [int(0.72 * part * 255) for part in to_rgb(colour)]
    return "#{:02x}{:02x}{:02x}".format(*parts)


def name_lines(axes: Axes, ends: list[tuple[str, float, str]], log: bool) -> None:
    """Write the name of each line at its right end. Names that would touch are moved apart.

    ends: for each line (name, y at its right end, colour).
    """
    low, high = axes.get_ylim()

    def height(y: float) -> float:
        if not log:
            return (y - low) / (high - low)
        return math.log(max(y, low) / low) / math.log(high / low)

    placed = sorted((min(1.0, max(0.0, height(y))), name, colour) for name, y, colour in ends)
    heights = apart([h for h, _, _ in placed], min(0.052, 1.04 / max(1, len(ends))), -0.02, 1.02)
    for (end, name, colour), y in zip(placed, heights, strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 0,
                 "relpos": (0, 0.5)}  # fmt: skip
        axes.annotate(
            name, xy=(1.0, end), xytext=(1.04, y), xycoords="axes fraction",
            textcoords="axes fraction", color=_darker(colour), fontsize=9, va="center",
            annotation_clip=False, arrowprops=arrow,
        )  # fmt: skip


def named_axes(group: Group) -> tuple[Figure, Axes]:
    """A new figure with room for the name of each series at the end of its line."""
    height = max(5.2, 1.2 + 0.27 * len(group.series))
    figure = Figure(figsize=(9.6, height), layout="constrained")
    return figure, figure.add_subplot()


def add_title(axes: Axes, title: str, notes: list[str]) -> None:
    """A title, and notes in small letters below it."""
    axes.set_title(f"{title}\n", loc="left", fontsize=12)
    where = {"transform": axes.transAxes, "fontsize": 8.5, "color": "#555555"}
    axes.text(0, 1.02, "; ".join(notes), **where)


def length_axis(axes: Axes, lengths: list[int], name: str = "number of keys n") -> None:
    """Make the x axis a log axis with a tick at each length, or at every second length if there
    are more than nine."""
    axes.set_xscale("log", base=2)
    step = 1 if len(lengths) <= 9 else 2
    axes.set_xticks(lengths[::step], [str(n) for n in lengths[::step]])
    axes.minorticks_off()
    axes.set_xlabel(f"{name} (log scale)")


def log_axis(axes: Axes, lowest: float = 1.0) -> None:
    """Make the y axis a log axis. lowest: the smallest value, which decides how many ticks fit."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if lowest < 0.005 else (1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def metric_plot(group: Group, metric: Metric) -> Figure:
    """One metric against n: a line per series, with a band of ± one standard error."""
    (figure, axes), ends = named_axes(group), []
    looks = looks_of([series.label for series in group.series])
    chance = None
    if metric is group.task.score and group.chance is not None:
        chance = metric.factor * group.chance
    values = [] if chance is None else [chance]
    for series in group.series:
        means = {point.x: point.mean(metric.name) for point in group.of(series)}
        measured = {x: m for x, m in means.items() if m and (m.mean > 0 or not metric.log)}
        if not measured:
            continue
        y = np.array([metric.factor * mean.mean for mean in measured.values()])
        error = np.array([metric.factor * (mean.error or 0.0) for mean in measured.values()])
        lower = np.maximum(y - error, y / 100) if metric.log else y - error
        look = {"markersize": 4.5} | looks[series.label]
        draw_line(axes, list(measured), y, lower, y + error, alpha=0.2, **look)
        ends.append((series.label, float(y[-1]), str(look["color"])))
        values += y.tolist()
    length_axis(axes, group.xs, "eval length n")
    if metric.log:
        lowest = min(values, default=1.0)
        log_axis(axes, lowest)
        axes.set_ylim(lowest / 1.5, 1.3)  # a band can reach 0, which a log axis cannot show
    else:
        axes.set_ylim(0, 104 if metric.factor == 100 else 1.04 * max(values, default=1.0))
    first, last = group.xs[0], group.xs[-1]
    axes.set_xlim(first / 1.3, last * 1.05)
    trained = group.settings["train_shortest"], group.settings["train_longest"]
    axes.axvspan(first / 1.3, trained[1], color="#eeeeee", zorder=0)
    if chance is not None:
        axes.axhline(chance, color="#555555", linewidth=0.9, linestyle=":")
        axes.annotate("chance", (first, chance), (2, 3), textcoords="offset points", fontsize=8)
    tidy(axes)
    seeds = "band: ± one standard error over seeds" if len(group.seeds) > 1 else "one seed"
    notes = [seeds, f"grey: train lengths, n = {trained[0]} to {trained[1]}"]
    if any("->" in series.variant for series in group.series):
        notes.append("dashed: a->b, trained with a, b substituted at inference")
    distinction = f" · {group.distinction}" if group.distinction else ""
    add_title(axes, f"{group.task.name}{distinction}: {metric.title}", notes)
    name_lines(axes, ends, metric.log)
    return figure


# ---- heat maps


def panels(count: int, wide: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with some axes, at most ``wide`` in a row; width and height of one in inches."""
    wide = min(wide, count)
    high = -(-count // wide)
    figure = Figure(figsize=(width * wide + 0.9, height * high + 0.7), layout="constrained")
    grid = list(figure.subplots(high, wide, squeeze=False).flat)
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid


def _padded(rows: list[list[float]]) -> np.ndarray:
    """Rows of different lengths as an array, with NaN after their ends."""
    cells = np.full((len(rows), max(map(len, rows))), np.nan)
    for index, row in enumerate(rows):
        cells[index, : len(row)] = row
    return cells


def _maps(
    cells: dict[str, list[list[float]]],
    norm: Normalize,
    label: str,
    wide: int,
    size: Any,
    **title: Any,
) -> tuple[Figure, list[Axes]]:
    """A heat map for each title, all with one colour scale. size: width and height of one."""
    figure, grid = panels(len(cells), wide, *size)
    for axes, (text, rows) in zip(grid, cells.items(), strict=False):
        axes.imshow(_padded(rows), cmap=_MAP, norm=norm, aspect="auto")
        axes.set_title(fill(text, 40), **title)
    bar = figure.colorbar(ScalarMappable(norm, _MAP), ax=grid, label=label, shrink=0.7)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    return figure, grid[: len(cells)]


def head_maps(
    layers_by_label: dict[str, list[list[float]]],
    label: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A heat map by layer and head for each label, with one scale: ``limits``, or from the smallest
    to the largest value."""
    every = [x for layers in layers_by_label.values() for heads in layers for x in heads]
    norm = Normalize(*(limits or (min(every), max(every))))
    figure, grid = _maps(layers_by_label, norm, label, 4, (2.8, 3.1), fontsize=7)
    for axes in grid:
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def _short(weight: float) -> str:
    """A weight as a short text, such as ".87" or ".003"."""
    text = f"{weight:.{2 if weight >= 0.01 else 3}f}".rstrip("0").rstrip(".")
    return text.removeprefix("0") or "0"


def heat_map(
    group: Group, curve: str, title: str, columns: Callable[[int], list[str]], weights: bool
) -> Figure | None:
    """One heat map for each variant and position encoding, with a row for each n.

    Returns None if no result row has the values.

    Args:
        group: the results.
        curve: the name of a list of values in the result rows, such as "head_peak". It has the
            values of a row of the heat map.
        title: the title of the figure.
        columns: a function of the number of columns that returns their names.
        weights: true if the values are weights. Weights have a log colour scale up to 1. Other
            values have a linear scale from the smallest to the largest.
    """
    drawn = {
        series.label: points
        for series in group.series
        if (points := [p for p in group.of(series) if p.curves.get(curve)])
    }
    if not drawn:
        return None
    cells = {label: [p.curves[curve] for p in points] for label, points in drawn.items()}
    every = [value for rows in cells.values() for row in rows for value in row]
    norm = LogNorm(_FAINT, 1, clip=True) if weights else Normalize(min(every), max(every))
    label = "weight (log scale)" if weights else ""
    size = 3.3, 0.9 + 0.2 * len(group.xs)
    figure, grid = _maps(cells, norm, label, 3, size, fontsize=9)
    for index, (axes, points) in enumerate(zip(grid, drawn.values(), strict=True)):
        shades = np.asarray(axes.images[0].get_array())
        width = shades.shape[1]
        step = -(-width // _NAMED)
        for (row, column), value in np.ndenumerate(shades if step == 1 else shades[:, :1]):
            if not math.isnan(value):
                colour = "black" if norm(value) > 0.55 else "white"
                axes.text(column, row, _short(value), ha="center", va="center", fontsize=6,
                          color=colour)  # fmt: skip
        axes.set_yticks(range(len(points)), [str(p.x) for p in points], fontsize=7)
        axes.set_xticks(range(0, width, step), columns(width)[::step], fontsize=7)
        axes.tick_params(length=0)
        if index % 3 == 0:
            axes.set_ylabel("n", fontsize=8)
    figure.suptitle(title, fontsize=12)
    return figure
