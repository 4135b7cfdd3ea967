"""Two plots of a variant: the weights of one row, and a leading key's weight against n."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import attnzoo

BASELINE = "softmax"
ROW, LARGEST_LOGIT = 64, 4.0
LENGTHS = [2**i for i in range(3, 17)]
LEAD = 8.0
# The number of keys from which the values of required parameters are computed. It is large, so that
# cosformer's factor is close to 1.
LONGEST = 2**20

matplotlib.rcParams["svg.fonttype"] = "none"  # text uses the fonts of the page
matplotlib.rcParams["svg.hashsalt"] = "attnzoo"  # gives the same ids in each build


@dataclass(frozen=True)
class Colors:
    ink: str
    grid: str
    baseline: str
    variant: str


# A plot is drawn once, in light colors. The dark version has the colors replaced.
LIGHT = Colors(ink="#323638", grid="#d9dde0", baseline="#7d8590", variant="#0a6f87")
DARK = Colors(ink="#ced6dd", grid="#3a4149", baseline="#99a2ac", variant="#3fc5dd")


def darkened(svg: str) -> str:
    for name in vars(LIGHT):
        svg = svg.replace(getattr(LIGHT, name), getattr(DARK, name))
    return svg


def weights(name: str, logits: Tensor) -> Tensor:
    """The weights (n,) of one row with logits (n,)."""
    params = required(attnzoo.get_variant(name), LONGEST)
    q, k = torch.ones(1, 1, 1, 1, dtype=logits.dtype), logits.view(1, 1, -1, 1)
    return attnzoo.attention_weights(q, k, k, name, scale=1.0, **params).flatten()


def required(variant: attnzoo.Variant, keys: int) -> dict[str, Any]:
    """Example values of the variant's required parameters, by name."""
    example = {} if variant.example is None else variant.example(keys)
    return {p.name: example[p.name] for p in variant.params if p.default is attnzoo.REQUIRED}


def row_plot(name: str) -> str:
    """Plot the weights of one row against its logits."""
    logits = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, ROW, dtype=torch.float64)
    figure, axes = frame("logit", f"weight ({ROW} keys)")
    if name != BASELINE:
        draw(axes, logits.tolist(), weights(BASELINE, logits).tolist(), BASELINE)
    draw(axes, logits.tolist(), weights(name, logits).tolist(), name)
    axes.set_xlim(-LARGEST_LOGIT, LARGEST_LOGIT)
    axes.set_ylim(bottom=0)
    return svg_of(figure, axes, legend="upper left")


def growth_plot(name: str) -> str:
    """Plot the weight of a key with logit `LEAD` among n − 1 keys with random logits, against n."""
    noise = torch.randn(
        LENGTHS[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    noise[0] = LEAD

    def leading(which: str) -> list[float]:
        return [weights(which, noise[:n])[0].item() for n in LENGTHS]

    figure, axes = frame("number of keys n", "largest weight")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if name != BASELINE:
        draw(axes, LENGTHS, leading(BASELINE), BASELINE)
    largest = leading(name)
    draw(axes, LENGTHS, largest, name)
    axes.set_xticks(LENGTHS[1::4])
    shown = [weight for weight in largest if weight > 0]  # the axis is logarithmic
    axes.set_ylim(0.5 * min(2e-3, *shown), max(1.5, 1.5 * max(largest)))
    return svg_of(figure, axes, legend="lower left")


def frame(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def draw(axes: Axes, x: Sequence[float], y: Sequence[float], name: str) -> None:
    # The baseline is dashed and on top, so that both lines are visible where they coincide.
    color, style, order = (LIGHT.variant, "-", 2)
    if name == BASELINE:
        color, style, order = (LIGHT.baseline, "--", 3)
    axes.plot(x, y, style, color=color, zorder=order, linewidth=2, label=name)
    axes.plot(x, y, "o", color=color, zorder=order, markersize=3)


def svg_of(figure: Figure, axes: Axes, legend: Literal["upper left", "lower left"]) -> str:
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=LIGHT.ink, which="both")
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(LIGHT.ink)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT.ink)
    axes.legend(loc=legend, frameon=False, labelcolor=LIGHT.ink)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()
