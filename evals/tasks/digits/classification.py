"""Classification of digits: clean labels, label noise, and a long tail of rare classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evals.task import EVERY_VARIANT, Metric, Preset
from evals.tasks.digits.data import long_tailed, noisy, split
from evals.tasks.digits.experiment import (
    ClassifierSettings,
    Experiment,
    Result,
    Trial,
    measures,
)

CONDITIONS = {
    "clean": "the training images with their labels",
    "label-noise": "a share of the training labels is drawn anew, uniformly over all classes",
    "long-tail": "class counts fall exponentially from the most to the least frequent class",
}


@dataclass(frozen=True, kw_only=True)
class NoiseSettings(ClassifierSettings):
    """Settings of the classification.

    noise: the share of labels drawn anew under "label-noise". tail: the largest class count divided
    by the smallest under "long-tail".
    """

    noise: float = 0.2
    tail: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise must be in [0, 1], got {self.noise}")
        if not 1 <= self.tail < float("inf"):
            raise ValueError(f"tail must be finite and >= 1, got {self.tail}")


class Classification(Experiment):
    name = "classification"
    about = (
        "Classify the digits of scikit-learn with clean labels, label noise and a long tail of "
        "rare classes: accuracy, calibration and uncertainty of each output layer."
    )
    conditions: Mapping[str, str] = CONDITIONS
    metrics: tuple[Metric, ...] = (
        Metric("accuracy", "Accuracy, %", 100, 1),
        Metric("calibration_error", "Expected calibration error, %", 100, 1, lower_is_better=True),
        Metric("auroc", "AUROC of 1 − the largest probability, right against wrong, %", 100, 1,
               optional=True),
        Metric("support", "Number of classes with probability above 0", digits=2, optional=True),
    )  # fmt: skip

    presets: Mapping[str, Preset] = {
        "smoke": Preset((), NoiseSettings(steps=5, width=16), EVERY_VARIANT),
        "quick": Preset((), NoiseSettings(), EVERY_VARIANT, seeds=5),
    }

    def train_and_measure(self, trial: Trial) -> Result:
        images, test = split(trial.seed)
        if trial.condition == "label-noise":
            images = noisy(images, trial.seed, trial.settings.noise)
        elif trial.condition == "long-tail":
            images = long_tailed(images, trial.seed, trial.settings.tail)
        # The same initial weights for each condition.
        model = trial.trained(trial.seed, images.to(trial.device))
        return Result(measures(model, test.to(trial.device)))


CLASSIFICATION = Classification()
