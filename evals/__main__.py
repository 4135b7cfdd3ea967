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
from evals.pretrained import adapt_command as adapt
from evals.pretrained import command as pretrained
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
    everything = commands.add_parser(ALL, help=text, description=f"{text}.")
    add_arguments(everything)
    text = f"Run {sharpness.NAME} on this pretrained model too (with --shard: in shard 0 only); "
    text += "needs --text"
    everything.add_argument("--model", metavar="PATH_OR_NAME", help=text)
    text = "Measure --model on this UTF-8 text"
    everything.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "Write one HTML report of several results folders"
    page = commands.add_parser("report", help=text, description=f"{text}.")
    page.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="Read results from DIR")
    text = "Write the report to FILE (default: report.html in the first DIR)"
    page.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_plugin(page, " or tasks")
    export.add_parser(commands)
    text = "Print the gain in score from results A to results B, paired by seed"
    versus = commands.add_parser("compare", help=text, description=f"{text}.")
    versus.add_argument("a", type=Path, metavar="A", help="Read the first results from folder A")
    versus.add_argument("b", type=Path, metavar="B", help="Read the second results from folder B")
    text = "Exit with 1 if a gain is missing or below X (table units); -1 allows a drop of 1"
    versus.add_argument("--fail-below", type=float, metavar="X", help=text)
    text = "Print which rows of A hold in B: their intervals overlap; exit with 1 if one does not"
    versus.add_argument("--holds", action="store_true", help=text)
    add_plugin(versus, " or tasks")
    text = "Compare the largest weight of each variant with its formula; exit with 1 if they differ"
    law = commands.add_parser("laws", help=text, description=f"{text}.")
    law.add_argument("--out", type=Path, metavar="DIR", help="Write laws.csv and laws.png to DIR")
    text = "Show only these variants: names, separated by commas (default: all)"
    law.add_argument("--variants", metavar="LIST", help=text)
    add_plugin(law)
    text = (
        "Print ranks of attention matrices, and of mixtures of attentions, softmaxes and contexts"
    )
    rank = commands.add_parser("ranks", help=text, description=f"{text}.")
    rank.add_argument("--out", type=Path, metavar="DIR", help="Write ranks.csv to DIR")
    text = "Draw the matrices with seed N (default: 0)"
    rank.add_argument("--seed", type=seed, default=0, metavar="N", help=text)
    add_plugin(rank)
    in_context.add_parser(commands)
    pretrained.add_parser(commands)
    adapt.add_parser(commands)
    sharpness.add_parser(commands)
    for name, task in (TASKS | EXPERIMENTS).items():
        if name in top.commands:
            raise UsageError(f"a task must not be named like a command, got {name!r}")
        short = task.about.split(". ")[0].split(" (")[0].split(": ")[0].rstrip(".")
        one = commands.add_parser(name, help=short.replace("%", "%%"), description=task.about)
        add_arguments(one, experiment=name in EXPERIMENTS)
        if name in EXPERIMENTS:
            one.epilog = f"conditions: {', '.join(EXPERIMENTS[name].conditions)}"
    return top


def _load_plugin_first(arguments: Sequence[str]) -> None:
    """Load the plugin before parsing, because its tasks are commands of the parser."""
    early = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    early.add_argument("--plugin", type=Path)
    early.add_argument("--config", type=Path)
    try:
        given = early.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError:  # the full parser prints the error
        return
    path = given.plugin or plugin_of_file(given.config)
    if path is not None:
        load(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, 1 (failed run or check), 2 (bad usage or file) or 130 (Ctrl-C)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without × or †
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _load_plugin_first(arguments)
        return _run(parser().parse_args(arguments or ["--help"]))
    except (UsageError, OSError) as error:  # OSError: a file that cannot be read or written
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues with the results so far", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace) -> int:
    if given.command == "laws":
        names = None if given.variants is None else given.variants.replace(" ", "").split(",")
        return laws.command(given.out, given.plugin, names)
    if given.command == "ranks":
        load_plugins(given.plugin)
        return ranks.main(given.out, given.seed)
    if given.command == in_context.NAME:
        load_plugins(given.plugin)
        return in_context.main(given)
    if given.command == pretrained.NAME:
        return pretrained.main(given)
    if given.command == adapt.NAME:
        return adapt.main(given)
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
        load_plugins(given.plugin)
        return compare.main(given.a, given.b, given.fail_below, given.holds)
    names = list(TASKS) if given.command == ALL else [given.command]
    model, text = (vars(given).pop(name, None) for name in ("model", "text"))
    if (model is None) != (text is None):
        raise UsageError("--model and --text must be given together")
    options = gather(given, names)
    shared = options[names[0]]
    if model is not None and shared.shard.index > 0:  # shards would write the same files
        print(f"left out: {sharpness.NAME} runs in shard 0 only")
        model = text = None
    if model is not None and text is not None:  # the tasks may take hours
        sharpness.check(model, text)
    out = shared.out or Path("results") / shared.preset
    for name in names.copy() if given.command == ALL else ():
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
