"""Losses of output layers: every normalizer over a vocabulary, in memory linear in its size."""

from attnzoo.losses.dispatch import LossStats
from attnzoo.losses.linear_loss import linear_loss, loss

__all__ = ["LossStats", "linear_loss", "loss"]
