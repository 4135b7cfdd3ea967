"""What the three experiments on digits share: their data, output layers and chance level."""

from __future__ import annotations

from typing import Any

from commandline.variants import VariantCall
from evals.experiment import Experiment
from evals.tasks.digits import layers
from evals.tasks.digits.data import CLASSES, version


class DigitsExperiment(Experiment):
    """An experiment on the digits of scikit-learn."""

    def data_version(self) -> str:
        return version()

    def chance(self, settings: Any) -> float:
        return 1 / CLASSES

    def every_variant(self) -> tuple[str, ...]:
        return layers.every_layer()

    def completed(self, variant: VariantCall) -> VariantCall:
        return layers.completed(variant)

    def unsupported(self, variant: VariantCall, condition: str) -> str | None:
        return layers.unsupported(variant)

    def identity(self, variant: VariantCall) -> dict[str, object]:
        return layers.identity(variant)
