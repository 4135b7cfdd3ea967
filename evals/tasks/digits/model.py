"""The classifier of the experiments, and what is measured of its predictions.

A multilayer perceptron 64 → width → width with ReLU, dropout behind both layers, and an output
layer. Predictions are made in fp64. The predicted class has the largest probability, and of equal
ones the smallest index; its probability is the confidence.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commandline.variants import VariantCall
from evals.measures.calibration import auroc, calibration_error
from evals.task import Schedule
from evals.tasks.digits.data import PIXELS, Images
from evals.tasks.digits.layers import VariantLayer, layer


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
        self.output = layer(width, call)

    def loss(self, images: Images) -> Tensor:
        """The mean loss."""
        return self.output.loss(self.body(images.pixels), images.labels)

    def masked_loss(self, images: Images, mask: Tensor, value: float = -math.inf) -> Tensor:
        """The mean loss in which classes outside ``mask`` (V,) or (N, V) have a constant logit."""
        assert isinstance(self.output, VariantLayer)
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
