"""What a run is asked for: a TOML file, and the command line, which has the last word.

`Options` is the one description of both: each field has its type and bounds, its words of help, and
how the command line reads it.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from commandline.arguments import add_plugin, numbers
from commandline.errors import UsageError
from commandline.variants import split_list
from evals.results.rows import first
from evals.results.store import WHOLE, Shard
from evals.task import MOST, MOST_LENGTH
from evals.tasks import TASKS

PresetName = Literal["smoke", "quick", "paper"]
LoggerName = Literal["tensorboard", "wandb"]


def _setting(text: str) -> tuple[str, Any]:
    """A name and a value, read as TOML reads it, or as the text that it is."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def _shard(text: str) -> Shard:
    """I/N; "env" asks torchrun's RANK and WORLD_SIZE, then a SLURM array's."""
    local_rank = None
    if text == "env":
        local_rank = os.environ.get("LOCAL_RANK")
        text = _of_environment()
    index, _, count = text.partition("/")
    decimal = all(part.isascii() and part.isdecimal() for part in (index, count))
    if not decimal or not int(index) < int(count):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, or env, got {text!r}")
    return Shard(int(index), int(count), None if local_rank is None else int(local_rank))


def _of_environment() -> str:
    """I/N of this process: torchrun's, or a SLURM array's, whose indices may begin and step."""
    found = os.environ
    if "RANK" in found and "WORLD_SIZE" in found:
        return f"{found['RANK']}/{found['WORLD_SIZE']}"
    array = "SLURM_ARRAY_TASK_"
    if f"{array}ID" in found and f"{array}COUNT" in found:
        first, step = int(found.get(f"{array}MIN", 0)), int(found.get(f"{array}STEP", 1))
        return f"{(int(found[f'{array}ID']) - first) // step}/{found[f'{array}COUNT']}"
    raise argparse.ArgumentTypeError(
        f"env: neither RANK and WORLD_SIZE nor {array}ID and {array}COUNT are set"
    )


def _checked_shard(value: object) -> Shard:
    try:
        return value if isinstance(value, Shard) else _shard(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Read:
    """How the command line's text becomes a value of the type."""

    function: Callable[[str], Any]


Count = Annotated[int | None, Field(ge=1, le=MOST), Read(int)]
Words = Annotated[Sequence[str] | None, Field(min_length=1), Read(split_list)]
Length = Annotated[int, Field(ge=2, le=MOST_LENGTH)]


class Options(BaseModel):
    """None means what the preset says. settings are fields of the task's Settings.

    Of a field, title is the command line's word for its value, and description its help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    preset: PresetName = Field("quick", description="variants, lengths and sizes (default: quick)")
    variants: Words = Field(
        None, title="a,b(x=1),a->b",
        description="variants with their parameters; a->b trains with a and tests with b",
    )  # fmt: skip
    positions: Words = Field(
        None, title="none,rope,…", description="position encodings to cross the variants with"
    )
    seeds: Count = Field(None, title="N", description="use the seeds 0 to N - 1")
    lengths: Annotated[Sequence[Length] | None, Read(numbers)] = Field(
        None, title="N,N,…", min_length=1,
        description="lengths to test; the longest length of training is always added",
    )  # fmt: skip
    steps: Count = Field(None, title="N", description="the number of training steps")
    settings: Annotated[Mapping[str, Any], Read(_setting)] = Field(
        {}, title="NAME=VALUE",
        description="change a setting of the task; may be given several times",
    )  # fmt: skip
    plugin: Path | None = Field(None, strict=False)  # described by `add_plugin`
    workers: Annotated[int | None, Read(int)] = Field(
        None, title="N", ge=0,
        description="the number of worker processes (default: one per core or GPU); 0 runs all in "
        "this process",
    )  # fmt: skip
    shard: Annotated[Shard, BeforeValidator(_checked_shard), Read(_shard)] = Field(
        WHOLE, title="I/N",
        description="run the I-th of N parts, counted from 0; env takes both numbers from torchrun "
        "or a SLURM array, and under torchrun --device cuda is each process's own GPU",
    )  # fmt: skip
    out: Annotated[Path | None, Read(Path)] = Field(
        None, title="DIR", strict=False,
        description="the results folder (default: results/PRESET)",
    )  # fmt: skip
    device: str = Field("cpu", description="cpu, cuda or cuda:N (default: cpu)")
    log: Annotated[Sequence[LoggerName], Read(split_list)] = Field(
        (), title="NAME,…",
        description=f"also send losses and metrics to {', '.join(get_args(LoggerName))} "
        "(default: none)",
    )  # fmt: skip
    retry_failed: bool = Field(False, description="run again what ended in NaN or without memory")
    dry_run: bool = Field(
        False, description="print what would be run and an estimate of its time, and run nothing"
    )


# Of one task; all others are of the run.
OF_A_TASK = ("variants", "positions", "seeds", "lengths", "steps", "settings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options on a command line; what is not given stays away from the namespace."""
    parser.argument_default = argparse.SUPPRESS
    words = "a file of options by their names, as in the README"
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=words)
    add_plugin(parser)
    for name, field in Options.model_fields.items():
        flag = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=field.description)
        elif field.description:
            reads = [found.function for found in field.metadata if isinstance(found, Read)]
            parser.add_argument(
                flag, dest=name, type=reads[0] if reads else str, metavar=field.title,
                action="append" if name == "settings" else "store", help=field.description,
                choices=get_args(PresetName) if name == "preset" else None,
            )  # fmt: skip


def gather(given: argparse.Namespace, names: Sequence[str]) -> dict[str, Options]:
    """The options of each named task: what the file says, then the command line.

    In the file, a table of a task's name holds that task's own; ``[settings]`` its settings. With
    several tasks, what only some of them have (a setting, position encodings) is for those.

    Raises:
        UsageError: the file cannot be read, or says what no option is called.
    """
    line = {name: value for name, value in vars(given).items() if name not in ("command", "config")}
    line["settings"] = dict(line.get("settings", []))
    file = _read(given.config) if "config" in given else {}
    shared = {name: value for name, value in file.items() if name not in TASKS}
    several = len(names) > 1
    for layer in (shared, line):
        for name in layer.get("settings", {}):
            if several and not any(name in settings_of(task) for task in names):
                raise UsageError(f"no task has a setting {name!r}")
    found = {}
    for task in names:
        merged: dict[str, Any] = {}
        for layer in (shared, file.get(task, {}), line):
            if several and layer is not file.get(task):
                layer = _of_task(task, layer)
            settings = {**merged.get("settings", {}), **layer.get("settings", {})}
            merged |= {**layer, "settings": settings}
        found[task] = _of_rank(_valid(merged, "--"))
    return found


def _valid(given: Mapping[str, Any], where: str) -> Options:
    """The options given, or one line on the first that cannot be."""
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{where}{first(error)}") from error


def settings_of(task: str) -> set[str]:
    """The names of a task's settings."""
    return {entry.name for entry in fields(TASKS[task].presets["smoke"].settings)}


def _of_task(task: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """What of a layer for several tasks is for one of them."""
    mine = dict(layer)
    if "settings" in mine:
        known = settings_of(task)
        mine["settings"] = {name: x for name, x in mine["settings"].items() if name in known}
    if TASKS[task].positions == ("none",):
        mine.pop("positions", None)
    return mine


def _of_rank(options: Options) -> Options:
    """Under torchrun a process has one GPU, or one worker, unless it is said otherwise."""
    rank = options.shard.local_rank
    if rank is None:
        return options
    device = f"cuda:{rank}" if options.device == "cuda" else options.device
    workers = 1 if options.workers is None else options.workers
    return options.model_copy(update={"device": device, "workers": workers})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    tables = {name: content.pop(name) for name in TASKS if name in content}
    found: dict[str, Any] = _checked(path, "", content, list(Options.model_fields))
    for task, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"--config {path}: a task's name must begin a table of its options")
        found[task] = _checked(path, f"[{task}] ", table, OF_A_TASK)
        for name in found[task].get("settings", {}):
            if name not in (known := settings_of(task)):
                known_names = ", ".join(sorted(known))
                raise UsageError(
                    f"--config {path}: {task} has no setting {name!r}; it has: {known_names}"
                )
    return found


def _checked(
    path: Path, where: str, table: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """A table of the file, in which every value is one that `Options` takes."""
    for name in table:
        if name not in names:
            known = ", ".join(names)
            raise UsageError(f"--config {path}: {where}unknown key {name!r}; known: {known}")
    _valid(table, f"--config {path}: {where}")
    return dict(table)
