"""The command ``export``: writes tables of results as CSV, LaTeX or Markdown, and their figures.

A LaTeX table is a ``tabular`` without caption and label, which belong in the paper. The same result
rows always give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commandline.arguments import add_plugin, numbers
from commandline.errors import UsageError
from commandline.files import write_whole
from evals.options import check_unique
from evals.reporting import plots
from evals.reporting.figures import pictures
from evals.reporting.formats import FORMATS
from evals.results.store import read_rows
from evals.results.summary import Group, groups, version_warnings
from evals.results.summary_csv import Summary, summary_of
from evals.task import Metric

NAME = "export"
ALL = "all"
FIGURES = {
    "png": partial(plots.png, dpi=300),
    "svg": partial(plots.vector, kind="svg"),
    "pdf": partial(plots.vector, kind="pdf"),
}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def add_parser(commands: Any) -> None:
    short = "Write tables and figures of results for a paper"
    parser = commands.add_parser(NAME, help=short, description=f"{short}.")
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="DIR", help="Read results from DIR")
    add("--format", choices=FORMATS, help="Write tables in this format")
    add("--figures", type=_names, default=[], metavar=",".join(FIGURES),
        help="Draw the figures of the report in these formats; needs --out DIR")  # fmt: skip
    add("--metric", type=_names, metavar="NAME,NAME,…",
        help=f"Export these metrics, or {ALL} (default: the score of each task)")  # fmt: skip
    add("--lengths", type=numbers, metavar="N,N,…",
        help="Show only these eval lengths in the tables")  # fmt: skip
    add("--out", type=Path, metavar="FILE-OR-DIR",
        help="Write all tables to this .csv, .tex or .md file, or each table and figure to a file "
        "in this folder (default: print the tables)")  # fmt: skip
    add_plugin(parser, " or tasks")


def main(args: argparse.Namespace) -> int:
    """Export the results in some folders."""
    to_one_file = _writes_one_file(args)
    all_groups = groups(read_rows(args.folders))
    _check_chosen(all_groups, args.metric, args.lengths)
    for warning in version_warnings(all_groups):
        print(warning, file=sys.stderr)
    tables: dict[str, tuple[Summary, Metric]] = {}
    files: dict[Path, str | bytes] = {}
    for name, group in _named(all_groups):
        metrics = _metrics(group, args.metric)
        lengths = args.lengths if group.task.axis == "n" else None
        if lengths is None or set(lengths) & set(group.xs):
            summary = summary_of(group, lengths)
            tables |= {f"{name}-{metric.name}": (summary, metric) for metric in metrics}
        if metrics and args.figures:
            for kind in args.figures:  # drawn anew, because saving a figure changes its layout
                for picture in pictures(group, metrics, FIGURES[kind]):
                    files[args.out / f"{name}-{picture.name}.{kind}"] = picture.data
    if args.figures and not files:
        raise UsageError("--figures needs results that have figures of these metrics, got none")
    if args.format is not None:
        suffix, render = FORMATS[args.format]
        if args.out is None:
            print(render(list(tables.values())), end="")
        elif to_one_file:
            files[args.out] = render(list(tables.values()))
        else:
            files |= {args.out / f"{name}{suffix}": render([t]) for name, t in tables.items()}
    for path, data in files.items():
        write_whole(path, data)
        print(f"written: {path}")
    return 0


def _writes_one_file(args: argparse.Namespace) -> bool:
    """Return true if --out is one file for all tables.

    Raises:
        UsageError: --out does not fit --format and --figures, or one of these is invalid.
    """
    if unknown := [kind for kind in args.figures if kind not in FIGURES]:
        raise UsageError(f"--figures must be among {', '.join(FIGURES)}, got {', '.join(unknown)}")
    check_unique("--figures", args.figures)
    if args.format is None and not args.figures:
        raise UsageError("export needs --format or --figures")
    out: Path | None = args.out
    suffixes = [suffix for suffix, _ in FORMATS.values()]
    one_file = out is not None and out.suffix in suffixes and not out.is_dir()
    if args.figures and (out is None or one_file):
        raise UsageError(f"--figures needs --out DIR, got {out or 'no --out'}")
    expected = "" if args.format is None else FORMATS[args.format][0]
    if out is not None and one_file and out.suffix != expected:
        raise UsageError(f"--out must end in {expected} with --format {args.format}, got {out}")
    is_file = out is not None and (out.exists() or bool(out.suffix)) and not out.is_dir()
    if is_file and not one_file:
        raise UsageError(f"--out must be a folder or a {', '.join(suffixes)} file, got {out}")
    return one_file


def _check_chosen(
    all_groups: Sequence[Group], metrics: Sequence[str] | None, lengths: Sequence[int] | None
) -> None:
    """Raise UsageError for a metric or a length that no result has or that is repeated."""
    known = dict.fromkeys(metric.name for group in all_groups for metric in group.metrics)
    measured = sorted({x for group in all_groups if group.task.axis == "n" for x in group.xs})
    check_unique("--metric", metrics or [])
    check_unique("--lengths", lengths or [])
    for name in metrics or ():
        if name not in (*known, ALL):
            raise UsageError(f"--metric must be among {', '.join(known)} or {ALL}, got {name!r}")
    if missing := [length for length in lengths or () if length not in measured]:
        allowed, got = (", ".join(map(str, numbers)) for numbers in (measured, missing))
        raise UsageError(f"--lengths must be among {allowed}, got {got}")


def _metrics(group: Group, names: Sequence[str] | None) -> list[Metric]:
    if names is None:
        return [group.task.score]
    return [metric for metric in group.metrics if ALL in names or metric.name in names]


def _named(all_groups: Sequence[Group]) -> Iterator[tuple[str, Group]]:
    """Pairs (file name prefix, group). Further groups of a task get a number: mqar, mqar_2."""
    count: dict[str, int] = {}
    for group in all_groups:
        name = group.task.name
        count[name] = count.get(name, 0) + 1
        yield f"{name}_{count[name]}" if count[name] > 1 else name, group
