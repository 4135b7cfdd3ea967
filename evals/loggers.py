"""Optional loggers: TensorBoard and Weights & Biases.

A run logs its training loss by step, and each metric with the eval length as its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from commandline.errors import UsageError
from evals.options import LoggerName


class TensorBoard:
    """Writes one folder of events per run, below ``out``/tensorboard."""

    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._class, self._folder = SummaryWriter, out / "tensorboard"
        self._writers: dict[str, Any] = {}

    def scalar(
        self, run: str, name: str, value: float, step: int, config: Mapping[str, Any]
    ) -> None:
        if run not in self._writers:
            self._writers[run] = self._class(str(self._folder / file_name(run)))
        self._writers[run].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Wandb:
    """Logs each run to the wandb project attnzoo-evals, with its files below ``out``. Its config is
    the task, variant, position encoding, seed and settings, and its group is the task.

    Metrics use the eval length as their axis, because wandb's own step must not decrease.
    """

    def __init__(self, out: Path) -> None:
        self._wandb, self._out = import_module("wandb"), out
        self._runs: dict[str, Any] = {}

    def scalar(
        self, run: str, name: str, value: float, step: int, config: Mapping[str, Any]
    ) -> None:
        if run not in self._runs:
            self._out.mkdir(parents=True, exist_ok=True)
            wandb_run = self._wandb.init(
                project="attnzoo-evals", name=run, group=config["task"], config=dict(config),
                dir=str(self._out), reinit="create_new",
            )  # fmt: skip
            wandb_run.define_metric("length")
            wandb_run.define_metric("step")
            wandb_run.define_metric("test/*", step_metric="length")
            wandb_run.define_metric("train/*", step_metric="step")
            self._runs[run] = wandb_run
        axis = "length" if name.startswith("test/") else "step"
        self._runs[run].log({name: value, axis: step})

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


Logger = TensorBoard | Wandb
_KINDS: dict[LoggerName, Callable[[Path], Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_loggers(names: Sequence[LoggerName], out: Path) -> list[Logger]:
    """Open loggers by name.

    Raises:
        UsageError: a package is not installed.
    """
    loggers: list[Logger] = []
    for name in names:
        try:
            loggers.append(_KINDS[name](out))
        except ImportError as error:
            raise UsageError(
                f"--log {name} needs a package: pip install {name} ({error})"
            ) from error
    return loggers


def file_name(run: str) -> str:
    """The name of a run with underscores for characters that some file systems reject."""
    return "".join(letter if letter.isalnum() or letter in "/_-.=," else "_" for letter in run)
