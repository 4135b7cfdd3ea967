"""Training that every task shares: AdamW under a one-cycle cosine schedule, last step kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

import attnzoo

REPORT_EVERY = 25  # steps between two looks at the loss: each look waits for the device


class NotFinite(ArithmeticError):
    """Training met a NaN or an infinity."""


class Schedule(Protocol):
    """The settings that `fit` reads."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def warmup(self) -> float: ...


def one_cycle(step: int, schedule: Schedule) -> float:
    """Learning rate: half a cosine from peak/25 up to the peak, then half a cosine down to 0."""
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
    progress: Callable[[float], None],
) -> None:
    """Minimize loss_at(step) over the schedule's steps; the last step is what is tested.

    Raises:
        NotFinite: the loss, looked at every few steps, is no finite number.
    """
    groups = attnzoo.nn.parameter_groups(model, schedule.weight_decay)
    optimizer = torch.optim.AdamW(groups, fused=True)
    for step in range(schedule.steps):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = one_cycle(step, schedule)
        optimizer.step()
        if step % REPORT_EVERY == REPORT_EVERY - 1 or step == schedule.steps - 1:
            if not math.isfinite(loss.item()):
                raise NotFinite(f"the training loss is {loss.item()} at step {step + 1}")
            progress((step + 1) / schedule.steps)
