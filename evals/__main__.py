"""``python -m evals``: the tasks, what is made of their results, laws, and pretrained models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evals import laws, sharpness
from evals.cells import Refused
from evals.options import add_arguments, gather
from evals.run import run
from evals.task import NOTES
from evals.tasks import TASKS

ALL = "all"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m evals", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    everything = commands.add_parser(ALL, help="every task, and one report of all")
    add_arguments(everything, tuple(NOTES), "results/PRESET")
    for name, task in TASKS.items():
        one = commands.add_parser(name, help=task.about.split(";")[0].split(":")[0])
        add_arguments(one, tuple(NOTES), "results/PRESET")
    law = commands.add_parser("laws", help="closed forms against measurement; exit 1 on deviation")
    law.add_argument("--out", type=Path, help="folder for laws.csv and laws.png")
    sharpness.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 (something deviates or failed), 2 (refused)."""
    given = parser().parse_args(arguments)
    try:
        if given.command == "laws":
            return laws.main(given.out)
        if given.command == sharpness.NAME:
            return sharpness.main(given)
        names = list(TASKS) if given.command == ALL else [given.command]
        options = gather(given, names, list(TASKS))
        shared = options[names[0]]
        out = shared.out or Path("results") / shared.preset
        return run([TASKS[name] for name in names], options, out)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the rows so far are kept, the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
