"""Train small models with each attention variant on short inputs; evaluate them on longer ones."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from commandline.arguments import Parser, add_plugin, integer, number, seed
from commandline.errors import UsageError
from commandline.start import start
from evals.command import run_tasks
from evals.options import add_arguments, flag, gather, plugin_of_file
from evals.plugins import load, load_plugins
from evals.pretrained import command as pretrained
from evals.pretrained import harness, sharpness
from evals.pretrained import options as pretrained_options
from evals.reporting import artifacts, compare, export, in_context, laws
from evals.tasks import EVALS, EXPERIMENTS, TASKS
from evals.tasks.digits.experiment import Experiment
from evals.theory import ranks, ties

ALL = "all"
# Modules with a function ``add_parser`` and a function ``main`` of the parsed arguments.
COMMANDS = {module.NAME: module for module in (export, in_context, harness, sharpness, ties)}


def parser() -> Parser:
    """The parser of all commands; every task is a command."""
    top = Parser(prog="python -m evals", description=__doc__)
    top.command_hint = "A task of your own needs --plugin FILE.py"
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text}.")

    one = command(ALL, "Run all tasks and the experiments on digits, and write one report")
    add_arguments(one, next(iter(TASKS.values())))
    text = f"Run {sharpness.NAME} on this pretrained model too (with --shard: in shard 0 only); "
    text += "needs --text"
    one.add_argument("--model", metavar="PATH_OR_NAME", help=text)
    text = "Measure --model on this UTF-8 text"
    one.add_argument("--text", type=Path, metavar="FILE", help=text)

    one = command("report", "Write one HTML report of several results folders")
    text = "Read results from DIR"
    one.add_argument("folders", type=Path, nargs="+", metavar="DIR", help=text)
    text = "Write the report to FILE (default: report.html in the first DIR)"
    one.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_plugin(one, " or tasks")

    one = command("compare", "Print the gain in score from results A to results B, paired by seed")
    one.add_argument("a", type=Path, metavar="A", help="Read the first results from folder A")
    one.add_argument("b", type=Path, metavar="B", help="Read the second results from folder B")
    text = "Exit with 1 if a gain is missing or below X (table units); -1 allows a drop of 1"
    one.add_argument("--fail-below", type=number, metavar="X", help=text)
    text = "Print which rows of A hold in B: their intervals overlap; exit with 1 if one does not"
    one.add_argument("--holds", action="store_true", help=text)
    add_plugin(one, " or tasks")

    text = "Compare the largest weight of each variant with its formula; exit with 1 if they differ"
    one = command("laws", text)
    text = "Write laws.csv and laws.png to DIR"
    one.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "Show only these variants: names, separated by commas (default: all)"
    one.add_argument("--variants", metavar="LIST", help=text)
    add_plugin(one)

    text = (
        "Print ranks of attention matrices, and of mixtures of attentions, softmaxes and contexts"
    )
    one = command("ranks", text)
    one.add_argument("--out", type=Path, metavar="DIR", help="Write ranks.csv to DIR")
    text = "Draw the matrices with seed N (default: 0)"
    one.add_argument("--seed", type=seed, default=0, metavar="N", help=text)
    text = "Also compare initializations of mixtures of softmaxes, over N seeds from --seed on"
    one.add_argument("--initializations", type=integer(0), default=0, metavar="N", help=text)
    add_plugin(one)

    for module in COMMANDS.values():
        module.add_parser(commands)
    pretrained_options.add_parsers(commands)
    for name, task in EVALS.items():
        if name in top.commands:
            raise UsageError(f"a task must not be named like a command, got {name!r}")
        short = task.about.split(". ")[0].split(" (")[0].split(": ")[0].rstrip(".")
        one = commands.add_parser(name, help=short.replace("%", "%%"), description=task.about)
        add_arguments(one, task)
        if task.axis == "condition":
            one.epilog = f"conditions: {', '.join(task.conditions)}"
    return top


def _load_plugin_first(arguments: Sequence[str]) -> None:
    """Load the plugin before parsing, because its tasks are commands of the parser."""
    early = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    early.add_argument("--plugin", type=Path)
    early.add_argument("--config", type=Path)
    try:
        early_args = early.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError:  # the full parser prints the error
        return
    path = early_args.plugin or plugin_of_file(early_args.config)
    if path is not None:
        load(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 (failed run or check), 2 (bad usage or file) or 130 (Ctrl-C)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without × or †
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _load_plugin_first(arguments)
        return dispatch(parser().parse_args(arguments or ["--help"]))
    except BrokenPipeError:  # see `start`
        raise
    except (UsageError, OSError) as error:  # OSError: a file that cannot be read or written
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues with the results so far", file=sys.stderr)
        return 130


def dispatch(args: argparse.Namespace) -> int:
    if args.command == ALL or args.command in EVALS:
        return _run(args)
    if args.command == "laws":
        names = None if args.variants is None else args.variants.replace(" ", "").split(",")
        return laws.command(args.out, args.plugin, names)
    if args.command in pretrained_options.NAMES:
        return pretrained.main(args)
    load_plugins(getattr(args, "plugin", None))
    if args.command == "ranks":
        return ranks.main(args.out, args.seed, initializations=args.initializations)
    if args.command == "report":
        return artifacts.main(args.folders, args.out)
    if args.command == "compare":
        return compare.main(args.a, args.b, args.fail_below, args.holds)
    return COMMANDS[args.command].main(args)


def _run(args: argparse.Namespace) -> int:
    """Run one task or experiment, or all of them and, with ``--model``, `sharpness`."""
    names = list(EVALS) if args.command == ALL else [args.command]
    model, text = (getattr(args, name, None) for name in ("model", "text"))
    if (model is None) != (text is None):
        raise UsageError("--model and --text must be given together")
    options = gather(args, names)
    shared = options[names[0]]
    if model is not None and shared.shard.index > 0:  # shards would write the same files
        print(f"left out: {sharpness.NAME} runs in shard 0 only")
        model = text = None
    if model is not None and text is not None:  # the tasks may take hours
        sharpness.check(model, text)
    out = shared.out or Path("results") / shared.preset
    for name in names.copy() if args.command == ALL else ():
        if shared.preset not in EVALS[name].presets:
            print(f"left out: {name} has no preset {shared.preset!r}")
            names.remove(name)
    if args.command == ALL and set(names) & EXPERIMENTS.keys():
        for name in Experiment.refused:
            if any(getattr(one, name) not in (None, False) for one in options.values()):
                print(f"{flag(name)} applies to the tasks only, not to {', '.join(EXPERIMENTS)}")
    tasks = [EVALS[name] for name in names]
    status = run_tasks(tasks, options, out, artifacts.write_results, artifacts.scores_so_far)
    if model is not None and not shared.dry_run:
        line = [sharpness.NAME, "--model", model, "--text", str(text)]
        line += ["--out", str(out / sharpness.NAME)]
        return max(status, sharpness.main(parser().parse_args(line)))
    return status


if __name__ == "__main__":
    sys.exit(start(main))
