"""The command ``ties``: the highest accuracy in max-retrieval of a model that sees rounded values.

The label is the class of the item with the largest ρ. If ρ is rounded to a dtype with few bits,
several items share the largest value. A model that sees only rounded values cannot tell them apart,
so its expected accuracy for one sequence is at most

    share of the items with the largest rounded ρ that have the label's class,

if it picks one of them at random. bfloat16 has 8 significant bits: ρ in [½, 1) becomes a multiple
of 1/256, and of n items about n / 512 get the value 1.

The command draws the task's own test sequences. Published rows are those of
Veličković et al. 2024, arXiv:2410.01104, Table 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commandline.arguments import integer, seed
from commandline.files import check_writable
from commandline.table import Table
from evals.measures.arithmetic import rounded
from evals.task import DTYPES
from evals.tasks.max_retrieval import PUBLISHED, draw
from evals.theory.output import show

NAME = "ties"
SEQUENCES = 100_000
ITEMS = 2**22  # maximum number of items drawn at once
NOTE = (
    "A row is the expected accuracy of picking at random among the items with the largest rounded\n"
    "value, in {count} test sequences per length (seed {seed}). A model that sees only rounded\n"
    "values cannot do better on them. Published rows: Table 1 of arXiv:2410.01104, whose\n"
    "arithmetic is not known to us."
)


def ceiling(dtype: str, length: int, sequences: int = SEQUENCES, seed: int = 0) -> float:
    """The expected accuracy of picking at random among the items with the largest rounded value.

    Args:
        dtype: the dtype of the values, one of `evals.task.DTYPES`.
        length: the number of items n.
        sequences: the number of sequences drawn.
        seed: the seed of the test sequences.
    """
    total, chunk = 0.0, max(1, ITEMS // length)
    for start in range(0, sequences, chunk):
        batch = draw(seed, "test", length, start, min(start + chunk, sequences))
        values = rounded(batch.closeness, dtype)
        largest = values == values.amax(dim=1, keepdim=True)
        right = largest & (batch.classes == batch.label[:, None])
        total += (right.sum(dim=1) / largest.sum(dim=1)).sum().item()
    return total / sequences


def table(lengths: Sequence[int], sequences: int, seed: int) -> Table:
    """Ceilings in % by dtype and length, and the published rows."""
    rows = [
        [dtype, *(f"{100 * ceiling(dtype, n, sequences, seed):.1f}" for n in lengths)]
        for dtype in DTYPES
    ]
    for variant, scores in PUBLISHED.rows.items():
        by_length = dict(zip(PUBLISHED.lengths, scores, strict=True))
        texts = (f"{by_length[n]:.1f}" if n in by_length else "—" for n in lengths)
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
