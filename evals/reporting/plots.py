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

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from evals.results.summary import BASELINE, Group
from evals.task import Metric

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#882255")
_STYLES = ("-", "--", "-.", (0, (1, 1.2)))
_MARKERS = "osD^vP*X<>"
_FAINT = 1e-3  # weights at or below this have the darkest colour of a heat map
_MAP = "cividis"
_NAMED = 8  # a heat map with at most this many columns names each column and shows each value
_DPI = 150
GRID = {"color": "#dddddd", "linewidth": 0.6}


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


def svg(figure: Figure) -> bytes:
    """The figure as an SVG file with selectable text. The same figure gives the same bytes."""
    return _vector(figure, "svg", {"Date": None})


def pdf(figure: Figure) -> bytes:
    """The figure as a PDF file with TrueType fonts. The same figure gives the same bytes."""
    return _vector(figure, "pdf", {"CreationDate": None})


def _vector(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnzoo", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def looks_of(variants: list[str]) -> dict[str, dict[str, object]]:
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
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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

    gap = min(0.052, 1.04 / len(ends)) if ends else 0.0
    placed = sorted((min(1.0, max(0.0, height(y))), name, colour) for name, y, colour in ends)
    heights = [h for h, _, _ in placed]
    for _ in range(200):  # move names apart until none overlap
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 1e-4:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
        heights = [min(1.02, max(-0.02, h)) for h in heights]
    for (end, name, colour), y in zip(placed, heights, strict=True):
        axes.annotate(
            name,
            xy=(1.0, end),
            xytext=(1.04, y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=_darker(colour),
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def line_height(group: Group) -> float:
    """The height in inches of a figure with room for the name of each series."""
    return max(5.2, 1.2 + 0.27 * len(group.series))


def length_axis(axes: Axes, lengths: list[int], name: str = "number of keys n") -> None:
    """Make the x axis a log axis with a tick at each length, or at every second length if there
    are more than nine."""
    axes.set_xscale("log", base=2)
    step = 1 if len(lengths) <= 9 else 2
    axes.set_xticks(lengths[::step], [str(n) for n in lengths[::step]])
    axes.minorticks_off()
    axes.set_xlabel(f"{name} (log scale)")


def metric_plot(group: Group, metric: Metric) -> Figure:
    """One metric against n: a line per series, with a band of ± one standard error."""
    figure = Figure(figsize=(9.6, line_height(group)), layout="constrained")
    axes = figure.add_subplot()
    looks = looks_of([series.label for series in group.series])
    chance = None
    if metric is group.task.score and group.chance is not None:
        chance = metric.factor * group.chance
    ends, values = [], [] if chance is None else [chance]
    for series in group.series:
        means = {point.x: point.mean(metric.name) for point in group.of(series)}
        measured = {x: m for x, m in means.items() if m and (m.mean > 0 or not metric.log)}
        if not measured:
            continue
        y = np.array([metric.factor * mean.mean for mean in measured.values()])
        error = np.array([metric.factor * (mean.error or 0.0) for mean in measured.values()])
        look = {"linewidth": 1.6, "markersize": 4.5} | looks[series.label]
        axes.plot(list(measured), y, **look)  # type: ignore[arg-type]
        lower = np.maximum(y - error, y / 100) if metric.log else y - error
        colour = str(look["color"])
        axes.fill_between(list(measured), lower, y + error, color=colour, alpha=0.2, linewidth=0)
        ends.append((series.label, float(y[-1]), colour))
        values += y.tolist()
    length_axis(axes, group.xs, "eval length n")
    lowest = min(values, default=1.0)
    if metric.log:
        log_axis(axes, lowest, lowest / 1.5)  # a band can reach 0, which a log axis cannot show
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
    axes.set_title(f"{group.task.name}{distinction}: {metric.title}\n", loc="left", fontsize=12)
    where = {"transform": axes.transAxes, "fontsize": 8.5, "color": "#555555"}
    axes.text(0, 1.02, "; ".join(notes), **where)
    name_lines(axes, ends, metric.log)
    return figure


def log_axis(axes: Axes, lowest: float, low: float) -> None:
    """A log y axis from ``low`` to a little above 1. lowest: the smallest value."""
    axes.set_yscale("log")
    axes.set_ylim(low, 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if lowest < 0.005 else (1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


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


def head_maps(
    layers_by_label: dict[str, list[list[float]]],
    label: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A heat map by layer and head for each label, with one scale: ``limits``, or from the smallest
    to the largest value."""
    every = [x for layers in layers_by_label.values() for heads in layers for x in heads]
    low, high = limits or (min(every), max(every))
    figure, grid = panels(len(layers_by_label), 4, 2.8, 3.1)
    for axes, (title, layers) in zip(grid, layers_by_label.items(), strict=False):
        axes.imshow(_padded(layers), vmin=low, vmax=high, cmap=_MAP, aspect="auto")
        axes.set_title(fill(title, 40), fontsize=7)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.colorbar(grid[0].images[0], ax=grid, shrink=0.7, label=label)
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
    every = [value for points in drawn.values() for p in points for value in p.curves[curve]]
    norm = LogNorm(_FAINT, 1, clip=True) if weights else Normalize(min(every), max(every))
    figure, grid = panels(len(drawn), 3, 3.3, 0.9 + 0.2 * len(group.xs))
    for index, (axes, (variant, points)) in enumerate(zip(grid, drawn.items(), strict=False)):
        cells = _padded([p.curves[curve] for p in points])
        axes.imshow(cells, cmap=_MAP, norm=norm, aspect="auto")
        width = cells.shape[1]
        step = -(-width // _NAMED)
        for (row, column), value in np.ndenumerate(cells if step == 1 else cells[:, :1]):
            if not math.isnan(value):
                colour = "black" if norm(value) > 0.55 else "white"
                axes.text(column, row, _short(value), ha="center", va="center", fontsize=6,
                          color=colour)  # fmt: skip
        axes.set_title(variant, fontsize=9)
        axes.set_yticks(range(len(points)), [str(p.x) for p in points], fontsize=7)
        axes.set_xticks(range(0, width, step), columns(width)[::step], fontsize=7)
        axes.tick_params(length=0)
        if index % 3 == 0:
            axes.set_ylabel("n", fontsize=8)
    figure.suptitle(title, fontsize=12)
    label = "weight (log scale)" if weights else ""
    bar = figure.colorbar(ScalarMappable(norm, _MAP), ax=grid, label=label, shrink=0.7, pad=0.02)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    return figure
