"""What a task is: settings and presets, data, a model, and what is measured on it.

Everything else (training, cells, workers, results, report) is the harness, and serves every task.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from commandline.variants import VariantCall

MOST, MOST_LENGTH = 2**31, 2**22  # of a number among the settings: what is beyond is a slip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a cell depends on besides its variant, its positions, its seed and its length.

    Fields that begin with ``test_`` are of the evaluation, all others of the training. ``batch`` is
    in sequences; with ``fill`` in sequences of the longest length, shorter ones come in as many
    more. ``curriculum`` is the share of the steps in which the longest length grows up to
    train_longest: a small model learns to look something up from short sequences first.
    """

    steps: int
    batch: int
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    warmup: float = 0.3
    width: int = 128
    train_shortest: int
    train_longest: int
    train_stride: int = 1
    fill: bool = False
    curriculum: float = 0.0
    test_sequences: int
    test_least: int
    test_items: int = 2**21

    def __post_init__(self) -> None:
        """Raises ValueError where a number lies outside of what it may be."""
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool):
                most = MOST_LENGTH if name in ("train_shortest", "train_longest") else MOST
                if not 1 <= value <= most:
                    bound = "at least 1" if value < 1 else f"at most {most}"
                    raise ValueError(f"{name} must be {bound}, got {value}")
        for name, most in (("curriculum", 1.0), ("warmup", 1.0), ("weight_decay", math.inf)):
            value = getattr(self, name)
            if not 0 <= value <= most or math.isinf(value):
                raise ValueError(f"{name} must be in [0, {most}], got {value}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.train_longest < max(2, self.train_shortest):
            raise ValueError(f"train_longest must be at least {max(2, self.train_shortest)}")
        if (self.train_longest - self.train_shortest) % self.train_stride:
            raise ValueError("train_stride must divide train_longest − train_shortest")

    @property
    def schedule(self) -> str:
        """The schedule in words: it is printed with every result."""
        grows = f", lengths grow over the first {self.curriculum:.0%}" if self.curriculum else ""
        return (
            f"one-cycle cosine, {self.steps} steps, peak {self.learning_rate:g}, "
            f"{self.warmup:.0%} warm-up{grows}"
        )

    def share(self, length: int) -> int:
        """How many sequences of a length a training step has."""
        return self.batch * self.train_longest // length if self.fill else self.batch

    def ceilings(self) -> list[int]:
        """The longest length of each training step."""
        room = (self.train_longest - self.train_shortest) // self.train_stride
        grown = self.curriculum * self.steps
        parts = (min(1.0, step / grown) if grown else 1.0 for step in range(self.steps))
        return [self.train_shortest + int(room * part) * self.train_stride for part in parts]

    def sequences(self, length: int) -> int:
        """How many sequences of a length are tested: test_items of items, within bounds."""
        return min(self.test_sequences, max(self.test_least, self.test_items // length))

    def identity(self) -> dict[str, object]:
        """What a training depends on."""
        mine = {k: v for k, v in asdict(self).items() if not k.startswith("test_")}
        return {**mine, "dtype": "float32"}


EVERY = ("every",)  # for variants: all that are registered, a plugin's too
QUICK = (
    "softmax",
    "softmax->adaptive_temperature",
    "ssmax",
    "sigmoid",
    "entmax",
    "asentmax",
    "cosformer",
    "taylor",
)

NOTES = {
    "smoke": "smoke: only shows that everything runs; its figures mean nothing",
    "quick": "quick: three seeds, short training; compare variants, not published figures",
    "paper": "paper: the sizes of the literature; wants GPUs, or hours",
}


@dataclass(frozen=True)
class Preset:
    """Variants, seeds, lengths, positions and settings under one name."""

    variants: tuple[str, ...]
    seeds: int
    lengths: tuple[int, ...]
    settings: Any
    positions: tuple[str, ...] = ("none",)


@dataclass(frozen=True)
class Metric:
    """A figure of a row; ``factor`` and ``digits`` are how tables show it."""

    name: str
    title: str
    factor: float = 1.0
    digits: int = 3
    log: bool = False  # drawn on a log axis
    lower_is_better: bool = False


@dataclass(frozen=True)
class Published:
    """A published table to print beside ours: the score by variant and length, as it is shown."""

    title: str
    lengths: tuple[int, ...]
    second_hand: tuple[int, ...]
    rows: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class BatchResult:
    """Of one batch: metrics, each the mean of a tensor; curves, each the mean of (R, K) rows."""

    metrics: dict[str, Tensor]
    curves: dict[str, Tensor] = field(default_factory=dict)


class HeadSample(NamedTuple):
    """Of how many sequences of a batch, the first ones, heads are measured and of how
    many of these their Jacobians too."""

    sequences: int
    jacobians: int


# BatchResult with the attention as it was trained (None) or with another variant's in its place.
Measure = Callable[[VariantCall | None], BatchResult]


class Task(ABC):
    """A task. A subclass is a family, in `evals.tasks.families`, and is final.

    Attributes:
        name: on the command line.
        about: what is asked, in a paragraph.
        presets: by name; all have "smoke", "quick" and "paper".
        positions: the position encodings that it can be crossed with.
        metrics: what its rows hold; the first is the score.
        splits: what is tested, a prefix of the metrics' names for each split of the data.
        head_sequences: sequences of each length of which the heads are measured too.
        trained: the score at training's longest length below which a cell counts as not trained.
        published: figures of a paper.
    """

    name: str
    about: str
    presets: Mapping[str, Preset]
    positions: tuple[str, ...]
    metrics: tuple[Metric, ...]
    splits: Mapping[str, str]
    head_sequences: int
    trained_score: float | None
    published: Published | None

    @property
    def score(self) -> Metric:
        return self.metrics[0]

    @abstractmethod
    def data(self) -> str:
        """The version of its data and its model, part of every cell's identity."""

    @abstractmethod
    def chance(self, settings: Any) -> float:
        """The score of blind guessing."""

    @abstractmethod
    def tokens(self, length: int) -> int:
        """The number of keys that attention sees at a length."""

    @abstractmethod
    def build(self, variant: VariantCall, positions: str, settings: Any) -> nn.Module:
        """The untrained model."""

    @abstractmethod
    def batch(
        self, seed: int, split: str, length: int, start: int, stop: int, settings: Any
    ) -> Any:
        """Sequences start .. stop − 1 of (seed, split, length), with ``to(device)``."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """What training minimizes."""

    @abstractmethod
    def measure(self, model: Any, batch: Any, look: HeadSample) -> Measure:
        """Do what all variants share, and return what measures one of them."""
