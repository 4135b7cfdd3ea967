"""Sequence tasks: a small causal transformer reads tokens and predicts the answer at some of them.

All tasks except `max-retrieval` and `needle` belong to this family. The model is
`attnzoo.nn.Transformer` with one of its position encodings. Logits are computed only at tokens that
have an answer.

The setting ``output`` chooses the output layer and its loss; see `outputs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from attnzoo.nn import Transformer
from commandline.variants import VariantCall
from evals.measures.heads import measured_heads, substituted
from evals.task import (
    RECORDED,
    SEEDS,
    BatchResult,
    HeadSample,
    Measure,
    Metric,
    Preset,
    Published,
    Settings,
    Task,
)
from evals.tasks.families import outputs
from evals.tasks.families.answers import ACCURACY, LOSS, SequenceBatch, answers
from evals.tasks.families.batches import check_range, check_tensor, check_type

POSITIONS = ("none", "rope", "p-rope", "alibi", "nape", "t5")


@dataclass(frozen=True, kw_only=True)
class SequenceSettings(Settings):
    """Settings of a sequence task; `evals.task.Settings` describes the fields.

    heads: the number of heads per layer. depth: the number of layers. output: the output layer,
    such as "entmax(alpha=1.5)" or "mixture(components=4)"; see `outputs`. qk_norm, qk_dim and
    layer_scale: as in `Transformer`; 0 stands for None.
    """

    width: int = 64
    heads: int = 2
    depth: int = 2
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    warmup: float = 0.1
    fill: bool = True
    curriculum: float = 0.6
    test_sequences: int = 256
    test_least: int = 16
    test_items: int = 2**16
    output: str = "softmax"
    qk_norm: bool = False
    qk_dim: int = 0
    layer_scale: float = 0.0

    MAY_BE_ZERO = ("qk_dim",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("layer_scale", math.inf)
        object.__setattr__(self, "output", str(outputs.parse(self.output)))

    @property
    def output_layer(self) -> VariantCall | None:
        return outputs.variant_of(outputs.parse(self.output))

    def identity(self) -> dict[str, object]:
        settings = super().identity()
        if self.output_layer is None:
            del settings["output"]
        added = ("qk_norm", "qk_dim", "layer_scale")  # after results had been published
        return {name: value for name, value in settings.items() if value or name not in added}


# What the papers of some variants require: taylor has queries and keys with 16 features
# (arXiv:2402.18668); sigmoid in deep models has QK-norm and LayerScale (arXiv:2409.04431).
VARIANT_SETTINGS = {"taylor": {"qk_dim": 16}}
DEEP_VARIANT_SETTINGS = {**VARIANT_SETTINGS, "sigmoid": {"qk_norm": True, "layer_scale": 1e-4}}

# Max-retrieval and copy run every variant in the preset smoke, other tasks only these.
SMOKE_VARIANTS = ("softmax", "softmax->adaptive_temperature", "ssmax")

# What the presets of most tasks have. Preset quick tunes learning rates, preset paper uses them.
COMMON: dict[str, dict[str, Any]] = {
    "smoke": dict(
        lengths=(16, 64), positions=("rope",), variants=SMOKE_VARIANTS,
        steps=20, batch=16, train_shortest=4, train_longest=16, test_sequences=16,
    ),
    "quick": dict(
        lengths=(32, 64, 128, 256), positions=("rope",), seeds=SEEDS,
        sweep={"learning_rate": (1e-3, 3e-3, 1e-2)}, variant_settings=VARIANT_SETTINGS,
        steps=1500, batch=32, train_shortest=4, train_longest=32,
    ),
    "paper": dict(
        lengths=(64, 128, 256, 512, 1024, 2048, 4096), positions=POSITIONS, seeds=SEEDS,
        sweep=RECORDED, variant_settings=DEEP_VARIANT_SETTINGS,
        batch=128, width=256, heads=4, depth=4, learning_rate=3e-4, train_longest=64,
        test_items=2**20,
    ),
}  # fmt: skip


def presets(
    kind: type[SequenceSettings] = SequenceSettings, **changes: Mapping[str, Any]
) -> dict[str, Preset]:
    """Presets by name, from what each has besides `COMMON`: fields of `Preset` and of the settings,
    which are of the class ``kind``."""
    made = {}
    for name, changed in changes.items():
        values = {**COMMON.get(name, {}), **changed}
        about = {f.name: values.pop(f.name) for f in fields(Preset) if f.name in values}
        made[name] = Preset(settings=kind(**values), **about)
    return made


PRESETS = presets(smoke={}, quick={})  # of a task that has none of its own


# A function (logits, batch) that returns measurements. ``logits`` (S, V) belong to the S tokens
# with an answer. For output layers other than plain softmax, they are log-probabilities.
ReadLogits = Callable[[Tensor, SequenceBatch], BatchResult]
# A function (model, states, batch) that returns measurements by name, from the states (S, E) of the
# S tokens with an answer.
ReadStates = Callable[[Transformer, Tensor, SequenceBatch], dict[str, Tensor]]
# A function (seed, split, length, start, stop, settings) that returns sequences start .. stop − 1.
Draw = Callable[[int, str, int, int, int, Any], SequenceBatch]


@dataclass(frozen=True)
class SequenceTask(Task):
    """A sequence task. It needs a name, an explanation, ``draw`` and ``vocabulary``.

    Attributes besides those of `Task`:
        draw: draws a batch from (seed, split, length, start, stop, settings).
        vocabulary: the number of different tokens; a function if it depends on the settings.
        chance_score: the score of random guessing; a function if it depends on the settings. By
            default 1 / vocabulary.
        presets: by default `PRESETS`.
        version: the version of ``draw``; change it when the data change. Plugins need not, because
            the hash of their file is part of each key.
        size: maps a length to the number of tokens of a sequence; by default the length itself.
        read: computes the metrics from (logits, batch). It does not compute `outputs.METRICS`,
            which the task adds to ``metrics``.
        read_states: computes metrics from (model, states, batch), only where heads are measured.
        text: returns a digest of the files that the data come from, from the settings; None if
            there are none.
        frequencies: returns how often each token occurs in the training data, (V,). None if the
            output layer cannot be adaptive.
    """

    name: str
    about: str
    draw: Draw
    vocabulary: int | Callable[[Any], int]
    chance_score: float | Callable[[Any], float] | None = None
    presets: Mapping[str, Preset] = field(default_factory=lambda: PRESETS)
    version: str = "1"
    size: Callable[[int], int] = lambda length: length
    read: ReadLogits = answers
    read_states: ReadStates | None = None
    text: Callable[[Any], str] | None = None
    frequencies: Callable[[Any], Tensor] | None = None
    metrics: tuple[Metric, ...] = (ACCURACY, LOSS)
    splits: Mapping[str, str] = field(default_factory=lambda: {"": "test"})
    head_sequences: int = 32
    trained_score: float | None = 0.95
    positions: tuple[str, ...] = POSITIONS
    published: Published | None = None

    def __post_init__(self) -> None:
        size = self.vocabulary
        if not callable(size) and (type(size) is not int or size < 1):
            raise ValueError(f"vocabulary of task {self.name!r} must be an int >= 1, got {size!r}")
        if self.metrics:  # without, `register_task` raises
            object.__setattr__(self, "metrics", (*self.metrics, *outputs.METRICS))

    def remarks(self, settings: Mapping[str, Any]) -> list[str]:
        if "output" not in settings:
            return []
        return [
            f"output layer: {settings['output']}; if it gives some tokens probability 0, "
            f"(p + {outputs.EPSILON:g})/(1 + {outputs.EPSILON:g} V) replaces each probability p"
        ]

    def data_version(self, settings: Any) -> str:
        return f"{self.version}, {self.text(settings)}" if self.text else self.version

    def chance(self, settings: Any) -> float:
        score = self.chance_score
        if score is None:
            return 1 / self.vocabulary_size(settings)
        return score(settings) if callable(score) else score

    def tokens(self, length: int) -> int:
        return self.size(length)

    def vocabulary_size(self, settings: SequenceSettings) -> int:
        return self.vocabulary(settings) if callable(self.vocabulary) else self.vocabulary

    def build(
        self, variant: VariantCall, positions: str, settings: SequenceSettings
    ) -> Transformer:
        size, counts = self.vocabulary_size(settings), None
        if self.frequencies is not None:
            counts = self.frequencies(settings).sort(descending=True).values.tolist()
        call, tokens = outputs.parse(settings.output), settings.batch * settings.train_longest
        model = Transformer(
            size, settings.width, settings.heads, settings.depth, variant.name, positions,
            qk_norm=settings.qk_norm, qk_dim=settings.qk_dim or None,
            layer_scale=settings.layer_scale or None, wrapper=variant.wrapper_choice,
            **outputs.arguments(call, settings.width, size, counts, tokens), **variant.params,
        )  # fmt: skip
        outputs.tie_mixture(model)
        return model

    def batch(
        self, seed: int, split: str, length: int, start: int, stop: int, settings: SequenceSettings
    ) -> SequenceBatch:
        batch = self.draw(seed, split, length, start, stop, settings)
        check_type(batch, SequenceBatch)
        shape, axes = (stop - start, self.tokens(length)), f"(stop - start, size({length})) = "
        for name, values, least in (("tokens", batch.tokens, 0), ("answers", batch.answers, -1)):
            check_tensor(name, values, shape, torch.int64, axes)
            last = self.vocabulary_size(settings) - 1
            check_range(name, values, least, last, "vocabulary - 1 = ")
        if not bool((asked := batch.asked.any(dim=1)).all()):
            raise ValueError(
                "answers must have an entry >= 0 in every sequence, got only -1 in sequence "
                f"{start + int(asked.int().argmin())}"
            )
        return self._by_frequency(batch, settings)

    def _by_frequency(self, batch: SequenceBatch, settings: SequenceSettings) -> SequenceBatch:
        """For an adaptive output layer, renumber the tokens in descending order of frequency."""
        if self.frequencies is None or outputs.parse(settings.output).name != outputs.ADAPTIVE:
            return batch
        order = self.frequencies(settings).sort(descending=True, stable=True).indices
        ranks = torch.cat([order.argsort(), torch.tensor([-1])])  # −1 stands for no answer
        return SequenceBatch(ranks[batch.tokens], ranks[batch.answers])

    def loss(self, model: Transformer, batch: SequenceBatch) -> Tensor:
        asked = batch.asked
        return model.loss(model.states(batch.tokens)[asked], batch.answers[asked])

    def measure(self, model: Transformer, batch: SequenceBatch, sample: HeadSample) -> Measure:
        asked = batch.asked

        def measured(substitute: VariantCall | None) -> BatchResult:
            with substituted(model, substitute), measured_heads(model, sample) as curves:
                states = model.states(batch.tokens)[asked]
            logits, output_metrics = outputs.read(model, states, batch.answers[asked])
            result = self.read(logits, batch)
            metrics = result.metrics | output_metrics
            if sample.sequences and self.read_states is not None:
                metrics |= self.read_states(model, states, batch)
            return BatchResult(metrics, {**result.curves, **curves})

        return measured
