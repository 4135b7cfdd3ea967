"""What workers execute: a job is one process's share of a study, with the keys of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commandline.variants import VariantCall


@dataclass(frozen=True)
class Context:
    """Settings shared by all jobs. Results of a task are stored in out/<task>."""

    device: str
    plugin: Path | None
    out: Path


# Messages of a job: ("stage", None | place, fraction of the job), ("loss", step, value) and
# ("rows", place, outcomes, training). A place is a key of ``tests``. A worker ends a job with
# ("done", status), ("failed", traceback) or, if a file could not be written, ("stopped", text).
Message = tuple[Any, ...]
Emit = Callable[[Message], None]


@dataclass(frozen=True)
class Job(ABC):
    """A job. tests[place][key of a result row] says what is evaluated there.

    The place is an eval length or a condition. A job sends the results of one place at a time, and
    after an interruption only the missing places are repeated.
    """

    task: str
    variant: VariantCall
    seed: int
    settings: Any
    tests: dict[Any, dict[str, Any]]

    @abstractmethod
    def execute(self, context: Context, emit: Emit) -> str:
        """Pass the results of each place to ``emit``; returns the status, such as "done"."""

    @abstractmethod
    def place_text(self, place: Any) -> str:
        """A place in words, such as "n = 64"."""

    @property
    @abstractmethod
    def log_name(self) -> str:
        """The name under which loggers show the job."""
