"""What workers execute: a run, with the keys of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commandline.variants import VariantCall


@dataclass(frozen=True)
class RunContext:
    """Settings shared by all runs. Results of a task are stored in out/<task>.

    plugin_hash: the hash of the plugin's file that is in the keys; a worker checks it.
    """

    device: str
    plugin: Path | None
    out: Path
    plugin_hash: str | None


# Messages of a run: ("stage", None | point, fraction of the run), ("loss", step, value) and
# ("rows", point, outcomes, training). A point is a key of ``tests``. A worker ends a run with
# ("done", status), ("failed", traceback) or, if a file could not be written or the plugin changed,
# ("stopped", text).
Message = tuple[Any, ...]
Emit = Callable[[Message], None]


@dataclass(frozen=True)
class AnyRun(ABC):
    """A run. tests[point][key of a result row] says what is evaluated there.

    The point is an eval length or a condition. A run sends the results of one point at a time, and
    after an interruption only the missing points are repeated.
    """

    task: str
    variant: VariantCall
    seed: int
    settings: Any
    tests: dict[Any, dict[str, Any]]

    @abstractmethod
    def execute(self, context: RunContext, emit: Emit) -> str:
        """Pass the results of each point to ``emit``; returns the status, such as "done"."""

    @abstractmethod
    def point_text(self, point: Any) -> str:
        """A point in words, such as "n = 64"."""

    @property
    @abstractmethod
    def log_name(self) -> str:
        """The name under which loggers show the run."""
