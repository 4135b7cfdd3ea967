"""The command ``ties``: the highest accuracy in max-retrieval of a model that sees rounded values.

The label is the class of the item with the largest ρ. If ρ is rounded to a dtype with few bits,
several items share the largest value, and a model that sees only rounded values cannot tell them
apart. Each of them is the largest with equal probability, so its expected accuracy for one sequence
is at most

    share of the most frequent class among the items with the largest rounded ρ,

which a model reaches that averages over these items. A model that picks one of them at random has
the share of the label's class. bfloat16 has 8 significant bits: ρ in [½, 1) becomes a multiple of
1/256, and of n items about n / 512 get the value 1.

The command draws the task's own test sequences. Published rows are those of
Veličković et al. 2024, arXiv:2410.01104, Table 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commandline.arguments import integer, seed
from commandline.files import check_writable
from commandline.table import Table
from evals.measures.arithmetic import rounded
from evals.progress import Progress
from evals.task import DTYPES
from evals.tasks.families.retrieval import CLASSES
from evals.tasks.max_retrieval import PUBLISHED, draw
from evals.theory.output import show

NAME = "ties"
SEQUENCES = 100_000
ITEMS = 2**22  # maximum number of items drawn at once
ROUNDED = [dtype for dtype in DTYPES if dtype != "float32"]  # fp32 holds all values exactly
NOTE = (
    "{count} test sequences per length (seed {seed}). Most frequent class, of the items with the\n"
    "largest rounded value: a model that sees only rounded values cannot do better on these\n"
    "sequences. Random item: one of these items at random. Published rows: Table 1 of\n"
    "arXiv:2410.01104, whose arithmetic is not known to us."
)


class Accuracy(NamedTuple):
    """Expected accuracies of the two ways to choose among items with the same value."""

    most_frequent_class: float
    random_item: float


def accuracies(length: int, sequences: int = SEQUENCES, seed: int = 0) -> dict[str, Accuracy]:
    """The expected accuracies at one number of items, by dtype of the values.

    Args:
        length: the number of items n.
        sequences: the number of sequences drawn.
        seed: the seed of the test sequences.
    """
    totals = {dtype: torch.zeros(2, dtype=torch.float64) for dtype in ROUNDED}
    chunk = max(1, ITEMS // length)
    for start in range(0, sequences, chunk):
        batch = draw(seed, "test", length, start, min(start + chunk, sequences))
        for dtype in ROUNDED:
            values = rounded(batch.closeness, dtype)
            sequence, item = (values == values.amax(dim=1, keepdim=True)).nonzero(as_tuple=True)
            counts = torch.zeros(len(values), CLASSES, dtype=torch.float64)
            one = torch.ones(1, dtype=torch.float64)
            counts.index_put_((sequence, batch.classes[sequence, item]), one, accumulate=True)
            shares = counts / counts.sum(dim=1, keepdim=True)
            of_label = shares.gather(1, batch.label[:, None])[:, 0]
            totals[dtype] += torch.stack([shares.amax(dim=1).sum(), of_label.sum()])
    return {dtype: Accuracy(*(total / sequences).tolist()) for dtype, total in totals.items()}


def table(lengths: Sequence[int], sequences: int, seed: int) -> Table:
    """Expected accuracies in % by dtype and length, and the published rows."""
    by_length = []
    progress = Progress(len(lengths))
    try:
        for n in lengths:
            progress.update(name := f"n = {n}", 0.0, "drawing")
            by_length.append(accuracies(n, sequences, seed))
            progress.finish(name)
    finally:
        progress.close()
    rows = [
        [f"{dtype}, {name.replace('_', ' ')}",
         *(f"{100 * getattr(one[dtype], name):.1f}" for one in by_length)]
        for dtype in ROUNDED
        for name in Accuracy._fields
    ]  # fmt: skip
    for variant, scores in PUBLISHED.rows.items():
        published = dict(zip(PUBLISHED.lengths, scores, strict=True))
        texts = (f"{published[n]:.1f}" if n in published else "—" for n in lengths)
        rows.append([f"{variant}, published", *texts])
    note = NOTE.format(count=sequences, seed=seed)
    header = ["values in", *(f"n = {n}" for n in lengths)]
    return Table("Highest accuracy in max-retrieval, %", header, rows, note)


def add_parser(commands: Any) -> None:
    """Add the command to the parser of `evals`."""
    text = "Print the highest accuracy in max-retrieval with values rounded to a dtype"
    one = commands.add_parser(NAME, help=text, description=f"{text}.")
    text = f"Draw N sequences per length (default: {SEQUENCES})"
    one.add_argument("--sequences", type=integer(1), default=SEQUENCES, metavar="N", help=text)
    text = "Draw them with seed N (default: 0)"
    one.add_argument("--seed", type=seed, default=0, metavar="N", help=text)
    one.add_argument("--out", type=Path, metavar="DIR", help="Write ties.csv to DIR")


def main(args: argparse.Namespace) -> int:
    """Print the table; with ``--out``, write ties.csv. Returns 0."""
    if args.out is not None:
        check_writable("--out", args.out)
    show(NAME, [table(PUBLISHED.lengths, args.sequences, args.seed)], args.out)
    return 0
