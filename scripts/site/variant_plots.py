"""Two plots of a variant: the weights of one row, and a leading key's weight against n."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import attnzoo
from commandline.variants import VariantCall, complete

BASELINE = "softmax"
ROW, LARGEST_LOGIT = 64, 4.0
LENGTHS = [2**i for i in range(3, 17)]
LEAD = 8.0
# The number of keys from which the values of required parameters are computed. It is large, so that
# cosformer's factor is close to 1.
LONGEST = 2**20

# A plot is drawn once, in light colors. The dark version has the colors replaced.
INK, GRID, GREY, BLUE = "#323638", "#d9dde0", "#7d8590", "#0a6f87"
DARK = {INK: "#ced6dd", GRID: "#3a4149", GREY: "#99a2ac", BLUE: "#3fc5dd"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text uses the fonts of the page
    "svg.hashsalt": "attnzoo",  # gives the same ids in each build
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor", "axes.edgecolor"), INK),
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.labelcolor": INK,
    "legend.frameon": False, "lines.linewidth": 2, "lines.markersize": 3,
}  # fmt: skip


def darkened(svg: str) -> str:
    for light, dark in DARK.items():
        svg = svg.replace(light, dark)
    return svg


def weights(name: str, logits: Tensor) -> Tensor:
    """The weights (n,) of one row with logits (n,)."""
    params = complete(VariantCall(name), LONGEST).params
    q, k = torch.ones(1, 1, 1, 1, dtype=logits.dtype), logits.view(1, 1, -1, 1)
    return attnzoo.attention_weights(q, k, k, name, scale=1.0, **params).flatten()


@rc_context(STYLE)
def row_plot(name: str) -> str:
    """Plot the weights of one row against its logits."""
    logits = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, ROW, dtype=torch.float64)
    lines = {which: weights(which, logits).tolist() for which in (BASELINE, name)}
    figure, axes = drawn(logits.tolist(), lines, "logit", f"weight ({ROW} keys)")
    axes.set_xlim(-LARGEST_LOGIT, LARGEST_LOGIT)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return svg_of(figure)


@rc_context(STYLE)
def growth_plot(name: str) -> str:
    """Plot the weight of a key with logit `LEAD` among n − 1 keys with random logits, against n."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(LENGTHS[-1], dtype=torch.float64, generator=generator)
    noise[0] = LEAD
    lines = {
        which: [weights(which, noise[:n])[0].item() for n in LENGTHS] for which in (BASELINE, name)
    }
    figure, axes = drawn(LENGTHS, lines, "number of keys n", "largest weight")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS[1::4])
    positive = [weight for weight in lines[name] if weight > 0]  # the axis is logarithmic
    axes.set_ylim(0.5 * min(2e-3, *positive), max(1.5, 1.5 * max(lines[name])))
    axes.legend(loc="lower left")
    return svg_of(figure)


def drawn(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], x_label: str, y_label: str
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    for name, y in lines.items():
        # The baseline is dashed and on top, so that both lines are visible where they coincide.
        color, style, order = (GREY, "o--", 3) if name == BASELINE else (BLUE, "o-", 2)
        axes.plot(x, y, style, color=color, zorder=order, label=name)
    return figure, axes


def svg_of(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


PLOTS = {"row": row_plot, "growth": growth_plot}
