"""Train small models with each attention variant on short inputs; evaluate them on longer ones."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from commandline.arguments import Parser, add_plugin, seed
from commandline.errors import UsageError
from evals.harness.command import run_tasks
from evals.harness.options import add_arguments, gather, plugin_of_file
from evals.harness.plugins import load, load_plugins
from evals.pretrained import command as pretrained
from evals.pretrained import options as pretrained_options
from evals.pretrained import sharpness
from evals.reporting import artifacts, compare, export, in_context, laws
from evals.tasks import EXPERIMENTS, TASKS
from evals.theory import ranks

ALL = "all"


def parser() -> Parser:
    """The parser of all commands; every task is a command."""
    top = Parser(prog="python -m evals", description=__doc__)
    top.command_hint = "A task of your own needs --plugin FILE.py"
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "Run all tasks (not the experiments on digits) and write one report"
    all_command = commands.add_parser(ALL, help=text, description=f"{text}.")
    add_arguments(all_command)
    text = f"Run {sharpness.NAME} on this pretrained model too (with --shard: in shard 0 only); "
    text += "needs --text"
    all_command.add_argument("--model", metavar="PATH_OR_NAME", help=text)
    text = "Measure --model on this UTF-8 text"
    all_command.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "Write one HTML report of several results folders"
    report_command = commands.add_parser("report", help=text, description=f"{text}.")
    report_command.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="Read results from DIR"
    )
    text = "Write the report to FILE (default: report.html in the first DIR)"
    report_command.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_plugin(report_command, " or tasks")
    export.add_parser(commands)
    text = "Print the gain in score from results A to results B, paired by seed"
    compare_command = commands.add_parser("compare", help=text, description=f"{text}.")
    compare_command.add_argument(
        "a", type=Path, metavar="A", help="Read the first results from folder A"
    )
    compare_command.add_argument(
        "b", type=Path, metavar="B", help="Read the second results from folder B"
    )
    text = "Exit with 1 if a gain is missing or below X (table units); -1 allows a drop of 1"
    compare_command.add_argument("--fail-below", type=float, metavar="X", help=text)
    text = "Print which rows of A hold in B: their intervals overlap; exit with 1 if one does not"
    compare_command.add_argument("--holds", action="store_true", help=text)
    add_plugin(compare_command, " or tasks")
    text = "Compare the largest weight of each variant with its formula; exit with 1 if they differ"
    laws_command = commands.add_parser("laws", help=text, description=f"{text}.")
    laws_command.add_argument(
        "--out", type=Path, metavar="DIR", help="Write laws.csv and laws.png to DIR"
    )
    text = "Show only these variants: names, separated by commas (default: all)"
    laws_command.add_argument("--variants", metavar="LIST", help=text)
    add_plugin(laws_command)
    text = (
        "Print ranks of attention matrices, and of mixtures of attentions, softmaxes and contexts"
    )
    ranks_command = commands.add_parser("ranks", help=text, description=f"{text}.")
    ranks_command.add_argument("--out", type=Path, metavar="DIR", help="Write ranks.csv to DIR")
    text = "Draw the matrices with seed N (default: 0)"
    ranks_command.add_argument("--seed", type=seed, default=0, metavar="N", help=text)
    add_plugin(ranks_command)
    in_context.add_parser(commands)
    pretrained_options.add_parsers(commands)
    sharpness.add_parser(commands)
    for name, task in (TASKS | EXPERIMENTS).items():
        if name in top.commands:
            raise UsageError(f"a task must not be named like a command, got {name!r}")
        short = task.about.split(". ")[0].split(" (")[0].split(": ")[0].rstrip(".")
        task_parser = commands.add_parser(
            name, help=short.replace("%", "%%"), description=task.about
        )
        add_arguments(task_parser, experiment=name in EXPERIMENTS)
        if name in EXPERIMENTS:
            task_parser.epilog = f"conditions: {', '.join(EXPERIMENTS[name].conditions)}"
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
    except (UsageError, OSError) as error:  # OSError: a file that cannot be read or written
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues with the results so far", file=sys.stderr)
        return 130


def dispatch(args: argparse.Namespace) -> int:
    if args.command == "laws":
        names = None if args.variants is None else args.variants.replace(" ", "").split(",")
        return laws.command(args.out, args.plugin, names)
    if args.command == "ranks":
        load_plugins(args.plugin)
        return ranks.main(args.out, args.seed)
    if args.command == in_context.NAME:
        load_plugins(args.plugin)
        return in_context.main(args)
    if args.command in pretrained_options.NAMES:
        return pretrained.main(args)
    if args.command == sharpness.NAME:
        load_plugins(args.plugin)
        return sharpness.main(args)
    if args.command == "report":
        load_plugins(args.plugin)
        return artifacts.main(args.folders, args.out)
    if args.command == export.NAME:
        load_plugins(args.plugin)
        return export.main(args)
    if args.command == "compare":
        load_plugins(args.plugin)
        return compare.main(args.a, args.b, args.fail_below, args.holds)
    names = list(TASKS) if args.command == ALL else [args.command]
    model, text = (vars(args).pop(name, None) for name in ("model", "text"))
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
        if shared.preset not in TASKS[name].presets:
            print(f"left out: {name} has no preset {shared.preset!r}")
            names.remove(name)
    chosen = [(TASKS | EXPERIMENTS)[name] for name in names]
    status = run_tasks(chosen, options, out, artifacts.write_results)
    if model is not None and not shared.dry_run:
        line = [sharpness.NAME, "--model", model, "--text", str(text)]
        line += ["--out", str(out / sharpness.NAME)]
        return max(status, sharpness.main(parser().parse_args(line)))
    return status


if __name__ == "__main__":
    sys.exit(main())
