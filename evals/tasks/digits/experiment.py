"""The interface of an experiment on digits: output layers, conditions and what is measured.

A task compares attention variants at several lengths: one training, many evaluations. An experiment
compares output layers under conditions such as "label-noise", and every condition has trainings of
its own. All of them classify the digits of scikit-learn, with a multilayer perceptron
64 → width → width with ReLU, dropout behind both layers, and an output layer. Predictions are made
in fp64. The predicted class has the largest probability, and of equal ones the smallest index; its
probability is the confidence.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commandline.variants import VariantCall
from evals.measures.calibration import auroc, calibration_error
from evals.task import Eval, Schedule
from evals.tasks.digits import layers
from evals.tasks.digits.data import CLASSES, PIXELS, Images, batches, version


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Schedule):
    """Settings of a classifier: the ``width`` of both hidden layers, ``dropout`` behind them."""

    steps: int = 400
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    warmup: float = 0.1
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


class Classifier(nn.Module):
    """The classifier with the output layer of ``call``."""

    def __init__(self, call: VariantCall, settings: ClassifierSettings) -> None:
        super().__init__()
        width, rate = settings.width, settings.dropout
        self.body = nn.Sequential(
            nn.Linear(PIXELS, width), nn.ReLU(), nn.Dropout(rate),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(rate),
        )  # fmt: skip
        self.output = layers.layer(width, call)

    def loss(self, images: Images) -> Tensor:
        """The mean loss."""
        return self.output.loss(self.body(images.pixels), images.labels)

    def masked_loss(self, images: Images, mask: Tensor, value: float = -math.inf) -> Tensor:
        """The mean loss in which classes outside ``mask`` (V,) or (N, V) have a constant logit."""
        assert isinstance(self.output, layers.VariantLayer)
        return self.output.masked_loss(self.body(images.pixels), images.labels, mask, value)

    @torch.no_grad()
    def probabilities(self, pixels: Tensor) -> Tensor:
        """The probabilities of all classes, (N, V) fp64. Dropout is active in training mode."""
        exact = deepcopy(self).double()
        probabilities = exact.output.log_prob(exact.body(pixels.double())).exp()
        return probabilities.clamp(max=1.0)  # rounding can exceed 1


def accuracy(model: Classifier, images: Images) -> float:
    """The share of right predictions; NaN if a probability is NaN."""
    return measures(model, images)["accuracy"]


def measures(model: Classifier, images: Images) -> dict[str, float]:
    """Accuracy, expected calibration error, AUROC, and for layers with zeros the support."""
    probabilities = model.probabilities(images.pixels)
    confidence, classes = probabilities.max(dim=-1)
    right = classes == images.labels
    measured = {
        "accuracy": right.double().mean().item() + 0 * probabilities.sum().item(),
        "calibration_error": calibration_error(confidence, right),
        "auroc": auroc(1 - confidence, right),
    }
    if model.output.has_zeros:
        measured["support"] = (probabilities > 0).double().sum(dim=-1).mean().item()
    return measured


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

    def data_version(self, settings: Any) -> str:
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
