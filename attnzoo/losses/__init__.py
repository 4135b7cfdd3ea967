"""Losses of output layers whose probabilities are the weights of a variant.

`linear_loss` takes memory linear in tokens + classes.
"""

from attnzoo.losses.dispatch import LossStats
from attnzoo.losses.linear_loss import linear_loss, loss

__all__ = ["LossStats", "linear_loss", "loss"]
