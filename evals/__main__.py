"""Train small models with each attention variant on short inputs; evaluate them on longer ones."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from commandline.arguments import Parser
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
COMMANDS = {
    module.NAME: module
    for module in (
        artifacts, compare, laws, ranks, export, in_context, harness, sharpness, ties
    )
}  # fmt: skip


def parser() -> Parser:
    """The parser of all commands; every task is a command."""
    top = Parser(prog="python -m evals", description=__doc__)
    top.command_hint = "A task of your own needs --plugin FILE.py"
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "Run all tasks and the experiments on digits, and write one report"
    add_arguments(
        commands.add_parser(ALL, help=text, description=f"{text}."), next(iter(TASKS.values()))
    )
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
    if args.command in pretrained_options.NAMES:
        return pretrained.main(args)
    load_plugins(getattr(args, "plugin", None))
    return COMMANDS[args.command].main(args)


def _run(args: argparse.Namespace) -> int:
    """Run one task or experiment, or all of them."""
    names = list(EVALS) if args.command == ALL else [args.command]
    options = gather(args, names)
    shared = options[names[0]]
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
    return run_tasks(tasks, options, out, artifacts.write_results, artifacts.scores_so_far)


if __name__ == "__main__":
    sys.exit(start(main))
