"""Settings in which papers measured attention kernels, and the figures they published.

A preset replaces the GPU defaults of the command `attention`. After its rows, the command prints
the published figures beside the ratios measured in the same run. A published figure belongs to the
GPU and the software of its paper. Only ratios to FlashAttention-2 are shown, because times on
different GPUs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.report import Row
from commandline.table import Table

BASELINE = "sdpa flash"  # torch's FlashAttention-2


@dataclass(frozen=True)
class Figure:
    """A published time divided by that of FlashAttention-2 in the same setting.

    Attributes:
        length: the number of keys; None for the mean over lengths.
        causal: None if the source does not say which mask was used.
        inputs: the kind of inputs with which it is compared; None for every kind.
        empty_blocks: the share of empty blocks of weights that the source states.
    """

    ratio: float
    direction: str
    length: int | None = None
    causal: bool | None = None
    inputs: str | None = "iid"
    empty_blocks: float | None = None

    def matches(self, row: Row) -> bool:
        return (
            row.direction == self.direction
            and self.length in (None, row.setting.length)
            and self.causal in (None, row.setting.causal)
            and self.inputs in (None, row.setting.inputs)
        )


@dataclass(frozen=True)
class Preset:
    """The settings and figures of a paper.

    Attributes:
        paper: name and source of the kernel.
        device: the GPU of the figures.
        names: the rows that are compared with the figures.
        options: defaults of the command's options, by name.
        note: where the figures come from, and which settings the source does not give.
    """

    paper: str
    device: str
    names: tuple[str, ...]
    options: Mapping[str, Any]
    figures: tuple[Figure, ...]
    note: str

    def table(self, rows: Sequence[Row], device: str | None) -> Table:
        """The published figures beside the ratios in ``rows``, measured on ``device``."""
        names = [name for name in self.names if any(row.name == name for row in rows)]
        header = [
            "direction", "mask", "inputs", "N", f"published, {self.device}",
            *(f"{name}, here" for name in names), "empty blocks, published", "empty blocks, here",
        ]  # fmt: skip
        lines = [line for figure in self.figures for line in self.lines(figure, names, rows)]
        shown_columns = [
            i for i, title in enumerate(header)
            if not title.startswith("empty") or any(line[i] for line in lines)
        ]  # fmt: skip
        return Table(
            f"{self.paper}: time / FlashAttention-2",
            [header[i] for i in shown_columns],
            [[line[i] for i in shown_columns] for line in lines],
            f"{self.note} Here: {device or 'no GPU'}, time / {BASELINE}.",
        )

    def lines(self, figure: Figure, names: list[str], rows: Sequence[Row]) -> Iterator[list[str]]:
        """One line per mask and kind of inputs that were measured, or one without measurements."""
        matching = [row for row in rows if figure.matches(row)]
        masks = {True: "causal", False: "full", None: "not given"}
        measured = dict.fromkeys((row.setting.causal, row.setting.inputs) for row in matching)
        for causal, inputs in measured or {(figure.causal, figure.inputs or "not given"): None}:
            kind = causal, inputs
            shown = [r for r in matching if (r.setting.causal, r.setting.inputs) == kind]
            shares = [r.figures["empty_blocks"] for r in shown if "empty_blocks" in r.figures]
            yield [
                figure.direction,
                masks[causal],
                inputs,
                "mean" if figure.length is None else str(figure.length),
                f"{figure.ratio:.3g}",
                *(mean_ratio([r for r in shown if r.name == name], figure) for name in names),
                "" if figure.empty_blocks is None else f"{figure.empty_blocks:.0%}",
                f"{sum(shares) / len(shares):.0%}" if shares else "",
            ]


def mean_ratio(rows: Sequence[Row], figure: Figure) -> str:
    """The mean of the rows' ratios, with the number of lengths if the figure is a mean too."""
    ratios = [row.ratios[BASELINE].median for row in rows if BASELINE in row.ratios]
    if not ratios:
        return "not measured"
    lengths = f"{len(ratios)} length{'s' * (len(ratios) > 1)}"
    count = f" (mean of {lengths})" if figure.length is None else ""
    return f"{sum(ratios) / len(ratios):.3g}{count}"


FLASH_SIGMOID = Preset(
    paper="FlashSigmoid (arXiv:2409.04431)",
    device="H100",
    names=("sigmoid", "sigmoid(bias=0)", "flash-sigmoid: sigmoid(bias=0)"),
    options={
        "variants": "softmax,sigmoid,sigmoid(bias=0)",
        "direction": ["forward", "backward"],
        "lengths": [2**i for i in range(6, 17)],
        "batch": 8,
        "heads": 12,
        "head_dim": [64],
        "mask": ["full", "causal"],
        "inputs": ["iid"],
        "baselines": ["flash", "flash-sigmoid"],
    },
    figures=(
        Figure(1 - 0.1739, "forward", causal=False),
        Figure(1 - 0.1876, "forward", causal=True),
        Figure(1 - 0.0270, "backward", causal=False),
        Figure(1 - 0.0619, "backward", causal=True),
    ),
    note="Published: kernel times against FlashAttention-2 2.5.6, from github.com/apple/"
    "ml-sigmoid-attention; its plots show lengths up to about 75500. Could not be verified: batch, "
    "heads, head dimension, dtype, bias and which lengths are averaged; those here are our choice.",
)

ADASPLASH = Preset(
    paper="AdaSplash (arXiv:2502.12082)",
    device="H100 80GB",
    names=("entmax", "adasplash-v1: entmax", "adasplash-dense: entmax"),
    options={
        "variants": "softmax,entmax",
        "direction": ["both"],
        "lengths": [2**i for i in range(10, 17)],
        "batch": 8,
        "heads": 16,
        "head_dim": [64],
        "mask": ["full", "causal"],
        "inputs": ["iid", "block-sparse"],
        # The paper draws q with variance 6. q and k with variance √6 have scores of the same
        # standard deviation.
        "input_scale": 6**0.25,
        "baselines": ["flash", "adasplash-v1", "adasplash-dense", "bisection"],
    },
    figures=tuple(
        Figure(ratio, "both", 2**i)
        for i, ratio in enumerate((2.6, 1.5, 1.2, 1.0, 0.92, 0.86, 0.82), start=10)
    ),
    note="Published: training step against FlashAttention-2 in CUDA, read from the bars of "
    "benchmark.png in github.com/deep-spin/adasplash (within about 5 %). Given in the paper: "
    "D = 64, the lengths, queries with variance 6, 3 iterations (bisection: 10). Could not be "
    "verified: mask, batch, heads, dtype; those here are our choice.",
)

ADASPLASH_2 = Preset(
    paper="AdaSplash-2 (arXiv:2604.15180)",
    device="GPU not verified",
    names=("entmax", "adasplash: entmax", "adasplash-v1: entmax"),
    options={
        **ADASPLASH.options,
        "lengths": [2**i for i in range(12, 18)],
        "mask": ["causal"],
        "baselines": ["flash", "adasplash", "adasplash-v1"],
    },
    figures=tuple(
        Figure(ratio, "both", 2**i, causal=True, inputs=None, empty_blocks=share)
        for i, (ratio, share) in enumerate(
            ((1.07, 0.51), (1.00, 0.58), (0.97, 0.64), (0.89, 0.70), (0.79, 0.75), (0.62, 0.85)),
            start=12,
        )
    ),
    note="Published: AdaSplash-2, forward and backward, against FlashAttention-2 in CUDA, read "
    "from the bars of benchmark2.png in github.com/deep-spin/adasplash, with the block sparsity "
    "written below them. Could not be verified: GPU, size of these blocks, inputs, batch, "
    "heads, head dimension, dtype; those here are our choice. Blocks here are 64 × 64.",
)

PRESETS = {"flash-sigmoid": FLASH_SIGMOID, "adasplash": ADASPLASH, "adasplash-2": ADASPLASH_2}
