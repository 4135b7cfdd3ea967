"""A run: what a worker executes, for a task one training and its evaluations.

Training uses AdamW with a one-cycle cosine schedule. The model after the last step is kept.
Evaluation averages its measurements over chunks of sequences. The run of an experiment has a
training for each condition.

A training saves its state every minute. After an interruption it continues from there, with the
results of an uninterrupted one.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attnzoo
from commandline.variants import VariantCall
from evals.checkpoints import UNREADABLE, Checkpoint, write_saved
from evals.conversion import convert
from evals.measures.arithmetic import autocast, is_out_of_memory, rounded_products
from evals.measures.heads import learned, scaled_rope
from evals.measures.metrics import Outcome, Tally
from evals.task import VALIDATION, HeadSample, Schedule, Settings, Task
from evals.tasks import EVALS, TASKS
from evals.tasks.digits.experiment import Experiment, Result, Trial
from evals.tasks.draws import lengths

JACOBIANS = 4  # number of sequences per length whose Jacobians are measured
CHUNK_ITEMS = 2**15  # maximum number of keys per chunk of test sequences
LOSS_PARTS = 32  # maximum number of parts of a training whose mean losses are in its rows
REPORT_EVERY = 25  # steps between reads of the loss; each read waits for the device


class NotFinite(ArithmeticError):
    """Training gave a NaN or an infinity."""


# (step, loss, fraction of the training)
Report = Callable[[int, float, float], None]


def one_cycle(step: int, schedule: Schedule) -> float:
    """Learning rate: half a cosine up from peak/25 to the peak, then half a cosine down to 0."""
    peak, warm = schedule.learning_rate, max(1, round(schedule.warmup * schedule.steps))
    if step < warm:
        low, part = peak / 25, step / warm
    else:
        low, part = 0.0, 1 - (step - warm) / max(1, schedule.steps - warm)
    return low + (peak - low) * (1 - math.cos(math.pi * part)) / 2


def fit(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    schedule: Schedule,
    report: Report,
    groups: list[dict[str, Any]] | None = None,
    checkpoint: Checkpoint | None = None,
    switch: tuple[int, Callable[[], None]] | None = None,
) -> None:
    """Minimize loss_at(step) over the steps of the schedule.

    groups: parameter groups for the optimizer; "factor" multiplies the learning rate of a group.
    None is all parameters of the model, without weight decay for those of variants. checkpoint:
    where the state is saved; the training continues from the state that is already there. switch:
    (step, change), where change() replaces parameters of the model before this step. The others
    keep their moments.

    Raises:
        NotFinite: the loss or a parameter is not finite. The loss is read every few steps.
    """

    def optimizer_of(groups: list[dict[str, Any]] | None) -> torch.optim.AdamW:
        if groups is None:
            groups = attnzoo.nn.parameter_groups(model, schedule.weight_decay)
        return torch.optim.AdamW(groups, fused=True)

    first = 0 if checkpoint is None else checkpoint.read()
    if switch is not None and first > switch[0]:
        switch[1]()
    optimizer = optimizer_of(groups)
    if checkpoint is not None:
        checkpoint.restore(model, optimizer)
    for step in range(first, schedule.steps):
        if switch is not None and step == switch[0]:
            switch[1]()
            moments, optimizer = optimizer.state, optimizer_of(None)
            parameters = {x for group in optimizer.param_groups for x in group["params"]}
            optimizer.state.update({x: y for x, y in moments.items() if x in parameters})
        try:
            loss = loss_at(step)
            optimizer.zero_grad()
            loss.backward()
        except Exception as error:  # NaN parameters can cause any type of error
            if _finite(model):
                raise
            raise NotFinite(f"parameters are not finite at step {step + 1}: {error}") from error
        for group in optimizer.param_groups:
            group["lr"] = group.get("factor", 1.0) * one_cycle(step, schedule)
        optimizer.step()
        if checkpoint is not None:
            checkpoint.add(loss)
        if step % REPORT_EVERY == REPORT_EVERY - 1 or step == schedule.steps - 1:
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(f"the training loss is {value} at step {step + 1}")
            report(step + 1, value, (step + 1) / schedule.steps)
            if checkpoint is not None:
                checkpoint.close_interval()
        if checkpoint is not None and checkpoint.is_due():
            checkpoint.save(step + 1, model, optimizer)
    if not _finite(model):  # the loss of the last step does not show a NaN from its update
        raise NotFinite(f"parameters are not finite after step {schedule.steps}")


def _finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def train(
    task: Task,
    variant: VariantCall,
    positions: str,
    seed: int,
    settings: Settings,
    device: str,
    report: Report,
    checkpoint: Checkpoint | None = None,
) -> nn.Module:
    """Train a model. With equal seeds, all variants get equal data, and with equal settings equal
    initial weights."""
    torch.manual_seed(seed)
    model = task.build(variant.before or variant, positions, settings).to(device)
    longest = settings.longest_per_step()
    step_lengths = lengths(seed, settings.train_shortest, longest, settings.train_stride).tolist()
    sequences_per_step = settings.batch_size(settings.train_shortest)

    task_loss = torch.compile(task.loss) if settings.compile else task.loss

    def loss(step: int) -> Tensor:
        first, length = step * sequences_per_step, step_lengths[step]
        last = first + settings.batch_size(length)
        batch = task.batch(seed, "train", length, first, last, settings)
        with autocast(settings.autocast, device):
            return task_loss(model, batch.to(device))

    def replace_attention() -> None:
        convert(model, task.build(variant, positions, settings).to(device))

    switch = None if variant.before is None else (settings.switch_step, replace_attention)
    fit(model, loss, settings, report, checkpoint=checkpoint, switch=switch)
    return model.eval()


class Substitutes(NamedTuple):
    """What is substituted at inference, in a trained model; None stands for what was trained.

    rope_scaling: the argument of `attnzoo.nn.Transformer`.
    """

    variant: VariantCall | None = None
    rope_scaling: Mapping[str, Any] | None = None


@torch.inference_mode()
def evaluate(
    task: Task,
    model: nn.Module,
    tests: Mapping[str, Substitutes],
    seed: int,
    length: int,
    settings: Settings,
    device: str,
    progress: Callable[[float], None],
    splits: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Evaluate the model with the substitutes in ``tests`` at one length.

    splits: in place of `Task.splits`. Returns the outcomes under their keys in ``tests``.
    """
    splits = task.splits if splits is None else splits
    count = settings.sequences(length)
    chunk = max(1, CHUNK_ITEMS // task.tokens(length))
    tallies = {key: Tally() for key in tests}
    for number, (prefix, split) in enumerate(splits.items()):
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            batch = task.batch(seed, split, length, start, stop, settings).to(device)
            # Heads are measured on the first sequences of the first split, whatever the chunk size.
            # A sweep needs only the score, so its split has none.
            unmeasured = number > 0 or split == VALIDATION
            most = (0, 0) if unmeasured else (task.head_sequences, JACOBIANS)
            sample = HeadSample(*(min(max(count - start, 0), stop - start) for count in most))
            began = time.process_time()
            try:
                with autocast(settings.autocast, device):
                    measure = task.measure(model, batch, sample)
            except (MemoryError, RuntimeError) as error:
                for tally in tallies.values():
                    tally.fail(error)
                continue
            shared = (time.process_time() - began) / len(tests)
            for key, substitutes in tests.items():
                tallies[key].cpu_seconds += shared
                casts = autocast(settings.autocast, device)
                with casts, scaled_rope(model, substitutes.rope_scaling):
                    tallies[key].add(partial(measure, substitutes.variant), prefix)
            progress((number + stop / count) / len(splits))
    return {key: tally.outcome() for key, tally in tallies.items()}


# ---------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class RunContext:
    """Settings shared by all runs. Results of a task are stored in out/<task>.

    plugin_hash: the hash of the plugin's file that is in the keys; a worker checks it.
    """

    device: str
    plugin: Path | None
    out: Path
    plugin_hash: str | None


# What a run sends: ("stage", None | x, fraction of the run), ("loss", step, value) and
# ("rows", x, outcomes, training), where x is a key of ``tests``. `evals.launch` adds the end of the
# run: ("done", status), ("failed", reason, traceback) or, if a file could not be written or the
# plugin changed, ("stopped", text).
Message = tuple[Any, ...]
Emit = Callable[[Message], None]
NOT_TRAINED: dict[str, Any] = {"train_cpu_seconds": 0.0, "learned": {}}


@dataclass(frozen=True)
class Run:
    """What a worker executes. Its results at one x are sent at a time, and after an interruption
    only the missing ones are repeated.

    study: the name of the study, such as the task. name: the run in words. work: sends the results
    and returns the status, such as "done". tests[x][key of a result row]: what is evaluated at x;
    for a task the `Substitutes`. positions: the position encoding in training. x: an eval length, a
    condition or, of a pretrained model, (length, sample). candidate: in a sweep, the values of the
    tuned settings in words; the run is then evaluated on the split "validation". waits: whether a
    sweep chooses its settings later; they are those of the first candidate. fields: further fields
    of the result rows.
    """

    study: str
    name: str
    work: Callable[[Run, RunContext, Emit], str]
    variant: Any
    seed: int
    settings: Any
    tests: Mapping[Any, Mapping[str, Any]]
    positions: str = "none"
    training_key: str = ""
    candidate: str = ""
    waits: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys of the result rows."""
        return [key for tests in self.tests.values() for key in tests]

    def without(self, keys: Collection[str]) -> Run:
        """The run without the tests of these keys."""
        tests = {
            x: {key: test for key, test in of_x.items() if key not in keys}
            for x, of_x in self.tests.items()
        }
        return replace(self, tests={x: of_x for x, of_x in tests.items() if of_x})

    @property
    def splits(self) -> Mapping[str, str]:
        """The splits to evaluate, as in `Task.splits`."""
        return {"": VALIDATION} if self.candidate else TASKS[self.study].splits

    def model(self, out: Path) -> Path:
        """The file of the trained model."""
        return out / self.study / "models" / f"{self.training_key}.pt"

    def checkpoint(self, out: Path) -> Path:
        """The file of the state of a training that has not ended."""
        return self.model(out).with_suffix(".checkpoint")


def point_text(point: Any) -> str:
    """An x in words.

    >>> point_text(64), point_text((64, 3)), point_text("label-noise")
    ('n = 64', 'n = 64, sample 3', 'label-noise')
    """
    if isinstance(point, tuple):
        return f"n = {point[0]}, sample {point[1]}"
    return f"n = {point}" if isinstance(point, int) else str(point)


def _failure(error: Exception) -> Outcome:
    """The outcome of a training that diverged or was out of memory; raises any other error."""
    if not isinstance(error, NotFinite) and not is_out_of_memory(error):
        raise error
    status = "nan" if isinstance(error, NotFinite) else "oom"
    reason = str(error).split("\n")[0] or type(error).__name__
    return Outcome(status, f"training: {reason}")


def obtain_model(
    run: Run, context: RunContext, emit: Emit, share: float
) -> tuple[nn.Module, dict[str, Any]]:
    """Load or train the model; returns it, and a dict of training time and learned parameters.

    share: the share of the training in the work of the run.
    """
    task, path = TASKS[run.study], run.model(context.out)
    if path.exists():
        model = task.build(run.variant, run.positions, run.settings).to(context.device)
        try:
            saved = torch.load(path, map_location=context.device, weights_only=True)
            model.load_state_dict(saved["state"])
            return model.eval(), saved["training"]
        except UNREADABLE as error:
            if is_out_of_memory(error):
                raise
            print(f"warning: cannot read the model in {path}; it is trained again", file=sys.stderr)
    checkpoint = Checkpoint(run.checkpoint(context.out))

    def report(step: int, loss: float, fraction: float) -> None:
        emit(("stage", None, fraction * share))
        emit(("loss", step, loss))

    with rounded_products(run.settings.matmul):
        model = train(
            task, run.variant, run.positions, run.seed, run.settings, context.device, report,
            checkpoint,
        )  # fmt: skip
    training = {
        "train_cpu_seconds": checkpoint.cpu_seconds(),
        "learned": learned(model),
        "losses": checkpoint.losses,
    }
    write_saved(path, {"state": model.state_dict(), "training": training})
    checkpoint.path.unlink(missing_ok=True)
    return model, training


def train_once(run: Run, context: RunContext, emit: Emit) -> str:
    """The work of a task: train or load the model, and evaluate it at each length.

    A training that fails gives rows with its status.
    """
    task, settings = TASKS[run.study], run.settings
    # The work in tokens, for the progress. A training token takes longer, and counts as three.
    middle = task.tokens((settings.train_shortest + settings.train_longest) // 2)
    done = 3.0 * settings.steps * settings.batch_size(middle) * middle
    work = {n: len(run.splits) * settings.sequences(n) * task.tokens(n) for n in run.tests}
    total = done + sum(work.values())
    emit(("stage", None, 0.0))
    try:
        model, training = obtain_model(run, context, emit, done / total)
    except (NotFinite, MemoryError, RuntimeError) as error:
        failure = _failure(error)
        run.checkpoint(context.out).unlink(missing_ok=True)
        for length, tests in run.tests.items():
            emit(("rows", length, dict.fromkeys(tests, failure), NOT_TRAINED))
        return f"failed ({failure.status})"
    for length, tests in run.tests.items():

        def progress(fraction: float, length: int = length, done: float = done) -> None:
            emit(("stage", length, (done + fraction * work[length]) / total))

        progress(0.0)
        with rounded_products(settings.matmul):
            outcomes = evaluate(
                task, model, tests, run.seed, length, settings, context.device, progress, run.splits
            )
        if length == settings.train_longest:
            outcomes = _with_losses(outcomes, tests, training.get("losses", []))
        emit(("rows", length, outcomes, training))
        done += work[length]
    return "done"


def _with_losses(
    outcomes: Mapping[str, Outcome], tests: Mapping[str, object], losses: Sequence[float]
) -> dict[str, Outcome]:
    """The outcomes; those of the trained variant with the mean losses of parts of the training."""
    size = max(1, -(-len(losses) // LOSS_PARTS))
    parts = [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]
    curve = {"training_loss": parts} if parts else {}
    return {
        key: replace(outcome, curves={**outcome.curves, **curve})
        if tests[key] == Substitutes() and outcome.status == "ok"
        else outcome
        for key, outcome in outcomes.items()
    }


def train_for_each(run: Run, context: RunContext, emit: Emit) -> str:
    """The work of an experiment: train and measure an output layer under each condition."""
    experiment: Experiment = EVALS[run.study]
    # Conditions have different numbers of trainings, so their losses have no common steps.
    training = partial(fit, schedule=run.settings, report=lambda *_: None)
    failed = 0
    for number, (condition, tests) in enumerate(run.tests.items()):
        emit(("stage", condition, number / len(run.tests)))
        began = time.process_time()
        try:
            trial = Trial(run.variant, condition, run.seed, run.settings, context.device, training)
            result = experiment.train_and_measure(trial)
            outcome = _outcome(experiment, result, time.process_time() - began)
        except (NotFinite, MemoryError, RuntimeError) as error:
            outcome = _failure(error)
        failed += outcome.status != "ok"
        emit(("rows", condition, dict.fromkeys(tests, outcome), NOT_TRAINED))
    return f"failed under {failed} of {len(run.tests)} conditions" if failed else "done"


def _outcome(experiment: Experiment, result: Result, seconds: float) -> Outcome:
    """The outcome of a result. Only optional metrics may be undefined; they are left out."""
    optional = {metric.name for metric in experiment.metrics if metric.optional}
    metrics = {
        name: value
        for name, value in result.metrics.items()
        if name not in optional or not math.isnan(value)
    }
    if not all(map(math.isfinite, [*metrics.values(), *result.curve.values()])):
        return Outcome("nan", "a metric is not finite", cpu_seconds=seconds)
    curve = {"x": [*map(float, result.curve)], "score": [*result.curve.values()]}
    return Outcome("ok", "", metrics, curve if result.curve else {}, seconds)
