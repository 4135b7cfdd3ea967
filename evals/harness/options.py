"""What a run is asked for: a TOML file, and the command line, which has the last word."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from commandline.arguments import add_plugin, numbers
from commandline.errors import UsageError
from commandline.variants import split_list
from evals.results.store import WHOLE, Shard
from evals.tasks import TASKS

LOGGERS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class Options:
    """None means what the preset says. settings are fields of the task's Settings."""

    preset: str = "quick"
    variants: Sequence[str] | None = None
    positions: Sequence[str] | None = None
    seeds: int | None = None
    lengths: Sequence[int] | None = None
    steps: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    plugin: Path | None = None
    workers: int | None = None
    shard: Shard = WHOLE
    out: Path | None = None
    device: str = "cpu"
    log: Sequence[str] = ()
    dry_run: bool = False
    retry_failed: bool = False


# Of one task; all others are of the run.
OF_A_TASK = ("variants", "positions", "seeds", "lengths", "steps", "settings")
_TYPES: dict[str, Any] = {
    "preset": str, "variants": list, "positions": list, "seeds": int, "lengths": list,
    "steps": int, "settings": dict, "plugin": str, "workers": int, "shard": str, "out": str,
    "device": str, "log": list, "dry_run": bool, "retry_failed": bool,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, presets: Sequence[str], where: str) -> None:
    """The options on a command line; what is not given stays away from the namespace."""
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="a file of options by their names, as in the README",
    )
    add("--preset", choices=tuple(presets), help="variants, lengths and sizes (default: quick)")
    add("--variants", type=split_list, metavar="a,b(x=1),a->b",
        help="variants with their parameters; a->b trains with a and tests with b")  # fmt: skip
    add("--positions", type=split_list, metavar="none,rope,…",
        help="position encodings to cross the variants with")  # fmt: skip
    add("--seeds", type=int, metavar="N", help="use the seeds 0 to N - 1")
    add("--lengths", type=numbers, metavar="N,N,…",
        help="lengths to test; the longest length of training is always added")  # fmt: skip
    add("--steps", type=int, metavar="N", help="the number of training steps")
    add("--set", action="append", type=_setting, metavar="NAME=VALUE", dest="settings",
        help="change a setting of the task; may be given several times")  # fmt: skip
    add_plugin(parser)
    add("--workers", type=int, metavar="N",
        help="the number of worker processes (default: one per core or GPU); 0 runs all in this "
        "process")  # fmt: skip
    add("--shard", type=_shard, metavar="I/N",
        help="run the I-th of N parts, counted from 0; env takes both numbers from torchrun or a "
        "SLURM array, and under torchrun --device cuda is each process's own GPU")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help=f"the results folder (default: {where})")
    add("--device", help="cpu, cuda or cuda:N (default: cpu)")
    add("--log", type=split_list, metavar="NAME,…",
        help=f"also send losses and metrics to {', '.join(LOGGERS)} (default: none)")  # fmt: skip
    add("--retry-failed", action="store_true",
        help="run again what ended in NaN or without memory")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print what would be run and an estimate of its time, and run nothing")  # fmt: skip


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
        options = Options()
        for layer in (shared, file.get(task, {}), line):
            if several and layer is not file.get(task):
                layer = _of_task(task, layer)
            settings = {**options.settings, **layer.get("settings", {})}
            options = replace(options, **{**layer, "settings": settings})
        found[task] = _of_rank(options)
    return found


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
    return replace(
        options, device=device, workers=1 if options.workers is None else options.workers
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    tables = {name: content.pop(name) for name in TASKS if name in content}
    found: dict[str, Any] = _checked(path, "", content, [entry.name for entry in fields(Options)])
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
    found = dict(table)
    for name, value in table.items():
        if name not in names:
            known = ", ".join(names)
            raise UsageError(f"--config {path}: {where}unknown key {name!r}; known: {known}")
        kind = _TYPES[name]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise UsageError(
                f"--config {path}: {where}{name} must be {kind.__name__}, got {value!r}"
            )
        of = int if name == "lengths" else str
        if kind is list and not (value and all(type(entry) is of for entry in value)):
            raise UsageError(
                f"--config {path}: {where}{name} must hold {of.__name__}, got {value!r}"
            )
        if name in ("plugin", "out"):
            found[name] = Path(value)
        if name == "shard":
            try:
                found[name] = _shard(value)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"--config {path}: shard: {error}") from error
    return found
