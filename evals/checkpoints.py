"""Files of trained models, and of the state of a training that has not ended."""

from __future__ import annotations

import sys
import time
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from commandline.errors import UsageError
from commandline.files import write_whole
from evals.measures.arithmetic import is_out_of_memory

SAVE_EVERY = 60.0  # seconds of training between two states
# What reading a broken file can raise.
UNREADABLE = (EOFError, LookupError, RuntimeError, TypeError, ValueError, UnpicklingError)


def write_saved(path: Path, content: dict[str, Any]) -> None:
    """Write a dict of tensors and numbers."""
    buffer = BytesIO()
    torch.save(content, buffer)
    write_whole(path, buffer.getvalue())


class Checkpoint:
    """The state of a training in a file: model, optimizer, random numbers, step and losses.

    Attributes:
        path: the file. It has a state only if a training was interrupted.
        losses: the mean loss between each two reports, so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []
        self._sum: Tensor | float = 0.0
        self._count = 0
        self._state: dict[str, Any] | None = None
        self._saved = time.monotonic()
        self._began = time.process_time()

    def cpu_seconds(self) -> float:
        """The CPU time of the training, with that before an interruption."""
        return time.process_time() - self._began

    def add(self, loss: Tensor) -> None:
        """Count the loss of a step. It is not read, because that would wait for the device."""
        self._sum, self._count = self._sum + loss.detach().double(), self._count + 1

    def close_interval(self) -> None:
        """Add the mean of the losses since the last call to ``losses``."""
        self.losses.append(float(self._sum) / self._count)
        self._sum, self._count = 0.0, 0

    def is_due(self) -> bool:
        return time.monotonic() - self._saved >= SAVE_EVERY

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after ``step`` steps."""
        generators = [torch.get_rng_state()]
        if (device := _device(model)).type == "cuda":
            generators.append(torch.cuda.get_rng_state(device))
        write_saved(self.path, {
            "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "generators": generators, "losses": self.losses, "sum": float(self._sum),
            "count": self._count, "cpu_seconds": self.cpu_seconds(),
        })  # fmt: skip
        self._saved = time.monotonic()

    def read(self) -> int:
        """Read the state of an interrupted training; returns the number of its steps, or 0."""
        if not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            step = int(state["step"])
        except UNREADABLE as error:
            if is_out_of_memory(error):
                raise
            print(f"warning: cannot read {self.path}; the training starts again", file=sys.stderr)
            return 0
        self._state = state
        return step

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state that was read, if any, into a model and an optimizer.

        Raises:
            UsageError: the state is that of another model.
        """
        if (saved := self._state) is None:
            return
        self._state = None
        try:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        except UNREADABLE as error:
            if is_out_of_memory(error):
                raise
            raise UsageError(
                f"{self.path} does not fit the model; delete it to start the training again"
            ) from error
        torch.set_rng_state(saved["generators"][0])
        if (device := _device(model)).type == "cuda":
            torch.cuda.set_rng_state(saved["generators"][1], device)
        self.losses, self._sum, self._count = saved["losses"], saved["sum"], saved["count"]
        self._began = time.process_time() - saved["cpu_seconds"]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
