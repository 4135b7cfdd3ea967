"""A run: one training and its evaluations, executed in any process."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from commandline.files import write_whole
from commandline.variants import VariantCall
from evals.harness.any_run import AnyRun, Emit, RunContext
from evals.harness.training import NotFinite, evaluate, train
from evals.measures.arithmetic import is_out_of_memory
from evals.measures.heads import learned
from evals.measures.metrics import Outcome
from evals.task import VALIDATION, Settings
from evals.tasks import TASKS


@dataclass(frozen=True)
class Run(AnyRun):
    """One training, and the evaluations of the trained model.

    tests[length] maps the key of a result row to the variant that is substituted at inference,
    or to None for the trained variant. candidate: in a sweep, the values of the tuned settings in
    words; the run is then evaluated on the split "validation". fields: further fields of the
    result rows.
    """

    settings: Settings
    tests: dict[int, dict[str, VariantCall | None]]
    positions: str
    training_key: str
    candidate: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.task, str(self.variant), f"seed {self.seed}"]
        if self.candidate:
            words.insert(2, self.candidate)
        if self.positions != "none":
            words.insert(2, self.positions)
        return " ".join(words)

    @property
    def log_name(self) -> str:
        sweep = f"/{self.candidate}" if self.candidate else ""
        return f"{self.task}/{self.variant}/{self.positions}{sweep}/seed{self.seed}"

    @property
    def splits(self) -> Mapping[str, str]:
        """The splits to evaluate, as in `Task.splits`."""
        return {"": VALIDATION} if self.candidate else TASKS[self.task].splits

    def model(self, out: Path) -> Path:
        """The file of the trained model."""
        return out / self.task / "models" / f"{self.training_key}.pt"

    def point_text(self, point: int) -> str:
        return f"n = {point}"

    def execute(self, context: RunContext, emit: Emit) -> str:
        return execute(self, context, emit)


NOT_TRAINED: dict[str, Any] = {"train_cpu_seconds": 0.0, "learned": {}}


def obtain_model(run: Run, context: RunContext, emit: Emit) -> tuple[nn.Module, dict[str, Any]]:
    """Load or train the model; returns it, and a dict of training time and learned parameters."""
    task, path = TASKS[run.task], run.model(context.out)
    if path.exists():
        model = task.build(run.variant, run.positions, run.settings).to(context.device)
        try:
            saved = torch.load(path, map_location=context.device, weights_only=True)
            model.load_state_dict(saved["state"])
            return model.eval(), saved["training"]
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError) as error:
            if is_out_of_memory(error):
                raise
            print(f"warning: cannot read the model in {path}; it is trained again", file=sys.stderr)
    began = time.process_time()
    share = _training_share(run)

    def report(step: int, loss: float, fraction: float) -> None:
        emit(("stage", None, fraction * share))
        emit(("loss", step, loss))

    model = train(task, run.variant, run.positions, run.seed, run.settings, context.device, report)
    training = {"train_cpu_seconds": time.process_time() - began, "learned": learned(model)}
    buffer = BytesIO()
    torch.save({"state": model.state_dict(), "training": training}, buffer)
    write_whole(path, buffer.getvalue())
    return model, training


def _work(run: Run) -> tuple[float, dict[int, float]]:
    """The work of the training, and of the evaluation at each length, in tokens.

    A training token counts as three, because it takes longer.
    """
    task, settings = TASKS[run.task], run.settings
    middle = task.tokens((settings.train_shortest + settings.train_longest) // 2)
    training = 3.0 * settings.steps * settings.batch_size(middle) * middle
    tests = {n: float(len(run.splits) * settings.sequences(n) * task.tokens(n)) for n in run.tests}
    return training, tests


def _training_share(run: Run) -> float:
    train_work, test_work = _work(run)
    return train_work / (train_work + sum(test_work.values()))


def execute(run: Run, context: RunContext, emit: Emit) -> str:
    """Train or load the model, evaluate it at each length, and pass the results to ``emit``.

    Returns "done", or "failed (nan)" or "failed (oom)" if the training failed.
    """
    train_work, test_work = _work(run)
    total, done = train_work + sum(test_work.values()), train_work
    emit(("stage", None, 0.0))
    try:
        model, training = obtain_model(run, context, emit)
    except (NotFinite, MemoryError, RuntimeError) as error:
        if not isinstance(error, NotFinite) and not is_out_of_memory(error):
            raise
        status = "nan" if isinstance(error, NotFinite) else "oom"
        reason = str(error).split("\n")[0] or type(error).__name__
        failure = Outcome(status, f"training: {reason}")
        for length, tests in run.tests.items():
            emit(("rows", length, dict.fromkeys(tests, failure), NOT_TRAINED))
        return f"failed ({status})"
    for length, tests in run.tests.items():

        def progress(fraction: float, length: int = length, done: float = done) -> None:
            emit(("stage", length, (done + fraction * test_work[length]) / total))

        progress(0.0)
        outcomes = evaluate(
            TASKS[run.task], model, tests, run.seed, length, run.settings, context.device, progress,
            run.splits,
        )  # fmt: skip
        emit(("rows", length, outcomes, training))
        done += test_work[length]
    return "done"
