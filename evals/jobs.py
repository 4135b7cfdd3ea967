"""A job: one training with all that is tested on it, executed in any process."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evals.cells import Refused, VariantCall, is_out_of_memory
from evals.metrics import Outcome
from evals.store import write_whole
from evals.training import NotFinite


@dataclass(frozen=True)
class Job:
    """One training (variant, seed) and, for each length, the rows to test on it.

    tests[length] maps a row's key to the variant swapped in, None for the trained one.
    """

    variant: VariantCall
    seed: int
    training_key: str
    tests: dict[int, dict[str, VariantCall | None]]

    def __str__(self) -> str:
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Context:
    """What all jobs of a run share. models is the folder of finished trainings."""

    task: str  # module name
    settings: Any
    device: str
    plugin: Path | None
    models: Path


# What a worker says: ("stage", None | length, fraction of the job), ("rows", length, outcomes,
# training's CPU seconds), ("failed", text), ("done",).
Message = tuple[Any, ...]
Emit = Callable[[Message], None]


def load_plugin(path: Path) -> None:
    """Import a file that registers variants.

    Raises:
        Refused: there is no such file, or importing it fails.
    """
    spec = importlib.util.spec_from_file_location(f"evals_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Refused(f"--plugin must be a Python file, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a stranger's file may raise, named and passed on
        raise Refused(f"--plugin {path}: {type(error).__name__}: {error}") from error


# -------------------------------------------------------------------------------- inside a job


@contextmanager
def lean_arithmetic() -> Iterator[None]:
    """One thread, and denormals as 0.

    Gradients and AdamW's moments turn denormal on their way to 0, and such numbers cost a CPU three
    times the whole step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def obtain_model(job: Job, context: Context, emit: Emit) -> tuple[nn.Module, float]:
    """The trained model, from the folder if it is there, and its training's CPU seconds."""
    task = importlib.import_module(context.task)
    path = context.models / f"{job.training_key}.pt"
    if path.exists():
        saved = torch.load(path, map_location=context.device, weights_only=True)
        model = task.Model(job.variant, context.settings).to(context.device)
        model.load_state_dict(saved["state"])
        return model.eval(), saved["cpu_seconds"]
    began = time.process_time()

    def progress(fraction: float) -> None:
        emit(("stage", None, fraction * _training_share(job, context)))

    model = task.train(job.variant, job.seed, context.settings, context.device, progress)
    seconds = time.process_time() - began
    buffer = BytesIO()
    torch.save({"state": model.state_dict(), "cpu_seconds": seconds}, buffer)
    write_whole(path, buffer.getvalue())
    return model, seconds


def _work(job: Job, context: Context) -> tuple[float, dict[int, float]]:
    """Estimated work, in items through the network: of training, and of each length's tests."""
    settings = context.settings
    return settings.training_work, {n: settings.testing_work(n) for n in job.tests}


def _training_share(job: Job, context: Context) -> float:
    training, testing = _work(job, context)
    return training / (training + sum(testing.values()))


def execute(job: Job, context: Context, emit: Emit) -> None:
    """Train or load, then test one length after the other; every result goes to ``emit``."""
    task = importlib.import_module(context.task)
    training, testing = _work(job, context)
    total, done = training + sum(testing.values()), training
    emit(("stage", None, 0.0))
    try:
        model, seconds = obtain_model(job, context, emit)
    except (NotFinite, MemoryError, RuntimeError) as error:
        if not isinstance(error, NotFinite) and not is_out_of_memory(error):
            raise
        status = "nan" if isinstance(error, NotFinite) else "oom"
        failure = Outcome(status, f"training: {error}".splitlines()[0])
        for length, tests in job.tests.items():
            emit(("rows", length, dict.fromkeys(tests, failure), 0.0))
        return
    for length, tests in job.tests.items():

        def progress(fraction: float, length: int = length, done: float = done) -> None:
            emit(("stage", length, (done + fraction * testing[length]) / total))

        progress(0.0)
        outcomes = task.evaluate(
            model, tests, job.seed, length, context.settings, context.device, progress
        )
        emit(("rows", length, outcomes, seconds))
        done += testing[length]
