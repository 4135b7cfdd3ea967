"""``python -m evals``: laws, the tasks, and a look at pretrained models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evals import laws, max_retrieval, sharpness
from evals.cells import Refused, split_list
from evals.study import Options, run_study

TASKS = {max_retrieval.NAME: max_retrieval}


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected lengths such as 16,64,256, got {text!r}"
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m evals", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    law = commands.add_parser("laws", help="closed forms against measurement; exit 1 on deviation")
    law.add_argument("--out", type=Path, help="folder for laws.csv and laws.png")
    sharpness.add_parser(commands)
    for name, task in TASKS.items():
        add = commands.add_parser(name, help=(task.__doc__ or "").splitlines()[0]).add_argument
        add("--preset", choices=tuple(task.PRESETS), default="quick")
        add("--variants", type=split_list, help="a,b(x=1),a->b(x=1): a->b trains a, tests b")
        add("--seeds", type=int, help="number of seeds, 0 .. N-1")
        add("--lengths", type=_lengths, help="numbers of keys to test, as 16,64,256")
        add("--steps", type=int, help="training steps")
        add("--scale", choices=("sqrt", "none"), help="scores q.k/sqrt(d), or q.k")
        add("--plugin", type=Path, metavar="FILE.py", help="a file that registers variants")
        add("--workers", type=int, help="processes (default: one per core or GPU; 0: none)")
        add("--out", type=Path, help=f"results folder (default: results/{name}-PRESET)")
        add("--device", default="cpu", help="cpu, cuda or cuda:N")
        add("--dry-run", action="store_true", help="say what would be run, and write nothing")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 (something deviates or failed), 2 (refused)."""
    given = parser().parse_args(arguments)
    if given.command == "laws":
        return laws.main(given.out)
    if given.command == sharpness.NAME:
        try:
            return sharpness.main(given)
        except Refused as refusal:
            print(f"error: {refusal}", file=sys.stderr)
            return 2
    settings = {name: getattr(given, name) for name in ("steps", "scale")}
    options = Options(
        preset=given.preset,
        variants=given.variants,
        seeds=given.seeds,
        lengths=given.lengths,
        settings={name: value for name, value in settings.items() if value is not None},
        plugin=given.plugin,
        workers=given.workers,
        out=given.out,
        device=given.device,
        dry_run=given.dry_run,
    )
    try:
        return run_study(TASKS[given.command], options)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the rows so far are kept, the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
