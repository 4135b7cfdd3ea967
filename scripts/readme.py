"""Rewrites what README.md has from elsewhere: the variants' table from the registry, the kernels'
from the results of GPUs in benchmarks/results, the evals' from the summaries in docs/evals."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import attnzoo
from benchmarks.harness.cases import Case
from commandline.errors import UsageError
from commandline.table import markdown
from evals.reporting.readme_tables import scores, tasks_table
from scripts.kernels_table import kernels_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
# Of the example's parameters, and of a linear cost: a common length and width.
LENGTH, HEAD_DIM = 1024, 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    args = parser.parse_args()
    text = README.read_text()
    new = rendered(text)
    if new == text:
        return 0
    if args.check:
        print("README.md is out of date: run `make readme`", file=sys.stderr)
        return 1
    README.write_text(new)
    return 0


def rendered(text: str) -> str:
    """The README with its generated blocks made anew."""
    for name, make in BLOCKS.items():
        block = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if len(block.findall(text)) != 1:
            raise UsageError(f"README.md needs one pair of `<!-- {name}: begin -->` and `end`")
        new = make()
        text = block.sub(lambda m, new=new: m[1] + new + m[2], text)
    return text


def variants_table() -> str:
    header = ("variant", "formula", "paper", "parameters", "forms", "cost")
    return markdown([header, *map(variant_cells, attnzoo.list_variants())])


def variant_cells(name: str) -> tuple[str, ...]:
    variant = attnzoo.get_variant(name)
    forms = forms_of(name)
    return (
        f"`{name}`",
        variant.formula,
        linked(variant.paper),
        ", ".join(map(parameter, variant.params)) or "–",
        ", ".join(f.kind for f in forms) or "definition only",
        "; ".join(map(cost, forms)) or "N²",
    )


def linked(paper: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def parameter(param: attnzoo.Param) -> str:
    if param.default is attnzoo.REQUIRED:
        return f"`{param.name}` (required)"
    number = isinstance(param.default, float)
    shown = f"`{param.name}={f'{param.default:.3g}' if number else param.default}`"
    return shown if param.init is None else f"{shown} (learned)"


def forms_of(name: str) -> list[attnzoo.Pairwise | attnzoo.Linear]:
    """The forms that it offers with its example's parameters."""
    case = Case.parse(name, LENGTH)
    return [form for form in (case.pairwise, case.linear) if form is not None]


def cost(form: attnzoo.Pairwise | attnzoo.Linear) -> str:
    if isinstance(form, attnzoo.Linear):
        return f"N·F·D, F = {form.size(HEAD_DIM)} at D = {HEAD_DIM}"
    if form.normalize == "threshold":
        return "N²·D, and a threshold solved per row"
    if form.normalize == "select":
        return "N²·D, and a selection per row"
    if isinstance(form.gain, attnzoo.FromStatistics):
        return "N²·D, keys read twice"
    return "N²·D"


BLOCKS = {
    "variants": variants_table,
    "kernels": kernels_table,
    "tasks": tasks_table,
    "evals": lambda: scores(ROOT / "docs" / "evals"),
}

if __name__ == "__main__":
    sys.exit(main())
