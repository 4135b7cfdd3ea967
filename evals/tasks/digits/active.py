"""Active learning on digits: which images to label next (after arXiv:2210.03005).

A run starts with a few labelled images, drawn at random. In each round a model is trained from new
weights on all labelled images and tested, and the strategy chooses the images to label next from
the rest, the pool:

    random             at random
    least-confidence   the largest 1 − p₁, where p₁ ≥ p₂ ≥ … are an image's probabilities
    margin             the smallest p₁ − p₂
    entropy            the largest −Σ p log p, where 1 − Σ p counts as one more outcome
    mc-dropout         the largest entropy of the mean probabilities of several passes with dropout

Under conditions that end in "-trimmed", the most uncertain images of the pool, as the strategy
measures it, are left out in each round before the choice. Some output layers, such as sink, leave a
part of the probability to no class; this part adds to the uncertainty. Probabilities that sum to
more than 1 are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evals.task import Metric, Preset
from evals.tasks.digits.data import TRAIN, Images, order, split
from evals.tasks.digits.experiment import (
    Classifier,
    ClassifierSettings,
    Experiment,
    Result,
    Trial,
    accuracy,
)

TRIMMED = "-trimmed"


@dataclass(frozen=True, kw_only=True)
class ActiveSettings(ClassifierSettings):
    """Settings of active learning.

    start: labelled images at the start. add: images labelled per round. rounds: the number of
    rounds. trim: the share of the pool that is left out under "-trimmed" conditions. passes: the
    number of passes with dropout of "mc-dropout".
    """

    steps: int = 120
    batch: int = 32
    dropout: float = 0.2
    start: int = 20
    add: int = 20
    rounds: int = 10
    trim: float = 0.02
    passes: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.trim <= 0.5:
            raise ValueError(f"trim must be in [0, 0.5], got {self.trim}")
        labelled = self.start + self.rounds * self.add
        if labelled > (most := TRAIN // 2):
            raise ValueError(f"start + rounds · add must be <= {most}, got {labelled}")


def least_confidence(p: Tensor) -> Tensor:
    """1 − p₁ of probabilities (N, V): (N,)."""
    return 1 - p.amax(dim=-1)


def margin(p: Tensor) -> Tensor:
    """p₂ − p₁ of probabilities (N, V), which grows with the uncertainty: (N,)."""
    first, second = p.topk(2, dim=-1).values.unbind(dim=-1)
    return second - first


def entropy(p: Tensor) -> Tensor:
    """−Σ p log p of probabilities (N, V) and of the rest 1 − Σ p: (N,)."""
    p = torch.cat([p, (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0)], dim=-1)
    return -torch.special.xlogy(p, p).sum(dim=-1)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "least-confidence": least_confidence,
    "margin": margin,
    "entropy": entropy,
    "mc-dropout": entropy,
}
CONDITIONS = {"random": "images are chosen at random"}
for _name in MEASURES:
    CONDITIONS[_name] = f"the most uncertain images by {_name} are chosen"
    CONDITIONS[_name + TRIMMED] = f"{_name}, without the most uncertain images of the pool"


def bounded(p: Tensor) -> Tensor:
    """Probabilities (N, V), divided by their sum where it is larger than 1."""
    return p / p.sum(dim=-1, keepdim=True).clamp(min=1)


def chosen(uncertainty: Tensor, count: int, trim: float) -> Tensor:
    """The indices of the ``count`` most uncertain images, in descending order.

    The share ``trim`` of the images that are more uncertain than all others is left out first. Of
    equal uncertainties, the image with the smaller index comes first.
    """
    ranked = uncertainty.sort(descending=True, stable=True).indices
    left_out = round(trim * len(ranked))
    return ranked[left_out : left_out + count]


def next_images(
    model: Classifier, pool: Images, condition: str, drawn: Tensor, settings: ActiveSettings
) -> Tensor:
    """The indices in the pool of the images to label next.

    ``drawn`` (N,) are the numbers of the pool's images in a random order. It decides for "random",
    and between equal uncertainties.
    """
    strategy = condition.removesuffix(TRIMMED)
    by_chance = drawn.argsort()
    if strategy == "random":
        return by_chance[: settings.add]
    if strategy == "mc-dropout":
        model.train()
        passes = [bounded(model.probabilities(pool.pixels)) for _ in range(settings.passes)]
        probabilities = torch.stack(passes).mean(dim=0)
    else:
        probabilities = bounded(model.eval().probabilities(pool.pixels))
    uncertainty = MEASURES[strategy](probabilities)
    model.eval()
    trim = settings.trim if condition.endswith(TRIMMED) else 0.0
    return by_chance[chosen(uncertainty[by_chance], settings.add, trim)]


class ActiveLearning(Experiment):
    name = "active-learning"
    about = (
        "Label the most uncertain digits, round by round, with several measures of uncertainty, "
        "with and without leaving out the most uncertain few per cent of the pool (after "
        "arXiv:2210.03005)."
    )
    conditions: Mapping[str, str] = CONDITIONS
    versus: Mapping[str, str] = {
        **dict.fromkeys(MEASURES, "random"),
        **{name + TRIMMED: name for name in MEASURES},
    }
    curve = "Accuracy by number of labels, %"
    metrics = (
        Metric("mean_accuracy", "Accuracy, mean over the numbers of labels, %", 100, 1),
        Metric("accuracy", "Accuracy with all labels, %", 100, 1),
    )
    presets: Mapping[str, Preset] = {
        "smoke": Preset(
            (),
            ActiveSettings(steps=5, width=16, rounds=2, passes=2),
            ("softmax", "entmax"),
            conditions=("random", "margin", "mc-dropout-trimmed"),
        ),
        "quick": Preset((), ActiveSettings(), ("softmax", "entmax", "sink"), seeds=5),
    }

    def train_and_measure(self, trial: Trial) -> Result:
        seed, settings, device = trial.seed, trial.settings, trial.device
        images, test = (part.to(device) for part in split(seed))
        count = len(images.labels)
        drawn = order(seed, "pool", count).to(device)
        labelled = order(seed, "start", count)[: settings.start].to(device)
        curve: dict[int, float] = {}
        for number in range(settings.rounds + 1):
            # The weights of a round do not depend on the condition.
            model = trial.trained(seed * (settings.rounds + 1) + number, images.at(labelled))
            curve[len(labelled)] = accuracy(model, test)
            if number < settings.rounds:
                unlabelled = torch.ones(count, dtype=torch.bool, device=device)
                unlabelled[labelled] = False
                pool = unlabelled.nonzero()[:, 0]
                next_labelled = next_images(
                    model, images.at(pool), trial.condition, drawn[pool], settings
                )
                labelled = torch.cat([labelled, pool[next_labelled]])
        values = [*curve.values()]
        mean = sum(values) / len(values)
        return Result({"mean_accuracy": mean, "accuracy": values[-1]}, curve)


ACTIVE_LEARNING = ActiveLearning()
