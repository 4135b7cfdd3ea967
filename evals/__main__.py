"""Evals of attention normalizers: tasks, reports of their results, laws, pretrained models."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from commandline.arguments import add_plugin, seed
from commandline.errors import UsageError
from evals.harness.command import run_tasks
from evals.harness.options import add_arguments, gather
from evals.harness.study import load_plugins
from evals.pretrained import sharpness
from evals.reporting import artifacts, compare, export, laws
from evals.tasks import TASKS
from evals.theory import ranks

ALL = "all"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m evals", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "run every task, and write one report of all"
    everything = commands.add_parser(ALL, help=words, description=f"{words}.".capitalize())
    add_arguments(everything)
    words = f"also run {sharpness.NAME} on this pretrained model; needs --text"
    everything.add_argument("--model", metavar="PATH_OR_NAME", help=words)
    words = "the UTF-8 text that --model reads"
    everything.add_argument("--text", type=Path, metavar="FILE", help=words)
    for name, task in TASKS.items():
        short = task.about.split(";")[0].split(": ")[0].rstrip(".")
        one = commands.add_parser(name, help=short.replace("%", "%%"), description=task.about)
        add_arguments(one)
    page = commands.add_parser("report", help="write one HTML page of the results in some folders")
    page.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="a results folder")
    words = "the page to write (default: report.html in the first DIR)"
    page.add_argument("--out", type=Path, metavar="FILE", help=words)
    add_plugin(page)
    export.add_parser(commands)
    versus = commands.add_parser("compare", help="print what B gained on A, paired by seed")
    versus.add_argument("a", type=Path, metavar="A", help="a results folder")
    versus.add_argument("b", type=Path, metavar="B", help="the results folder to compare with A")
    words = "exit with 1 if a gain is missing or below X points; -1 allows the loss of one point"
    versus.add_argument("--fail-below", type=float, metavar="X", help=words)
    words = "compare closed forms with measurement; exit with 1 if they deviate"
    law = commands.add_parser("laws", help=words)
    law.add_argument("--out", type=Path, metavar="DIR", help="folder for laws.csv and laws.png")
    add_plugin(law)
    words = "print ranks of attention matrices and of mixtures of softmaxes"
    rank = commands.add_parser("ranks", help=words)
    rank.add_argument("--out", type=Path, metavar="DIR", help="folder for ranks.csv")
    rank.add_argument("--seed", type=seed, default=0, help="seed of the matrices (default: 0)")
    add_plugin(rank)
    sharpness.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 (something deviates or failed), 2 (refused)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × or † still gets figures
    given = parser().parse_args(arguments)
    try:
        if given.command == "laws":
            return laws.command(given.out, given.plugin)
        if given.command == "ranks":
            load_plugins(given.plugin)
            return ranks.main(given.out, given.seed)
        if given.command == sharpness.NAME:
            load_plugins(given.plugin)
            return sharpness.main(given)
        if given.command == "report":
            load_plugins(given.plugin)
            return artifacts.main(given.folders, given.out)
        if given.command == export.NAME:
            load_plugins(given.plugin)
            return export.main(given)
        if given.command == "compare":
            return compare.main(given.a, given.b, given.fail_below)
        names = list(TASKS) if given.command == ALL else [given.command]
        pretrained = [vars(given).pop(name, None) for name in ("model", "text")]
        if pretrained.count(None) == 1:
            raise UsageError("--model and --text go together")
        if pretrained[1] is not None and not pretrained[1].is_file():
            raise UsageError(f"--text: there is no file {pretrained[1]}")
        options = gather(given, names)
        shared = options[names[0]]
        out = shared.out or Path("results") / shared.preset
        status = run_tasks([TASKS[name] for name in names], options, out, artifacts.write_results)
        if pretrained[0] is not None and not shared.dry_run:
            model, text = map(str, pretrained)
            line = [sharpness.NAME, "--model", model, "--text", text]
            line += ["--out", str(out / sharpness.NAME)]
            return max(status, sharpness.main(parser().parse_args(line)))
        return status
    except (UsageError, OSError) as refusal:  # a file that cannot be read or written, too
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the rows so far are kept, the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
