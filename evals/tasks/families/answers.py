"""Batches of tokens with answers, and the metrics of answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from evals.task import BatchResult, Metric
from evals.tasks.families.batches import Batch

ACCURACY = Metric("accuracy", "Accuracy, %", 100, 1)
EXACT = Metric("exact", "Exact match, %", 100, 1)
LOSS = Metric("loss", "Loss, nats per answer", lower_is_better=True)


@dataclass(frozen=True)
class SequenceBatch(Batch):
    """Tokens and answers, both (B, N) int64.

    An answer is the token to predict at its position, or −1 if nothing is to be predicted there.
    """

    tokens: Tensor
    answers: Tensor

    @property
    def asked(self) -> Tensor:
        """A bool mask (B, N) of the tokens that have an answer."""
        return self.answers >= 0


def answers(logits: Tensor, batch: SequenceBatch) -> BatchResult:
    """The metrics ``accuracy`` (NaN for NaN logits) and ``loss``, one value per answer (S,)."""
    wanted, logits = batch.answers[batch.asked], logits.double()
    loss = F.cross_entropy(logits, wanted, reduction="none")
    # Adding 0 · logits propagates a NaN, which would otherwise count as a wrong answer.
    right = (logits.argmax(dim=-1) == wanted).double() + 0 * logits.sum(dim=-1)
    return BatchResult({"accuracy": right, "loss": loss})


def whole_answers(logits: Tensor, batch: SequenceBatch) -> BatchResult:
    """The metric ``exact``, one value per sequence: 1.0 if all its answers are right; besides it
    the metrics of `answers`."""
    metrics = answers(logits, batch).metrics
    right = torch.ones(batch.answers.shape).to(metrics["accuracy"])
    right[batch.asked] = metrics["accuracy"]
    exact = (right.amin(dim=-1) == 1).double() + 0 * right.sum(dim=-1)
    return BatchResult({"exact": exact, **metrics})
