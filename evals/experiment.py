"""The interface of an experiment: output layers, conditions and a fixed classification problem.

A `Task` compares attention variants at several lengths: one training, many evaluations. An
experiment has no lengths. It compares output layers under conditions such as "label-noise", and
every condition has trainings of its own. Options, workers, result files and statistics over seeds
are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from commandline.variants import VariantCall
from evals.task import Metric

# A function (model, loss_at) that minimizes loss_at(step) over the steps of the schedule.
FitFunction = Callable[[nn.Module, Callable[[int], Tensor]], None]


@dataclass(frozen=True)
class ExperimentPreset:
    """The default settings of an experiment. Options of the command line override them.

    variants: output layers; `EVERY_VARIANT` for all that the experiment knows. conditions: names of
    the experiment's conditions; None for all.
    """

    settings: Any
    variants: tuple[str, ...]
    conditions: tuple[str, ...] | None = None
    seeds: int = 1


@dataclass(frozen=True)
class Result:
    """What one output layer reached under one condition.

    metrics: by name. An optional metric that is undefined is NaN. curve: pairs (x, score), where
    the experiment has a curve.
    """

    metrics: Mapping[str, float]
    curve: Mapping[int, float] = field(default_factory=dict)


class Experiment(ABC):
    """An experiment: an instance of a subclass.

    Attributes:
        name: its name on the command line.
        about: one paragraph that explains it.
        presets: `ExperimentPreset` by name.
        conditions: an explanation of each condition, by name.
        versus: maps a condition to the one with which its score is compared.
        metrics: the metrics; the first one is the score.
        curve: what the curve shows, such as "Accuracy by number of labels"; None if there is none.
        axis: what the x of a result row is.
        trained_score, published: None, see `evals.task.Task`.
    """

    name: str
    about: str
    presets: Mapping[str, ExperimentPreset]
    conditions: Mapping[str, str]
    metrics: tuple[Metric, ...]
    versus: Mapping[str, str] = {}
    curve: str | None = None
    axis = "condition"
    trained_score = None
    published = None

    @property
    def score(self) -> Metric:
        return self.metrics[0]

    def remarks(self, settings: Mapping[str, Any]) -> list[str]:
        """Remarks for readers of scores; see `evals.task.Task`."""
        return []

    @abstractmethod
    def data_version(self) -> str:
        """The version of the data and the model. Results of two versions are never mixed."""

    @abstractmethod
    def chance(self) -> float:
        """The score of random guessing."""

    @abstractmethod
    def every_variant(self) -> tuple[str, ...]:
        """All output layers, as in ``--variants``."""

    @abstractmethod
    def completed(self, variant: VariantCall) -> VariantCall:
        """The output layer, with example values for required parameters that were not given."""

    @abstractmethod
    def unsupported(self, variant: VariantCall, condition: str) -> str | None:
        """The reason why this output layer cannot be trained under this condition, or None."""

    @abstractmethod
    def identity(self, variant: VariantCall) -> dict[str, object]:
        """The output layer with all its parameters, for the keys under which results are stored."""

    @abstractmethod
    def train_and_measure(
        self,
        variant: VariantCall,
        condition: str,
        seed: int,
        settings: Any,
        device: str,
        fit: FitFunction,
    ) -> Result:
        """Train and measure an output layer; a pure function of the arguments."""
