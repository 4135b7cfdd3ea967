"""The interface of a task: settings, presets, data, a model and metrics.

`Eval` is what a task shares with an experiment (`evals.tasks.digits.experiment`), which has
conditions in place of lengths. Training, workers, results and reports are the same for all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from commandline.variants import VariantCall

# Settings and lengths above these limits are rejected as typos.
MAX_SETTING, MAX_LENGTH = 2**31, 2**22
DTYPES = ("float32", "bfloat16", "float16")  # to which settings can round
AUTOCAST = ("float32", "bfloat16")
SWITCH = 0.75  # the default of the setting


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of any training: AdamW with a one-cycle cosine schedule.

    Attributes:
        steps: training steps.
        batch: sequences or images per training step.
        learning_rate: peak of the one-cycle schedule.
        weight_decay: weight decay of AdamW; learned parameters of a variant are not decayed.
        warmup: share of the steps in which the learning rate rises.
        width: width of the model.
    """

    steps: int
    batch: int
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    warmup: float = 0.3
    width: int = 128

    MAY_BE_ZERO: ClassVar[Collection[str]] = ()

    def __post_init__(self) -> None:
        """Check the numbers; raises ValueError."""
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool):
                most = MAX_LENGTH if name in ("train_shortest", "train_longest") else MAX_SETTING
                least = 0 if name in self.MAY_BE_ZERO else 1
                if not least <= value <= most:
                    bound = f">= {least}" if value < least else f"<= {most}"
                    raise ValueError(f"{name} must be {bound}, got {value}")
        for name, most in (("warmup", 1.0), ("weight_decay", math.inf)):
            self._check_share(name, most)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be finite and > 0, got {self.learning_rate}")

    def _check_dtype(self, name: str, allowed: Sequence[str] = DTYPES) -> None:
        if (value := getattr(self, name)) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def _check_share(self, name: str, most: float) -> None:
        value = getattr(self, name)
        if not 0 <= value <= most or math.isinf(value):
            bound = "[0, inf)" if math.isinf(most) else f"[0, {most}]"
            raise ValueError(f"{name} must be in {bound}, got {value}")

    @property
    def output_layer(self) -> VariantCall | None:
        """The variant of the model's output layer.

        None if the variant is softmax, or if the task has no setting for the output layer.
        """
        return None

    def schedule_text(self, tuned: Collection[str] = ()) -> str:
        """The training schedule in words, without the values of the ``tuned`` settings."""
        peak = "tuned" if "learning_rate" in tuned else f"{self.learning_rate:g}"
        warmup = "tuned" if "warmup" in tuned else f"{self.warmup:.0%}"
        return f"one-cycle cosine, {self.steps} steps, peak {peak}, {warmup} warm-up"

    def identity(self) -> dict[str, object]:
        """The settings that affect training; they are part of the training key.

        A subclass leaves out a setting that was added after results had been published, if it has
        its default value. The keys of the published results therefore stay valid.
        """
        training_settings = {k: v for k, v in asdict(self).items() if not k.startswith("test_")}
        return {**training_settings, "dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class Settings(Schedule):
    """The settings of training and evaluation that all tasks share, besides the schedule.

    A family of tasks adds its own settings in a subclass.

    Fields that begin with ``test_`` affect only the evaluation. Changing them needs no retraining.

    Attributes:
        batch: sequences per training step. If ``fill`` is true, this number applies to steps with
            sequences of length ``train_longest``.
        train_shortest, train_longest, train_stride: the lengths trained on. All sequences of a
            step have the same length. ``train_longest`` is the train length of the results.
        fill: if true, steps with shorter sequences have more sequences, so that all steps have
            about the same number of tokens.
        curriculum: share of the steps in which the maximum length grows to ``train_longest``.
            Small models learn retrieval on short sequences first.
        test_sequences: maximum number of sequences evaluated at one length.
        test_least: minimum number of sequences evaluated at one length.
        test_items: ``test_items`` // length sequences are evaluated at one length, within the two
            bounds above.
        matmul: the dtype to which the operands of every matrix product are rounded, in training and
            evaluation, as on hardware that multiplies in 16 bits and adds in fp32: "float32" (no
            rounding), "bfloat16" or "float16". The model and all other operations stay in fp32.
        autocast: the dtype of `torch.autocast`, in training and evaluation: "float32" (none) or
            "bfloat16". There is no scaling of the loss, which "float16" would need.
        compile: whether `torch.compile` compiles the training step.
        switch: of a variant a=>b, the share of the steps after which b replaces a.
    """

    train_shortest: int
    train_longest: int
    train_stride: int = 1
    fill: bool = False
    curriculum: float = 0.0
    test_sequences: int
    test_least: int
    test_items: int = 2**21
    matmul: str = "float32"
    autocast: str = "float32"
    compile: bool = False
    switch: float = SWITCH

    def __post_init__(self) -> None:
        """Check the numbers; raises ValueError."""
        super().__post_init__()
        self._check_share("curriculum", 1.0)
        self._check_share("switch", 1.0)
        self._check_dtype("matmul")
        self._check_dtype("autocast", AUTOCAST)
        if self.matmul != "float32" and (self.autocast != "float32" or self.compile):
            raise ValueError("matmul must be float32 with autocast or compile")
        if self.train_longest < (least := max(2, self.train_shortest)):
            raise ValueError(f"train_longest must be >= {least}, got {self.train_longest}")
        if (room := self.train_longest - self.train_shortest) % self.train_stride:
            raise ValueError(
                f"train_stride must divide train_longest - train_shortest = {room}, "
                f"got {self.train_stride}"
            )

    def schedule_text(self, tuned: Collection[str] = ()) -> str:
        """The training schedule in words, without the values of the ``tuned`` settings."""
        part = "a tuned part" if "curriculum" in tuned else f"{self.curriculum:.0%}"
        grows = "curriculum" in tuned or self.curriculum
        more = f", lengths grow over the first {part}" if grows else ""
        return f"{super().schedule_text(tuned)}{more}"

    def identity(self) -> dict[str, object]:
        defaults = {
            "matmul": "float32", "autocast": "float32", "compile": False, "switch": SWITCH,
        }  # fmt: skip
        return {
            name: value
            for name, value in super().identity().items()
            if name not in defaults or value != defaults[name]
        }

    def beyond_training(self, multiple: float) -> int:
        """The length nearest to a multiple of the train length, of those in steps of
        ``train_stride`` above it."""
        steps = round((multiple - 1) * self.train_longest / self.train_stride)
        return self.train_longest + max(1, steps) * self.train_stride

    @property
    def switch_step(self) -> int:
        """The step before which b replaces a in the training of a=>b."""
        return round(self.switch * self.steps)

    def batch_size(self, length: int) -> int:
        """The number of sequences in a training step of this length."""
        return self.batch * self.train_longest // length if self.fill else self.batch

    def longest_per_step(self) -> list[int]:
        """The maximum length allowed at each training step; it grows with ``curriculum``."""
        room = (self.train_longest - self.train_shortest) // self.train_stride
        grown = self.curriculum * self.steps
        parts = (min(1.0, step / grown) if grown else 1.0 for step in range(self.steps))
        return [self.train_shortest + int(room * part) * self.train_stride for part in parts]

    def sequences(self, length: int) -> int:
        """The number of sequences evaluated at this length."""
        return min(self.test_sequences, max(self.test_least, self.test_items // length))


EVERY_VARIANT = ("every",)  # in a preset: all registered variants
MAIN_VARIANTS = (
    "softmax",
    "softmax->adaptive_temperature",
    "ssmax",
    "sigmoid",
    "entmax",
    "asentmax",
    "cosformer(features='elu')",
    "taylor",
)

NOTES = {
    "smoke": "The smoke preset checks that everything runs. Its scores mean nothing.",
    "quick": "The quick preset trains small models briefly. Compare variants with each other, not "
    "with published figures.",
    "paper": "The paper preset has the sizes of the literature.",
    "gpu": "The gpu preset trains models of about 30 million parameters.",
}


# The settings that a sweep may tune. Others change the data, the model's size or the training time.
TUNABLE = ("learning_rate", "weight_decay", "warmup", "curriculum")
VALIDATION = "validation"  # the split on which a sweep scores its candidates
RECORDED = "recorded"  # in place of a sweep: the values that a sweep of preset quick chose
SEEDS = 5  # of the presets quick and paper, at least


@dataclass(frozen=True)
class Preset:
    """The default settings of a study. Options of the command line override them.

    Attributes:
        lengths: the lengths of the evaluation.
        settings: the settings of training and evaluation, such as `SequenceSettings`.
        variants: the variants to compare, as in ``--variants``.
        seeds: the number of seeds.
        positions: the position encodings, as in ``--positions``.
        sweep: candidate values of `TUNABLE` settings, from which each variant gets the best;
            `RECORDED`; or {} for no sweep.
        variant_settings: settings that only some variants have, by the variant's name, because its
            paper requires them.
        conditions: the conditions of an experiment, which has no lengths; () for all.
        validation: the sweep scores each candidate at the train length and at about this multiple
            of it, a length that is not reported.
    """

    lengths: tuple[int, ...]
    settings: Any
    variants: tuple[str, ...] = MAIN_VARIANTS
    seeds: int = 1
    positions: tuple[str, ...] = ("none",)
    sweep: Mapping[str, Sequence[float]] | str = field(default_factory=dict)
    variant_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    validation: float = 1.5


@dataclass(frozen=True)
class Metric:
    """The name and format of a metric. Tables show value · ``factor`` with ``digits`` decimals.

    Attributes:
        name: its name in result rows and files.
        title: its title in tables and figures.
        factor: such as 100 for a fraction that is shown in %.
        digits: the number of decimals.
        log: whether figures have a log axis.
        lower_is_better: whether lower values are better, as for a loss.
        optional: whether it is left out if it occurs in no result.
    """

    name: str
    title: str
    factor: float = 1.0
    digits: int = 3
    log: bool = False
    lower_is_better: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Published:
    """A published table to print beside the results.

    rows: for each variant, one score per entry of ``lengths``, in the unit of the metric's title.
    second_hand: the lengths whose scores are quoted second-hand; the table marks them with "?".
    """

    title: str
    lengths: tuple[int, ...]
    second_hand: tuple[int, ...]
    rows: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class BatchResult:
    """Measurements on one batch.

    metrics: tensors (S,) by name, one value per sequence or answer; results report the mean.
    curves: tensors (S, K) by name, K values per sequence or query; results report the mean over S.
    """

    metrics: dict[str, Tensor]
    curves: dict[str, Tensor] = field(default_factory=dict)


class HeadSample(NamedTuple):
    """The numbers of sequences, counted from the first of a batch, that are measured.

    sequences: for the metrics of heads. jacobians: for the Jacobian norms.
    """

    sequences: int
    jacobians: int


# A function that measures one batch with the given variant. None stands for the trained variant.
# Any other variant is substituted for the trained one.
Measure = Callable[[VariantCall | None], BatchResult]


class Eval(ABC):
    """A task or an experiment: trained models, and their scores at points x.

    Attributes:
        name: its name on the command line.
        about: one paragraph that explains it.
        presets: `Preset` by name: "quick" (the default of the command line), "smoke",
            "paper" or "gpu".
        metrics: the metrics; the first one is the score.
        axis: what x is: "n", a length, or "condition".
        refused: the options that it does not have, with the reasons.
        versus: maps a condition to the one with which its score is compared.
        curve: the title of the curve that each result has, such as "Accuracy by number of labels";
            None if there is none.
        trained_score: a run with a lower score at the train length counts as not trained. None:
            every run counts as trained.
        published: a published table for comparison.
    """

    name: str
    about: str
    presets: Mapping[str, Preset]
    metrics: tuple[Metric, ...]
    axis: str = "n"
    refused: Mapping[str, str] = {}
    versus: Mapping[str, str] = {}
    curve: str | None = None
    trained_score: float | None = None
    published: Published | None = None

    @property
    def score(self) -> Metric:
        return self.metrics[0]

    def remarks(self, settings: Mapping[str, Any]) -> list[str]:
        """Remarks for readers of scores. ``settings`` are the settings in a result row."""
        return []

    def identity(self, variant: VariantCall) -> dict[str, object]:
        """The variant with all its parameters, for the keys under which results are stored."""
        return variant.identity()

    @abstractmethod
    def data_version(self, settings: Any) -> str:
        """The version of the data and the model. Results of two versions are never mixed."""

    @abstractmethod
    def chance(self, settings: Any) -> float:
        """The score of random guessing."""


ROPE_SCALINGS = ("linear", "ntk", "yarn")  # of `attnzoo.nn.Transformer`


def trained_encoding(positions: str) -> str:
    """The position encoding in training.

    >>> trained_encoding("rope->yarn"), trained_encoding("alibi")
    ('rope', 'alibi')
    """
    return positions.split("->")[0]


class Task(Eval):
    """A task: an instance of a subclass, which defines the model; see `evals.tasks.families`.

    Besides those of `Eval`, it has

    Attributes:
        positions: the position encodings that its model can be trained with.
        splits: the data splits to evaluate. The key is the prefix of the names of the split's
            metrics, such as "sparse_" for the split "sparse".
        head_sequences: the number of sequences per length on which heads are measured.
    """

    refused: Mapping[str, str] = {"conditions": "it has lengths instead"}
    positions: tuple[str, ...]
    splits: Mapping[str, str]
    head_sequences: int

    @property
    def encodings(self) -> tuple[str, ...]:
        """What ``--positions`` takes: `positions`, and encodings with a scaling of RoPE that is
        substituted at inference, such as "rope->yarn"."""
        scaled = [x for x in self.positions if x in ("rope", "p-rope")]
        return (*self.positions, *(f"{x}->{kind}" for x in scaled for kind in ROPE_SCALINGS))

    @abstractmethod
    def tokens(self, length: int) -> int:
        """The number of keys that attention sees at an eval or train length."""

    @abstractmethod
    def build(self, variant: VariantCall, positions: str, settings: Any) -> nn.Module:
        """The untrained model."""

    @abstractmethod
    def batch(
        self, seed: int, split: str, length: int, start: int, stop: int, settings: Any
    ) -> Any:
        """Draw sequences start .. stop − 1 of (seed, split, length). A batch has ``to(device)``.

        The split is "train", "validation" (scores of a sweep) or a value of ``splits``.
        """

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """The training loss."""

    @abstractmethod
    def measure(self, model: Any, batch: Any, sample: HeadSample) -> Measure:
        """Return a function that measures one variant on the batch.

        Values that do not depend on the variant can be computed before the function is returned.
        """
