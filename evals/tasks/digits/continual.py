"""Continual learning on split digits: five tasks of two classes, one after the other.

The learner is not told the task in the test, where all ten classes take part (class-incremental
learning). With masking, the scores of the classes outside the task are replaced by a constant in
training, and their rows of the output matrix get no gradient (after arXiv:2309.14808). An image of
the current task is trained with the classes of this task only. A replayed image is trained with all
classes seen so far: only there do the classes of different tasks compete.

The buffer has images of each task so far, the current one included. Without these, the replayed
images would only ever lower the scores of the current classes. The buffer has one size in total, so
each of k tasks has 1/k of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from commandline.variants import VariantCall
from evals.task import Metric, Preset
from evals.tasks.digits import layers
from evals.tasks.digits.data import CLASSES, Images, order, split
from evals.tasks.digits.experiment import (
    Classifier,
    ClassifierSettings,
    Experiment,
    Result,
    Trial,
    accuracy,
)

TASKS = 5
CONDITIONS = {
    "plain": "all classes take part in training",
    "masked": "only the classes of the task take part in training",
    "masked-value": "classes outside the task have a constant finite logit",
    "replay": "all classes take part; a few images of all tasks so far are replayed",
    "masked-replay": "masked, with replay",
    "masked-value-replay": "masked-value, with replay",
}


@dataclass(frozen=True, kw_only=True)
class ContinualSettings(ClassifierSettings):
    """Settings of continual learning.

    steps: per task. buffer: the number of images in the buffer under conditions with replay. value:
    the logit of classes outside the task under "masked-value" conditions.
    """

    steps: int = 150
    batch: int = 32
    buffer: int = 20
    value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not TASKS <= self.buffer <= 400:
            raise ValueError(f"buffer must be from {TASKS} to 400, got {self.buffer}")
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, got {self.value}")


def classes_of_tasks(seed: int) -> Tensor:
    """The classes of each task in ascending order, (TASKS, 2)."""
    return order(seed, "tasks", CLASSES).view(TASKS, -1).sort(dim=-1).values


def of_classes(images: Images, classes: Tensor) -> Images:
    """The images of these classes."""
    return images.at(torch.isin(images.labels, classes).nonzero()[:, 0])


def one_hot(classes: Tensor) -> Tensor:
    """A mask (V,) that is True for these classes."""
    return F.one_hot(classes, CLASSES).any(dim=0)


def replayed(tasks: Sequence[Images], seed: int, size: int) -> Images:
    """The buffer: at most ``size`` images, equally many of each of these tasks."""
    each = size // len(tasks)
    parts = []
    for images in tasks:
        drawn = order(seed, "replay", len(images.labels)).to(images.labels.device)
        parts.append(images.at(drawn[:each]))
    return Images(*(torch.cat(column) for column in zip(*parts, strict=True)))


def step_loss(
    model: Classifier,
    current: Images,
    old: Images | None,
    task: Tensor,
    seen: Tensor,
    value: float | None,
    index: Tensor,
    step: int,
) -> Tensor:
    """The mean loss of a step over images of the current task and replayed ones.

    task, seen: the classes of the current task, and of all tasks so far, as masks (V,). value: the
    logit of classes outside the mask; None for no masking. index: the images of the current task in
    each step, (steps, batch).
    """
    images = current.at(index[step])
    masks = task.expand(len(images.labels), -1)
    if old is not None:
        images = Images(*(torch.cat(pair) for pair in zip(images, old, strict=True)))
        masks = torch.cat([masks, seen.expand(len(old.labels), -1)])
    return model.loss(images) if value is None else model.masked_loss(images, masks, value)


class Continual(Experiment):
    name = "continual"
    about = (
        "Learn five tasks of two digits one after the other, with and without masking the classes "
        "of other tasks (after arXiv:2309.14808) and with and without a small replay buffer."
    )
    conditions: Mapping[str, str] = CONDITIONS
    versus: Mapping[str, str] = {
        "masked": "plain",
        "masked-value": "plain",
        "masked-replay": "replay",
        "masked-value-replay": "replay",
    }
    metrics = (
        Metric("accuracy", "Accuracy over all ten classes after the last task, %", 100, 1),
        Metric("forgetting", "Forgetting, mean over the earlier tasks, %", 100, 1,
               lower_is_better=True),
        Metric("learned", "Accuracy on a task right after it, mean over the tasks, %", 100, 1),
    )  # fmt: skip
    curve = "Forgetting of each task, %"
    presets: Mapping[str, Preset] = {
        "smoke": Preset((), ContinualSettings(steps=5, width=16), ("softmax", "entmax")),
        "quick": Preset(
            (), ContinualSettings(), ("softmax", "entmax", "sigmoid", "sink", "taylor"), seeds=5
        ),
    }

    def unsupported(self, variant: VariantCall, condition: str) -> str | None:
        reason = super().unsupported(variant, condition)
        if reason is None and "masked" in condition and variant.name in layers.FUNCTIONS:
            return f"{variant.name} has no class mask"
        if reason is None and "value" in condition and variant != VariantCall("softmax"):
            return "a constant logit outside the task is for softmax"
        return reason

    def train_and_measure(self, trial: Trial) -> Result:
        condition, seed, settings = trial.condition, trial.seed, trial.settings
        training, test = (part.to(trial.device) for part in split(seed))
        groups = classes_of_tasks(seed).to(trial.device)
        model = trial.classifier(seed)  # the same initial weights for each condition
        size = settings.buffer if "replay" in condition else 0
        value = None
        if "masked" in condition:
            value = settings.value if "value" in condition else -math.inf
        tasks: list[Images] = []
        reached = torch.zeros(TASKS, TASKS)  # [task learned last, task tested]
        for number, classes in enumerate(groups):
            tasks.append(of_classes(training, classes))
            old = replayed(tasks, seed, size) if size and number else None
            masks = one_hot(classes), one_hot(groups[: number + 1].flatten())
            index = trial.batches(len(tasks[-1].labels))
            loss = partial(step_loss, model.train(), tasks[-1], old, *masks, value, index)
            trial.fit(model, loss)
            model.eval()
            for other in range(number + 1):
                reached[number, other] = accuracy(model, of_classes(test, groups[other]))
        lost = forgetting(reached)
        metrics = {
            "accuracy": accuracy(model, test),
            "forgetting": lost.mean().item(),
            "learned": reached.diagonal().mean().item(),
        }
        return Result(metrics, {number + 1: value for number, value in enumerate(lost.tolist())})


def forgetting(reached: Tensor) -> Tensor:
    """The largest accuracy on each task but the last one, minus its accuracy at the end.

    Args:
        reached: (T, T). Entry [i, j] is the accuracy on task j after training on task i >= j, and
            0 for i < j.

    Returns:
        (T − 1,), for each task the best accuracy after any task before the last, minus that after
        the last (Chaudhry et al. 2018, 1801.10112).
    """
    return reached[:-1, :-1].amax(dim=0) - reached[-1, :-1]


CONTINUAL = Continual()
