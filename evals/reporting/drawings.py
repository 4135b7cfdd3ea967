"""The report's drawings: length curves, which the page's script draws from embedded numbers, and
heat maps as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

from evals.reporting.summary import BASELINE, Estimate, Group, Series
from evals.reporting.tables import name_of

# Okabe and Ito's, as in the pictures: they survive the common kinds of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#882255")
_CIRCLE = "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z"
# Nine shapes and eight colours: their pairs repeat only after 72 series.
_MARKERS = (
    "M-3.3-3.3h6.6v6.6h-6.6z",
    "M0-4.8L4.8 0L0 4.8L-4.8 0z",
    "M0-4.6L4.4 3.4h-8.8z",
    "M0 4.6L4.4-3.4h-8.8z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M4.6 0L-3.4 4.4v-8.8z",
    "M-4.6 0L3.4 4.4v-8.8z",
    "M-4-4h2.6L0-1.6L1.4-4H4L1.5 0L4 4H1.4L0 1.6L-1.4 4H-4L-1.5 0z",
    "M0-5L1.4-1.6L5-1.4L2.2.8L3.1 4.3L0 2.3L-3.1 4.3L-2.2.8L-5-1.4L-1.4-1.6z",
)
_BLUES = ("f7fbff", "deebf7", "c6dbef", "9ecae1", "6baed6", "4292c6", "2171b5", "08519c", "08306b")
_MAP_WIDTH = 240.0  # of a heat map's cells, in SVG units
_ROW = 15.0


@dataclass(frozen=True)
class Look:
    """How a series is drawn: by colour, and without it by marker and dashes."""

    colour: str
    marker: str
    dash: str
    wide: bool


def looks(series: Sequence[Series]) -> dict[Series, Look]:
    """Softmax is black and solid; what was swapped in at inference is dashed."""
    colours, markers = cycle(COLOURS), cycle(_MARKERS)
    black, found, used = cycle((_CIRCLE, *_MARKERS)), {}, 0
    for one in series:
        if one.variant == BASELINE:
            found[one] = Look("black", next(black), "", True)
            continue
        again = used // len(COLOURS) % 2
        swapped = "->" in one.variant
        dash = ("9 3 2 3" if again else "6 4") if swapped else ("2 2.5" if again else "")
        found[one] = Look(next(colours), next(markers), dash, False)
        used += 1
    return found


def name_html(group: Group, series: Series) -> str:
    """A series' marked name, which a narrow column does not break inside an arrow."""
    return escape(name_of(group, series)).replace("-&gt;", "<span class='to'>-&gt;</span><wbr>")


def embedded(data: object) -> str:
    """JSON that nothing in it can end early, inside a script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _value(found: Estimate | None) -> list[float] | None:
    if found is None or not math.isfinite(found.mean):
        return None
    return [float(f"{x:.7g}") for x in (found.mean, *(found.interval or ()))]


def curve_data(group: Group, order: Sequence[Series]) -> dict[str, object]:
    """What the script draws: of each series and metric [mean, low, high] by length, or null."""
    look = looks(group.series)
    score = group.task.score
    metrics = [
        {
            "title": m.title.split(":")[0], "factor": m.factor, "digits": m.digits, "log": m.log,
            "chance": group.chance if m is score else None,
        }
        for m in group.task.metrics
    ]  # fmt: skip
    series = [
        {
            "name": name_of(group, one), "colour": look[one].colour, "marker": look[one].marker,
            "dash": look[one].dash, "wide": look[one].wide,
            "values": [
                [_value(group.points[one, n].metrics.get(m.name)) for n in group.lengths]
                for m in group.task.metrics
            ],
        }
        for one in order
    ]  # fmt: skip
    train = [group.settings["train_shortest"], group.settings["train_longest"]]
    return {"lengths": group.lengths, "train": train, "metrics": metrics, "series": series}


def _options(values: Sequence[object], chosen: int) -> str:
    return "".join(
        f"<option value='{i}'{' selected' * (i == chosen)}>{escape(str(value))}</option>"
        for i, value in enumerate(values)
    )


def curves(group: Group, order: Sequence[Series]) -> str:
    """The figure of the length curves, hidden until the script has drawn it."""
    look = looks(group.series)
    buttons = "".join(
        f"<li><button type='button' aria-pressed='true'>"
        f"<svg width='34' height='12' viewBox='-17 -6 34 12' aria-hidden='true'>"
        f"<path d='M-17 0h34' stroke='{look[one].colour}' stroke-dasharray='{look[one].dash}' "
        f"stroke-width='{2.4 if look[one].wide else 1.6}'/>"
        f"<path d='{look[one].marker}' fill='{look[one].colour}' stroke='#fff' stroke-width='.8'/>"
        f"</svg><span>{name_html(group, one)}</span><span></span></button></li>"
        for one in order
    )
    metrics = [
        metric.title + (" (lower is better)" if metric.lower_is_better else "")
        for metric in group.task.metrics
    ]
    words = f"{group.task.name}: curves over length. Arrow keys move between lengths and series."
    return (
        "<noscript><p class='soft'>The curves need JavaScript; the tables hold the same "
        "numbers.</p></noscript><figure class='curves' hidden><div class='controls'>"
        f"<label>metric <select>{_options(metrics, 0)}</select></label>"
        f"<label>values at n = <select>{_options(group.lengths, len(group.lengths) - 1)}</select>"
        "</label></div><div class='plot'>"
        f"<svg role='img' tabindex='0' aria-label='{escape(words, quote=True)}'></svg>"
        "<output></output></div><div><div class='pick'>"
        "<button type='button' data-all='true'>show all</button>"
        "<button type='button' data-all='false'>hide all</button></div>"
        f"<ul class='legend'>{buttons}</ul></div>"
        f"<script type='application/json'>{embedded(curve_data(group, order))}</script></figure>"
    )


def _blue(share: float) -> str:
    """Between nearly white and dark blue."""
    place = min(1.0, max(0.0, share)) * (len(_BLUES) - 1)
    index = min(int(place), len(_BLUES) - 2)
    ends = [[int(one[i : i + 2], 16) for i in (0, 2, 4)] for one in _BLUES[index : index + 2]]
    mixed = (round(a + (place - index) * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


@dataclass(frozen=True)
class Scale:
    """Colours of a heat map's values, and the words at the ends of its key."""

    share: Callable[[float], float]
    text: Callable[[float], str]
    ends: tuple[str, str]


def _short(weight: float) -> str:
    """A weight in a small cell, as ".87" or ".003"."""
    text = f"{weight:.{2 if weight >= 0.01 else 3}f}".rstrip("0").rstrip(".")
    return text.removeprefix("0") or "0"


WEIGHTS = Scale(
    lambda w: 1 + math.log10(max(w, 1e-3)) / 3, _short, ("0.001 or less", "1 (log scale)")
)


def linear(values: Sequence[float]) -> Scale:
    """From the least of the values to the largest."""
    low, high = min(values), max(values)
    return Scale(
        lambda x: (x - low) / ((high - low) or 1), "{:.2f}".format, (f"{low:.2f}", f"{high:.2f}")
    )


def _map(lines: Sequence[tuple[int, Sequence[float]]], columns: Sequence[str], scale: Scale) -> str:
    """One heat map: a row for each length, a column for each value."""
    width = min(36.0, _MAP_WIDTH / len(columns))
    parts = []
    step = max(1, math.ceil(len(columns) * 26 / _MAP_WIDTH))
    for i in range(0, len(columns), step):
        x = 44 + width * (i + 0.5)
        parts.append(f"<text x='{x:.5g}' y='10' text-anchor='middle'>{escape(columns[i])}</text>")
    for row, (length, values) in enumerate(lines):
        y = 14 + _ROW * row
        parts.append(f"<text x='39' y='{y + 11:g}' text-anchor='end'>{length}</text>")
        for i, value in enumerate(values):
            x, share = 44 + width * i, scale.share(value)
            parts.append(
                f"<rect x='{x:.5g}' y='{y:g}' width='{width:.4g}' height='{_ROW:g}' "
                f"fill='{_blue(share)}'><title>n = {length}, {escape(columns[i])}: "
                f"{value:.3g}</title></rect>"
            )
            if width >= 24:
                parts.append(
                    f"<text class='{'on' if share > 0.55 else 'in'}' x='{x + width / 2:.5g}' "
                    f"y='{y + 11:g}' text-anchor='middle'>{scale.text(value)}</text>"
                )
    size = f"0 0 290 {16 + _ROW * len(lines):g}"
    return f"<svg viewBox='{size}' role='img' aria-label='heat map'>{''.join(parts)}</svg>"


def heat_maps(
    group: Group, curve: str, order: Sequence[Series], columns: Callable[[int], list[str]],
    scale: Scale | None,
) -> str:  # fmt: skip
    """A small heat map of one curve for each series that has it; "" where none has.

    Args:
        columns: the names of so many columns.
        scale: None for one from the least value to the largest.
    """
    found = {
        one: lines
        for one in order
        if (lines := [(p.length, v) for p in group.of(one) if (v := p.curves.get(curve))])
    }
    if not found:
        return ""
    every = [value for lines in found.values() for _, values in lines for value in values]
    scale = scale or linear(every)
    drawn = "".join(
        f"<figure><figcaption>{name_html(group, one)}</figcaption>"
        f"{_map(lines, columns(max(len(values) for _, values in lines)), scale)}</figure>"
        for one, lines in found.items()
    )
    swatches = "".join(
        f"<rect x='{14 * i}' width='14' height='12' fill='#{colour}'/>"
        for i, colour in enumerate(_BLUES)
    )
    key = (
        f"<p class='scale soft'><span>{escape(scale.ends[0])}</span>"
        f"<svg viewBox='0 0 126 12' aria-hidden='true'>{swatches}</svg>"
        f"<span>{escape(scale.ends[1])}</span></p>"
    )
    return f"{key}<div class='maps'>{drawn}</div>"
