"""The options of an eval, from a TOML file and the command line; the command line wins.

`Options` describes both: each field has a type, bounds, a help text, and a function that parses
its text on the command line.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from commandline.arguments import add_plugin, did_you_mean, numbers
from commandline.errors import UsageError
from commandline.variants import split_list
from evals.results.rows import first_error
from evals.results.store import UNSHARDED, Shard
from evals.task import MAX_LENGTH, MAX_SETTING, RECORDED
from evals.tasks import EXPERIMENTS, TASKS, presets_of
from evals.tasks.checks import checked_candidates

PresetName = Literal["smoke", "quick", "paper"]
LoggerName = Literal["tensorboard", "wandb"]


def _setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE. VALUE is read as TOML; if it is not valid TOML, it is kept as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _shard(text: str) -> Shard:
    """Parse I/N. "env" reads both numbers from the environment of torchrun or a SLURM array."""
    local_rank = None
    if text == "env":
        local_rank = os.environ.get("LOCAL_RANK")
        text = _shard_from_environment()
    index, _, count = text.partition("/")
    decimal = all(part.isascii() and part.isdecimal() for part in (index, count))
    if not decimal or not int(index) < int(count):
        raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N, or env, got {text!r}")
    return Shard(int(index), int(count), None if local_rank is None else int(local_rank))


def _shard_from_environment() -> str:
    """Read I/N from torchrun or SLURM. SLURM indices may start above 0 and have a step."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return f"{env['RANK']}/{env['WORLD_SIZE']}"
    array = "SLURM_ARRAY_TASK_"
    if f"{array}ID" in env and f"{array}COUNT" in env:
        first, step = int(env.get(f"{array}MIN", 0)), int(env.get(f"{array}STEP", 1))
        return f"{(int(env[f'{array}ID']) - first) // step}/{env[f'{array}COUNT']}"
    raise argparse.ArgumentTypeError(
        f"must be I/N: env needs RANK and WORLD_SIZE, or {array}ID and {array}COUNT, to be set"
    )


def _checked_shard(value: object) -> Shard:
    try:
        return value if isinstance(value, Shard) else _shard(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error


NO_SWEEP = "none"


def _sweep(text: str) -> tuple[str, Any]:
    """Parse NAME=V,V,…, or a word in place of a sweep."""
    if text in (NO_SWEEP, RECORDED):
        return text, None
    name, _, values = text.partition("=")
    try:
        return name.strip(), [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be NAME=V,V,…, {NO_SWEEP} or {RECORDED}, got {text!r}"
        ) from None


def _named_once(option: str, pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """The names in pairs (name, value) of a repeatable option; raises UsageError for a repeated
    name."""
    names = [name for name, _ in pairs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UsageError(f"{option} must name a setting once, got {twice[0]} twice")
    return names


def _sweep_of_line(sweeps: Sequence[tuple[str, Any]]) -> Mapping[str, Any] | str:
    """The option ``sweep`` from the arguments of --sweep."""
    names = _named_once("--sweep", sweeps)
    if words := {NO_SWEEP, RECORDED} & set(names):
        if len(names) > 1:
            raise UsageError(f"--sweep {words.pop()} must be the only --sweep")
        return names[0]
    return dict(sweeps)


def _checked_sweep(value: Any) -> Mapping[str, Sequence[float]] | str | None:
    """A valid sweep; "none" becomes {}."""
    if value is None or value == RECORDED:
        return value
    if value == NO_SWEEP:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"must be a table NAME = [V, V, …], {NO_SWEEP!r} or {RECORDED!r}, got {value!r}"
        )
    return {name: checked_candidates(name, values) for name, values in value.items()}


@dataclass(frozen=True)
class Parse:
    """The function that parses an option's text on the command line."""

    function: Callable[[str], Any]


Count = Annotated[int | None, Field(ge=1, le=MAX_SETTING), Parse(int)]
Names = Annotated[Sequence[str] | None, Field(min_length=1), Parse(split_list)]
Length = Annotated[int, Field(ge=2, le=MAX_LENGTH)]


class Options(BaseModel):
    """The options of an eval. None stands for a default, such as the preset's value.

    ``settings`` overrides fields of the task's Settings. The title of a field below is its
    placeholder in the command line's help, such as N, and the description is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    preset: PresetName = Field(
        "quick", description="Choose variants, lengths and model size (default: quick)"
    )
    variants: Names = Field(
        None, title="a,b(x=1),a->b",
        description="Train and evaluate these; a->b trains a and substitutes b at inference",
    )  # fmt: skip
    positions: Names = Field(
        None, title="none,rope,…", description="Combine each variant with these position encodings"
    )
    seeds: Count = Field(None, title="N", description="Train with the seeds 0 to N - 1")
    lengths: Annotated[Sequence[Length] | None, Parse(numbers)] = Field(
        None, title="N,N,…", min_length=1,
        description="Evaluate at these lengths and at the train length",
    )  # fmt: skip
    conditions: Names = Field(
        None, title="NAME,…", description="Train under these conditions (default: all)"
    )
    steps: Count = Field(None, title="N", description="Train for N steps")
    output: str | None = Field(
        None, title="LAYER",
        description="Train with this output layer: a variant, mixture(components=K) or adaptive "
        "(default: softmax)",
    )  # fmt: skip
    settings: Annotated[Mapping[str, Any], Parse(_setting)] = Field(
        {}, title="NAME=VALUE",
        description="Change a setting of the task (repeatable); an unknown NAME lists all settings",
    )  # fmt: skip
    sweep: Annotated[Any, BeforeValidator(_checked_sweep), Parse(_sweep)] = Field(
        None, title="NAME=V,V,…",
        description="Train each variant with the best of these values of a setting (repeatable); "
        "recorded: the values that a recorded sweep chose; none: no sweep",
    )  # fmt: skip
    record: bool = Field(
        False, description="Record the choices of the sweep in evals/tasks/tuned.json"
    )
    plugin: Path | None = Field(None, strict=False)  # described by `add_plugin`
    workers: Annotated[int | None, Parse(int)] = Field(
        None, title="N", ge=0,
        description="Use N worker processes (default: one per core or GPU); 0: no worker process",
    )  # fmt: skip
    shard: Annotated[Shard, BeforeValidator(_checked_shard), Parse(_shard)] = Field(
        UNSHARDED, title="I/N",
        description="Run part I of N (I from 0); env reads I and N from torchrun or a SLURM array",
    )  # fmt: skip
    out: Annotated[Path | None, Parse(Path)] = Field(
        None, title="DIR", strict=False,
        description="Write results to DIR, or continue those in it (default: results/PRESET)",
    )  # fmt: skip
    device: str = Field(
        "cpu", title="NAME", description="Run on cpu, cuda or cuda:N (default: cpu)"
    )
    log: Annotated[Sequence[LoggerName], Parse(split_list)] = Field(
        (), title="NAME,…",
        description=f"Also log losses and metrics to {', '.join(get_args(LoggerName))}",
    )  # fmt: skip
    retry_failed: bool = Field(False, description="Repeat runs that ended in NaN or out of memory")
    verbose: bool = Field(
        False,
        description="Also print schedule, more tables, all failures, tracebacks and status lines",
    )
    dry_run: bool = Field(False, description="Estimate the time of the runs, and run nothing")


# The options that are allowed in a task's table of the TOML file.
TASK_OPTIONS = (
    "variants", "positions", "seeds", "lengths", "steps", "output", "settings", "sweep",
)  # fmt: skip
EXPERIMENT_OPTIONS = ("variants", "conditions", "seeds", "steps", "settings")
# The options that a task's command, and an experiment's command, does not have.
_NOT_OF_TASKS = ("conditions",)
_NOT_OF_EXPERIMENTS = ("positions", "lengths", "output", "sweep", "record")


def add_arguments(parser: argparse.ArgumentParser, experiment: bool = False) -> None:
    """Add the options of a task, or of an experiment, to a parser. The parsed namespace has only
    the options that were given."""
    parser.argument_default = argparse.SUPPRESS
    text = "Read options from a TOML file; options of the command line replace them"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=text)
    add_plugin(parser, " or tasks")
    for name, field in Options.model_fields.items():
        if name in (_NOT_OF_EXPERIMENTS if experiment else _NOT_OF_TASKS):
            continue
        flag = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=field.description)
        elif field.description:
            parsers = [x.function for x in field.metadata if isinstance(x, Parse)]
            layers = experiment and name == "variants"
            parser.add_argument(
                flag, dest=name, type=parsers[0] if parsers else str,
                metavar="a,b(x=1)" if layers else field.title,
                action="append" if name in ("settings", "sweep") else "store",
                help="Train and evaluate these output layers" if layers else field.description,
                choices=get_args(PresetName) if name == "preset" else None,
            )  # fmt: skip


def gather(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Options]:
    """The options of each named task, from the file and the command line; the command line wins.

    In the file, a table named after a task has options for that task only. With several tasks, a
    setting applies only to tasks that have it, and ``positions`` only to tasks with encodings.

    Raises:
        UsageError: the file cannot be read, or an option is unknown or out of bounds.
    """
    line = {name: value for name, value in vars(args).items() if name not in ("command", "config")}
    _named_once("--set", line.get("settings", []))
    line["settings"] = dict(line.get("settings", []))
    if "sweep" in line:
        line["sweep"] = _sweep_of_line(line["sweep"])
    file = _read(args.config) if "config" in args else {}
    commands = (*TASKS, *EXPERIMENTS)
    shared = {name: value for name, value in file.items() if name not in commands}
    several = len(names) > 1
    for layer in (shared, line):
        for name in layer.get("settings", {}):
            if several and not any(name in settings_of(task) for task in names):
                every = set().union(*map(settings_of, names))
                raise UsageError(f"no task has a setting {name!r}{did_you_mean(name, every)}")
    options = {}
    for task in names:
        merged: dict[str, Any] = {}
        for layer in (shared, file.get(task, {}), line):
            if several and layer is not file.get(task):
                layer = _without_unknown(task, layer)
            settings = {**merged.get("settings", {}), **layer.get("settings", {})}
            merged |= {**layer, "settings": settings}
        options[task] = _with_local_rank(_valid(merged, "--"))
    return options


def _valid(options: Mapping[str, Any], where: str) -> Options:
    """Check options; raises UsageError for the first invalid one."""
    try:
        return Options.model_validate(options)
    except ValidationError as error:
        raise UsageError(f"{where}{first_error(error)}") from error


def settings_of(task: str) -> set[str]:
    """The names of a task's settings."""
    return {entry.name for entry in fields(next(iter(presets_of(task).values())).settings)}


def no_setting(task: str, name: str, known: Collection[str]) -> str:
    """The error message for an unknown setting."""
    hint = did_you_mean(name, known)
    return f"{task} has no setting {name!r}{hint}{' It' if hint else '; it'} has: " + ", ".join(
        sorted(known)
    )


def _without_unknown(task: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Drop settings that this task does not have, and encodings if it supports only "none"."""
    options = dict(layer)
    if "settings" in options:
        known = settings_of(task)
        options["settings"] = {name: x for name, x in options["settings"].items() if name in known}
    if TASKS[task].positions == ("none",):
        options.pop("positions", None)
    if "output" not in settings_of(task):
        options.pop("output", None)
    return options


def _with_local_rank(options: Options) -> Options:
    """Under torchrun, use the GPU of the local rank, and one worker by default."""
    rank = options.shard.local_rank
    if rank is None:
        return options
    device = f"cuda:{rank}" if options.device == "cuda" else options.device
    workers = 1 if options.workers is None else options.workers
    return options.model_copy(update={"device": device, "workers": workers})


def plugin_of_file(path: Path | None) -> Path | None:
    """The plugin named by a TOML file, if any. `gather` reports errors in the file."""
    try:
        plugin = None if path is None else _parsed(path).get("plugin")
    except UsageError:
        return None
    return Path(plugin) if isinstance(plugin, str) else None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    content = _parsed(path)
    commands = (*TASKS, *EXPERIMENTS)
    tables = {name: content.pop(name) for name in commands if name in content}
    for name, value in content.items():
        if isinstance(value, dict) and name not in Options.model_fields:
            hint = did_you_mean(name, commands) or f"; known: {', '.join(commands)}"
            raise UsageError(f"--config {path}: unknown task [{name}]{hint}")
    options: dict[str, Any] = _checked(path, "", content, list(Options.model_fields))
    for task, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"--config {path}: {task} must be a table, got {table!r}")
        names = EXPERIMENT_OPTIONS if task in EXPERIMENTS else TASK_OPTIONS
        options[task] = _checked(path, f"[{task}] ", table, names)
        for name in options[task].get("settings", {}):
            if name not in (known := settings_of(task)):
                raise UsageError(f"--config {path}: {no_setting(task, name, known)}")
    return options


def _checked(
    path: Path, where: str, table: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Check the names and values of a table of the file."""
    for name in table:
        if name not in names:
            hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
            raise UsageError(f"--config {path}: {where}unknown key {name!r}{hint}")
    _valid(table, f"--config {path}: {where}")
    return dict(table)
