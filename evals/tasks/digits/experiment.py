"""The interface of an experiment on digits: output layers, conditions and what is measured.

A task compares attention variants at several lengths: one training, many evaluations. An experiment
compares output layers under conditions such as "label-noise", and every condition has trainings of
its own. All of them classify the digits of scikit-learn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commandline.variants import VariantCall
from evals.task import Eval
from evals.tasks.digits import layers
from evals.tasks.digits.data import CLASSES, Images, batches, version
from evals.tasks.digits.model import Classifier

# A function (model, loss_at) that minimizes loss_at(step) over the steps of the schedule.
FitFunction = Callable[[nn.Module, Callable[[int], Tensor]], None]


class Trial(NamedTuple):
    """What `Experiment.train_and_measure` trains."""

    variant: VariantCall
    condition: str
    seed: int
    settings: Any
    device: str
    fit: FitFunction

    def classifier(self, seed: int) -> Classifier:
        """An untrained classifier on the device; its weights depend on this seed."""
        torch.manual_seed(seed)
        return Classifier(self.variant, self.settings).to(self.device)

    def trained(self, seed: int, images: Images) -> Classifier:
        """A classifier trained on these images, in evaluation mode."""
        model, index = self.classifier(seed), self.batches(len(images.labels))
        self.fit(model, lambda step: model.loss(images.at(index[step])))
        return model.eval()

    def batches(self, count: int) -> Tensor:
        """The indices of each training step, (steps, batch), in ``count`` images, on the device."""
        steps, size = self.settings.steps, self.settings.batch
        return batches(self.seed, steps, size, count).to(self.device)


@dataclass(frozen=True)
class Result:
    """What one output layer reached under one condition.

    metrics: by name. An optional metric that is undefined is NaN. curve: pairs (x, score), where
    the experiment has a curve.
    """

    metrics: Mapping[str, float]
    curve: Mapping[int, float] = field(default_factory=dict)


class Experiment(Eval):
    """An experiment: an instance of a subclass.

    ``conditions`` has an explanation of each condition, by name. In a preset, the variants are
    output layers; `EVERY_VARIANT` stands for all layers.
    """

    axis = "condition"
    refused: Mapping[str, str] = {
        "positions": "it has no attention",
        "lengths": "it has conditions instead of lengths",
        "output": "--variants are its output layers",
        "sweep": "its settings are not tuned",
        "record": "its settings are not tuned",
    }
    conditions: Mapping[str, str]

    def data_version(self) -> str:
        return version()

    def chance(self, settings: Any) -> float:
        return 1 / CLASSES

    def identity(self, variant: VariantCall) -> dict[str, object]:
        return layers.identity(variant)

    def unsupported(self, variant: VariantCall, condition: str) -> str | None:
        """The reason why this output layer cannot be trained under this condition, or None."""
        return layers.unsupported(variant)

    @abstractmethod
    def train_and_measure(self, trial: Trial) -> Result:
        """Train and measure an output layer; a pure function of the fields of the trial."""
