"""What a run is asked for: a TOML file, and the command line, which has the last word."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from evals.cells import Refused, split_list
from evals.store import WHOLE, Shard

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


# Of one task; all others are of the run.
OF_A_TASK = ("variants", "positions", "seeds", "lengths", "steps", "settings")
_TYPES: dict[str, Any] = {
    "preset": str, "variants": list, "positions": list, "seeds": int, "lengths": list,
    "steps": int, "settings": dict, "plugin": str, "workers": int, "shard": str, "out": str,
    "device": str, "log": list, "dry_run": bool,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, presets: Sequence[str], where: str) -> None:
    """The options on a command line; what is not given stays away from the namespace."""
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="options by their names, as in the README")
    add("--preset", choices=tuple(presets), help="default: quick")
    add("--variants", type=split_list, help="a,b(x=1),a->b(x=1): a->b trains a, tests b")
    add("--positions", type=split_list, help="position encodings to cross with: none,rope,…")
    add("--seeds", type=int, help="number of seeds, 0 .. N-1")
    add("--lengths", type=_lengths, help="lengths to test, as 16,64,256; training's own is added")
    add("--steps", type=int, help="training steps")
    add("--set", action="append", type=_setting, metavar="NAME=VALUE", dest="settings",
        help="a setting of the task, as in its Settings; may be given again")  # fmt: skip
    add("--plugin", type=Path, metavar="FILE.py", help="a file that registers variants")
    add("--workers", type=int, help="processes (default: one per core or GPU; 0: none)")
    add("--shard", type=_shard, metavar="I/N",
        help="the I-th of N parts, from 0; env: as torchrun or a SLURM array say; under torchrun "
        "--device cuda is then each process's own GPU")  # fmt: skip
    add("--out", type=Path, help=f"results folder (default: {where})")
    add("--device", help="cpu, cuda or cuda:N")
    add("--log", type=split_list, help=f"loggers: {', '.join(LOGGERS)} (default: none)")
    add("--dry-run", action="store_true", help="say what would be run and what it would cost")


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected lengths such as 16,64,256, got {text!r}"
        ) from None


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
        pairs = (
            ("RANK", "WORLD_SIZE", "0"),
            ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
        )
        for rank, size, least in pairs:
            if rank in os.environ and size in os.environ:
                first = int(os.environ.get(least, least if least.isdigit() else "0"))
                text = f"{int(os.environ[rank]) - first}/{os.environ[size]}"
                break
        else:
            raise argparse.ArgumentTypeError(
                "env: neither RANK and WORLD_SIZE nor SLURM_ARRAY_TASK_ID and _COUNT are set"
            )
    index, _, count = text.partition("/")
    if not index.isdigit() or not count.isdigit() or not int(index) < int(count):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, or env, got {text!r}")
    return Shard(int(index), int(count), None if local_rank is None else int(local_rank))


def gather(
    given: argparse.Namespace, tasks: Sequence[str], known: Sequence[str]
) -> dict[str, Options]:
    """The options of each of the tasks: what the file says, then the command line.

    In the file, a table of a task's name holds that task's own; ``[settings]`` its settings.

    Raises:
        Refused: the file cannot be read, or says what no option is called.
    """
    line = {name: value for name, value in vars(given).items() if name not in ("command", "config")}
    line["settings"] = dict(line.get("settings", []))
    file = _read(given.config, known) if "config" in given else {}
    shared = {name: value for name, value in file.items() if name not in known}
    found = {}
    for task in tasks:
        options = Options()
        for layer in (shared, file.get(task, {}), line):
            settings = {**options.settings, **layer.get("settings", {})}
            options = replace(options, **{**layer, "settings": settings})
        found[task] = _of_rank(options)
    return found


def _of_rank(options: Options) -> Options:
    """Under torchrun a process has one GPU, or one worker, unless it is said otherwise."""
    rank = options.shard.local_rank
    if rank is None:
        return options
    device = f"cuda:{rank}" if options.device == "cuda" else options.device
    return replace(
        options, device=device, workers=1 if options.workers is None else options.workers
    )


def _read(path: Path, tasks: Sequence[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"--config {path}: {error}") from error
    tables = {name: content.pop(name) for name in tasks if name in content}
    for table in tables.values():
        if not isinstance(table, dict):
            raise Refused(f"--config {path}: a task's name must begin a table of its options")
    names = tuple(option.name for option in fields(Options))
    found: dict[str, Any] = _checked(path, "", content, names)
    for task, table in tables.items():
        found[task] = _checked(path, f"[{task}] ", table, OF_A_TASK)
    return found


def _checked(
    path: Path, where: str, table: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    found = dict(table)
    for name, value in table.items():
        if name not in names:
            known = ", ".join(names)
            raise Refused(f"--config {path}: {where}unknown key {name!r}; known: {known}")
        kind = _TYPES[name]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise Refused(f"--config {path}: {where}{name} must be {kind.__name__}, got {value!r}")
        of = int if name == "lengths" else str
        if kind is list and not all(type(entry) is of for entry in value):
            raise Refused(f"--config {path}: {where}{name} must hold {of.__name__}, got {value!r}")
        if name in ("plugin", "out"):
            found[name] = Path(value)
        if name == "shard":
            try:
                found[name] = _shard(value)
            except argparse.ArgumentTypeError as error:
                raise Refused(f"--config {path}: shard: {error}") from error
    return found
