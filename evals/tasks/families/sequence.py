"""Sequences: a small causal transformer reads tokens and is asked at some of them.

The family of `mqar`, `flip-flop`, `copy`, `reverse`, `sort` and `language-model`. The model is
`attnzoo.nn.Transformer`, crossed with its position encodings; logits are computed only where they
are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attnzoo.nn import Transformer
from commandline.variants import VariantCall
from evals.measures.heads import Watch, substituted
from evals.task import BatchResult, HeadSample, Measure, Metric, Preset, Published, Task
from evals.task import Settings as Base

POSITIONS = ("none", "rope", "p-rope", "alibi")
ACCURACY = Metric("accuracy", "Accuracy, %: of the tokens asked for", 100, 1)
LOSS = Metric("loss", "Loss, nats per token asked for", lower_is_better=True)


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Of a sequence task."""

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


@dataclass(frozen=True)
class Batch:
    """tokens (B, N), and answers (B, N): the token after each where it is asked, elsewhere −1."""

    tokens: Tensor
    answers: Tensor

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return Batch(self.tokens.to(device), self.answers.to(device))

    @property
    def asked(self) -> Tensor:
        """Where an answer is asked for: (B, N)."""
        return self.answers >= 0


# (logits (S, V) where the batch asks, the batch) -> figures.
Read = Callable[[Tensor, Batch], BatchResult]
# (seed, split, length, start, stop, settings) -> those sequences.
Draw = Callable[[int, str, int, int, int, Any], Batch]


def right(logits: Tensor, batch: Batch) -> Tensor:
    """Whether each answer has the largest logit: (S,), 1.0 or 0.0; NaN where a logit is NaN."""
    hit = (logits.argmax(dim=-1) == batch.answers[batch.asked]).double()
    return hit + 0 * logits.double().sum(dim=-1)


def answers(logits: Tensor, batch: Batch) -> BatchResult:
    """Accuracy and loss over all that is asked."""
    loss = F.cross_entropy(logits.double(), batch.answers[batch.asked], reduction="none")
    return BatchResult({"accuracy": right(logits, batch), "loss": loss})


@dataclass(frozen=True)
class Sequence(Task):
    """A sequence task.

    Attributes beside those of a task:
        draw: its data.
        vocabulary: the number of tokens there are.
        guess: the score of blind guessing.
        size: the number of tokens of a sequence of a length.
        read: what is measured.
        text: the digest of what the data are taken from, where they are not drawn alone.
    """

    name: str
    about: str
    generator: str
    draw: Draw
    vocabulary: Callable[[Any], int]
    guess: Callable[[Any], float]
    presets: Mapping[str, Preset]
    size: Callable[[int], int] = lambda length: length
    read: Read = answers
    text: Callable[[], str] | None = None
    metrics: tuple[Metric, ...] = (ACCURACY, LOSS)
    splits: Mapping[str, str] = field(default_factory=lambda: {"": "test"})
    head_sequences: int = 32
    trained_score: float | None = 0.95
    positions: tuple[str, ...] = POSITIONS
    published: Published | None = None

    def data(self) -> str:
        return f"{self.generator}, {self.text()}" if self.text else self.generator

    def chance(self, settings: Any) -> float:
        return self.guess(settings)

    def tokens(self, length: int) -> int:
        return self.size(length)

    def build(self, variant: VariantCall, positions: str, settings: Settings) -> Transformer:
        return Transformer(
            self.vocabulary(settings),
            settings.width,
            settings.heads,
            settings.depth,
            variant.name,
            positions,
            **variant.params,
        )

    def batch(
        self, seed: int, split: str, length: int, start: int, stop: int, settings: Settings
    ) -> Batch:
        return self.draw(seed, split, length, start, stop, settings)

    def loss(self, model: Transformer, batch: Batch) -> Tensor:
        asked = batch.asked
        return F.cross_entropy(
            model.logits(model.states(batch.tokens)[asked]), batch.answers[asked]
        )

    def measure(self, model: Transformer, batch: Batch, look: HeadSample) -> Measure:
        asked = batch.asked

        def figures(substitute: VariantCall | None) -> BatchResult:
            with ExitStack() as stack:
                stack.enter_context(substituted(model, substitute))
                watch = stack.enter_context(Watch(model, look)) if look.sequences else None
                states = model.states(batch.tokens)
            found = self.read(model.logits(states[asked]), batch)
            if watch is None:
                return found
            return BatchResult(found.metrics, found.curves | watch.curves())

        return figures
