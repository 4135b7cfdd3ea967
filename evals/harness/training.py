"""Training and evaluation of every task.

Training uses AdamW with a one-cycle cosine schedule. The model after the last step is kept.
Evaluation averages its measurements over chunks of sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import attnzoo
from commandline.variants import VariantCall
from evals.measures.metrics import Outcome, Tally
from evals.task import VALIDATION, HeadSample, Schedule, Settings, Task
from evals.tasks.draws import lengths

JACOBIANS = 4  # number of sequences per length whose Jacobians are measured
CHUNK_ITEMS = 2**15  # maximum number of keys per chunk of test sequences
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
) -> None:
    """Minimize loss_at(step) over the steps of the schedule.

    groups: parameter groups for the optimizer; "factor" multiplies the learning rate of a group.
    None is all parameters of the model, without weight decay for those of variants.

    Raises:
        NotFinite: the loss or a parameter is not finite. The loss is read every few steps.
    """
    if groups is None:
        groups = attnzoo.nn.parameter_groups(model, schedule.weight_decay)
    optimizer = torch.optim.AdamW(groups, fused=True)
    for step in range(schedule.steps):
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
        if step % REPORT_EVERY == REPORT_EVERY - 1 or step == schedule.steps - 1:
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(f"the training loss is {value} at step {step + 1}")
            report(step + 1, value, (step + 1) / schedule.steps)
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
) -> nn.Module:
    """Train a model. With equal seeds, all variants get equal data, and with equal settings equal
    initial weights."""
    torch.manual_seed(seed)
    model = task.build(variant, positions, settings).to(device)
    longest = settings.longest_per_step()
    step_lengths = lengths(seed, settings.train_shortest, longest, settings.train_stride).tolist()
    sequences_per_step = settings.batch_size(settings.train_shortest)

    def loss(step: int) -> Tensor:
        first, length = step * sequences_per_step, step_lengths[step]
        last = first + settings.batch_size(length)
        batch = task.batch(seed, "train", length, first, last, settings)
        return task.loss(model, batch.to(device))

    fit(model, loss, settings, report)
    return model.eval()


@torch.inference_mode()
def evaluate(
    task: Task,
    model: nn.Module,
    tests: Mapping[str, VariantCall | None],
    seed: int,
    length: int,
    settings: Settings,
    device: str,
    progress: Callable[[float], None],
    splits: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Evaluate the variants in ``tests`` at one length; None stands for the trained variant.

    splits: in place of `Task.splits`. Returns the outcome of each variant under its key in
    ``tests``.
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
                measure = task.measure(model, batch, sample)
            except (MemoryError, RuntimeError) as error:
                for tally in tallies.values():
                    tally.fail(error)
                continue
            shared = (time.process_time() - began) / len(tests)
            for key, substitute in tests.items():
                tallies[key].cpu_seconds += shared
                tallies[key].add(partial(measure, substitute), prefix)
            progress((number + stop / count) / len(splits))
    return {key: tally.outcome() for key, tally in tallies.items()}
