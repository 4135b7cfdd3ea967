"""Plugins: files that register variants or tasks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attnzoo
from commandline.errors import UsageError
from commandline.variants import load_plugin
from evals.tasks import TASKS

# Maps each file to the names of its tasks, because loading a file again registers no tasks.
_TASKS: dict[Path, list[str]] = {}


def load(path: Path) -> tuple[attnzoo.Plugin, list[str]]:
    """Load a plugin; returns the plugin and the names of the tasks that it registers.

    Raises:
        UsageError: the file cannot be loaded, or it registers neither a variant nor a task.
    """
    before = set(TASKS)
    plugin = load_plugin(path, need_variant=False)
    tasks = _TASKS.setdefault(plugin.file, [name for name in TASKS if name not in before])
    if not plugin.variants and not tasks:
        raise UsageError(f"--plugin {path} registered no variant and no task")
    return plugin, tasks


def load_plugins(path: Path | None) -> dict[str, str]:
    """Load a plugin; returns a dict from variant names and "task NAME" to the hash of the file."""
    if path is None:
        return {}
    plugin, tasks = load(path)
    return dict.fromkeys((*plugin.variants, *(f"task {name}" for name in tasks)), _hash(path))


def check_unchanged(path: Path, expected: str | None) -> None:
    """Raise UsageError if the plugin's file no longer has the hash that is in the keys."""
    if not path.is_file() or _hash(path) != expected:
        raise UsageError(f"--plugin {path} changed during the run; repeat the command")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
