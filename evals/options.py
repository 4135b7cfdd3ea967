"""The options of commands, from the command line and, for an eval, from a TOML file.

A model of pydantic is the only list of the options of a command. Its arguments are made from it,
and values are checked with it: those of the command line are texts, those of a file have types.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)

import attnzoo
from commandline.arguments import did_you_mean
from commandline.errors import UsageError
from commandline.variants import Spec, split_list
from evals.results.rows import first_error
from evals.results.store import UNSHARDED, Shard
from evals.task import MAX_LENGTH, MAX_SETTING, RECORDED, Eval
from evals.tasks import EVALS
from evals.tasks.checks import checked_candidates

PresetName = Literal["smoke", "quick", "paper", "gpu"]
LoggerName = Literal["tensorboard", "wandb"]
NO_SWEEP = "none"
LINE = "command line"  # the context of pydantic where values are texts
AnyOptions = TypeVar("AnyOptions", bound=BaseModel)
AnyRunOptions = TypeVar("AnyRunOptions", bound="RunOptions")


# ------------------------------------------------------------------------------ texts and values


def split(value: object, info: ValidationInfo) -> object:
    """The entries of a list on the command line."""
    return split_list(value) if info.context == LINE and isinstance(value, str) else value


def no_repeats(values: Sequence[Any]) -> Sequence[Any]:
    """The values, or a ValueError if one is repeated."""
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ValueError(f"must not repeat an entry, got {twice[0]} twice")
    return values


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs; raises ValueError for a repeated name."""
    names = [name for name, _ in pairs]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"must name a setting once, got {twice[0]} twice")
    return dict(pairs)


def _settings(value: object, info: ValidationInfo) -> object:
    """Read a list of NAME=VALUE. VALUE is read as TOML; if it is not valid TOML, it is text."""
    if info.context != LINE or not isinstance(value, list):
        return value
    return _unique([_setting(text) for text in value])


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _sweep(value: Any, info: ValidationInfo) -> Mapping[str, Sequence[float]] | str | None:
    """A valid sweep, from a list of NAME=V,V,…, from a table, or from a word; "none" is {}."""
    words = (NO_SWEEP, RECORDED)
    if info.context == LINE and isinstance(value, list):
        if len(value) > 1 and (word := {*words} & {*value}):
            raise ValueError(f"{word.pop()} must be the only --sweep")
        value = value[0] if value[0] in words else _unique([_candidates(text) for text in value])
    if value is None or value == RECORDED:
        return value
    if value == NO_SWEEP:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"must be a table NAME = [V, V, …], {NO_SWEEP!r} or {RECORDED!r}, got {value!r}"
        )
    return {name: checked_candidates(name, values) for name, values in value.items()}


def _candidates(text: str) -> tuple[str, list[float]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise ValueError(f"must be NAME=V,V,…, {NO_SWEEP} or {RECORDED}, got {text!r}")
    try:
        return name.strip(), [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"must have numbers as values of {name.strip()}, got {values!r}") from None


def _shard(value: object) -> Shard:
    """Read I/N. "env" reads both numbers from the environment of torchrun or a SLURM array."""
    if isinstance(value, Shard):
        return value
    text, local_rank = str(value), None
    if text == "env":
        text, local_rank = _shard_from_environment(), os.environ.get("LOCAL_RANK")
    index, _, count = text.partition("/")
    decimal = all(part.isascii() and part.isdecimal() for part in (index, count))
    if not decimal or not int(index) < int(count):
        raise ValueError(f"must be I/N with 0 <= I < N, or env, got {text!r}")
    return Shard(int(index), int(count), None if local_rank is None else int(local_rank))


def _shard_from_environment() -> str:
    """Read I/N from torchrun or SLURM. SLURM indices may start above 0 and have a step."""
    env, array = os.environ, "SLURM_ARRAY_TASK_"
    if "RANK" in env and "WORLD_SIZE" in env:
        return f"{env['RANK']}/{env['WORLD_SIZE']}"
    if f"{array}ID" in env and f"{array}COUNT" in env:
        first, step = int(env.get(f"{array}MIN", 0)), int(env.get(f"{array}STEP", 1))
        return f"{(int(env[f'{array}ID']) - first) // step}/{env[f'{array}COUNT']}"
    raise ValueError(
        f"must be I/N: env needs RANK and WORLD_SIZE, or {array}ID and {array}COUNT, to be set"
    )


# ------------------------------------------------------------------------------------ the options

Count = Annotated[int, Field(ge=1, le=MAX_SETTING)]
File = Annotated[Path, Field(strict=False)]
Names = Annotated[
    Sequence[str], Field(min_length=1), AfterValidator(no_repeats), BeforeValidator(split)
]
Length = Annotated[int, Field(ge=2, le=MAX_LENGTH)]
Lengths = Annotated[
    Sequence[Length], Field(min_length=1), AfterValidator(no_repeats), BeforeValidator(split)
]


def option(default: Any, placeholder: str, text: str) -> Any:
    """A field with its default, its placeholder in the command line's help, such as N, and its help
    text. The default ... makes it required."""
    return Field(default, title=placeholder, description=text)


class RunOptions(BaseModel):
    """The options of every command that executes runs. None stands for a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    plugin: File | None = option(
        None, "FILE.py", "Load a Python file that registers more variants or tasks"
    )
    workers: Annotated[int, Field(ge=0)] | None = option(
        None, "N", "Use N worker processes (default: one per core or GPU); 0: no worker process"
    )
    shard: Annotated[Shard, BeforeValidator(_shard)] = option(
        UNSHARDED, "I/N",
        "Run part I of N (I from 0); env reads I and N from torchrun or a SLURM array",
    )  # fmt: skip
    device: str = option("cpu", "NAME", "Run on cpu, cuda or cuda:N")
    retry_failed: bool = option(False, "", "Repeat runs that ended in NaN or out of memory")
    verbose: bool = option(
        False, "", "Also print schedule, more tables, all failures, tracebacks and status lines"
    )
    dry_run: bool = option(
        False, "", "Print the runs and, from stored results, their time; run nothing"
    )


class Options(RunOptions):
    """The options of an eval. None stands for a default, such as the preset's value.

    ``settings`` overrides fields of the task's Settings.
    """

    preset: PresetName = option(
        "quick", "{smoke,quick,paper,gpu}", "Choose variants, lengths and model size"
    )
    variants: Names | None = option(
        None, "a,b(x=1),a->b",
        "Train and evaluate these; a->b trains a and substitutes b at inference; a=>b replaces a "
        "by b during the training",
    )  # fmt: skip
    positions: Names | None = option(
        None,
        "none,rope,…",
        "Combine each variant with these position encodings; rope->yarn, ->ntk or ->linear "
        "scales the rope of a trained model at inference",
    )
    seeds: Count | None = option(None, "N", "Train with the seeds 0 to N - 1")
    lengths: Lengths | None = option(
        None, "N,N,…", "Evaluate at these lengths and at the train length"
    )
    conditions: Names | None = option(None, "NAME,…", "Train under these conditions (default: all)")
    steps: Count | None = option(None, "N", "Train for N steps")
    output: str | None = option(
        None, "LAYER", "Train with this output layer: a variant, mixture(components=K) or adaptive "
        "(default: softmax)",
    )  # fmt: skip
    settings: Annotated[Mapping[str, Any], BeforeValidator(_settings)] = option(
        {}, "NAME=VALUE",
        "Change a setting of the task (repeatable); an unknown NAME lists all settings",
    )  # fmt: skip
    sweep: Annotated[Any, BeforeValidator(_sweep)] = option(
        None, "NAME=V,V,…",
        "Train each variant with the best of these values of a setting (repeatable); "
        "recorded: the values that a recorded sweep chose; none: no sweep",
    )  # fmt: skip
    record: bool = option(False, "", "Record the choices of the sweep in evals/tasks/tuned.json")
    out: File | None = option(
        None, "DIR", "Write results to DIR, or continue those in it (default: results/PRESET)"
    )
    log: Annotated[Sequence[LoggerName], BeforeValidator(split)] = option(
        (), "NAME,…", f"Also log losses and metrics to {', '.join(get_args(LoggerName))}"
    )


# The options that are allowed in a task's table of the TOML file.
OF_TABLE = (
    "variants", "positions", "seeds", "lengths", "conditions", "steps", "output", "settings",
    "sweep",
)  # fmt: skip


def flag(name: str) -> str:
    """The argument of an option.

    >>> flag("retry_failed"), flag("settings")
    ('--retry-failed', '--set')
    """
    return "--set" if name == "settings" else f"--{name.replace('_', '-')}"


def add_fields(
    parser: argparse.ArgumentParser, options: type[BaseModel], left_out: Collection[str] = ()
) -> None:
    """Add the fields of a model to a parser. The parsed namespace has only those in the line."""
    parser.argument_default = argparse.SUPPRESS
    names = [name for name in options.model_fields if name not in left_out]
    for name in sorted(names, key=lambda name: name in RunOptions.model_fields):
        field = options.model_fields[name]
        text, default = field.description, field.default
        if field.annotation is bool:
            parser.add_argument(flag(name), action="store_true", help=text)
            continue
        if isinstance(default, tuple) and default:
            default = ",".join(map(str, default))
        if isinstance(default, str | int | float | Path):
            text = f"{text} (default: {default})"
        action = "append" if name in ("settings", "sweep") else "store"
        parser.add_argument(flag(name), dest=name, metavar=field.title, action=action, help=text,
                            required=field.is_required())  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, task: Eval) -> None:
    """Add the options of a task to a parser."""
    text = "Read options from a TOML file; options of the command line replace them"
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=text)
    add_fields(parser, Options, task.refused)
    if task.axis == "condition":
        action = parser._option_string_actions["--variants"]
        action.metavar, action.help = "a,b(x=1)", "Train and evaluate these output layers"


def read_options(options: type[AnyOptions], args: argparse.Namespace) -> AnyOptions:
    """The options in the command line; raises UsageError for the first invalid one."""
    values = {name: x for name, x in vars(args).items() if name in options.model_fields}
    try:
        return options.model_validate(values, strict=False, context=LINE)
    except ValidationError as error:
        raise UsageError(first_error(error, flag)) from error


def _set(options: BaseModel) -> dict[str, Any]:
    """The options that are set."""
    return {name: getattr(options, name) for name in options.model_fields_set}


def gather(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Options]:
    """The options of each named task, from the file and the command line; the command line wins.

    In the file, a table named after a task has options for that task only. With several tasks, an
    option or a setting applies only to those that have it, and ``positions`` only to tasks with
    encodings.

    Raises:
        UsageError: the file cannot be read, or an option is unknown or out of bounds.
    """
    line = _set(read_options(Options, args))
    file = _read(args.config) if "config" in args else {}
    shared = {name: value for name, value in file.items() if name not in EVALS}
    several = len(names) > 1
    for layer in (shared, line):
        for name in layer.get("settings", {}):
            if several and not any(name in settings_of(task) for task in names):
                every = set().union(*map(settings_of, names))
                raise UsageError(f"no task has a setting {name!r}{did_you_mean(name, every)}")
    options = {}
    for task in names:
        general = (_supported(task, x) if several else x for x in (shared, line))
        layers = (next(general), file.get(task, {}), next(general))
        settings = {name: x for layer in layers for name, x in layer.get("settings", {}).items()}
        merged = {name: value for layer in layers for name, value in layer.items()}
        options[task] = with_local_rank(Options(**{**merged, "settings": settings}))
    return options


def settings_of(task: str) -> set[str]:
    """The names of a task's settings."""
    return {entry.name for entry in fields(next(iter(EVALS[task].presets.values())).settings)}


def no_setting(task: str, name: str, known: Collection[str]) -> str:
    """The error message for an unknown setting."""
    hint = did_you_mean(name, known)
    return f"{task} has no setting {name!r}{hint}{' It' if hint else '; it'} has: " + ", ".join(
        sorted(known)
    )


def _supported(task: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what this task does not have, and encodings if it supports only "none"."""
    options = {name: value for name, value in layer.items() if name not in EVALS[task].refused}
    known = settings_of(task)
    if "settings" in options:
        options["settings"] = {name: x for name, x in options["settings"].items() if name in known}
    if getattr(EVALS[task], "positions", None) == ("none",):
        options.pop("positions", None)
    if "output" not in known:
        options.pop("output", None)
    return options


def with_local_rank(options: AnyRunOptions) -> AnyRunOptions:
    """Under torchrun, use the GPU of the local rank, and one worker by default."""
    if options.shard.local_rank is None:
        return options
    device = f"cuda:{options.shard.local_rank}" if options.device == "cuda" else options.device
    workers = 1 if options.workers is None else options.workers
    return options.model_copy(update={"device": device, "workers": workers})


# ---------------------------------------------------------------------------------- the TOML file


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
    content, where = _parsed(path), f"--config {path}: "
    tables = {name: content.pop(name) for name in EVALS if name in content}
    for name, value in content.items():
        if isinstance(value, dict) and name not in Options.model_fields:
            hint = did_you_mean(name, EVALS) or f"; known: {', '.join(EVALS)}"
            raise UsageError(f"{where}unknown task [{name}]{hint}")
    options = _checked(where, content, list(Options.model_fields))
    for task, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{where}{task} must be a table, got {table!r}")
        names = [name for name in OF_TABLE if name not in EVALS[task].refused]
        options[task] = _checked(f"{where}[{task}] ", table, names)
        for name in options[task].get("settings", {}):
            if name not in (known := settings_of(task)):
                raise UsageError(f"{where}{no_setting(task, name, known)}")
    return options


def _checked(where: str, table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Check the names and values of a table of the file."""
    for name in table:
        if name not in names:
            hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
            raise UsageError(f"{where}unknown key {name!r}{hint}")
    try:
        return _set(Options.model_validate(table))
    except ValidationError as error:
        raise UsageError(f"{where}{first_error(error)}") from error


# ------------------------------------------------------------------- checks that commands share


def check_device(device: str) -> None:
    """Raise UsageError unless the device exists."""
    try:
        torch_device = torch.device(device)
    except RuntimeError:
        torch_device = None
    if torch_device is None or (device != "cpu" and torch_device.type != "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if torch_device.type == "cuda":
        index, count = torch_device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise UsageError(
                f"--device must be a device that exists, got {device!r}; torch finds {count} GPU(s)"
            )


def check_registered(name: str, spec: Spec) -> None:
    """Raise UsageError unless an entry of the option ``name`` is a registered variant, not a->b."""
    if spec.is_substitution or spec.test.name not in attnzoo.list_variants():
        known = ", ".join(attnzoo.list_variants())
        hint = did_you_mean(spec.test.name, attnzoo.list_variants())
        raise UsageError(f"{name} must be among {known}, got {spec}{hint}")


def check_unique(name: str, values: Sequence[object]) -> None:
    """Raise UsageError if the option ``name`` repeats a value."""
    try:
        no_repeats(values)
    except ValueError as error:
        raise UsageError(f"{name} {error}") from error
