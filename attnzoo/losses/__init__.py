"""Losses of output layers, in memory linear in tokens + classes.

`linear_loss` takes the weights of a variant as probabilities. The other losses have margins, noise,
masks for tasks, distances between classes, or a cost that is independent of tokens × classes.
"""

from attnzoo.losses.cross_entropies import emo_loss, margin_loss, masked_loss, noisy_loss
from attnzoo.losses.linear_loss import linear_loss, loss
from attnzoo.losses.moments import spherical_loss, z_loss
from attnzoo.losses.perturb_max import exact_loss, perturb_max_loss
from attnzoo.losses.probabilities import LossStats

__all__ = [
    "LossStats",
    "emo_loss",
    "exact_loss",
    "linear_loss",
    "loss",
    "margin_loss",
    "masked_loss",
    "noisy_loss",
    "perturb_max_loss",
    "spherical_loss",
    "z_loss",
]
