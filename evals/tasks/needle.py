"""Needle: find the one item whose key is asked for among n, and say its class.

Item i is [onehot(key_i), onehot(class_i)] with one of 16 keys and one of ten classes; the query is
onehot(key); exactly one item, at a uniform place, has the key that is asked for, the others have
keys uniform over the other 15. The gap between the needle's score and the hay's does not depend on
n: a normalizer fails only by spreading weight over hay that scores low, as softmax does,
1 / (1 + (n − 1) e^{−Δ}). Training sees n = 5 .. 16.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.retrieval import CLASSES, Batch, Retrieval
from evals.tasks.max_retrieval import PRESETS

KEYS = 16


def draw(seed: int, split: str, length: int, start: int, stop: int) -> Batch:
    """Words: key asked for, place of the needle, then each item's class, then each item's key."""
    raw = words(seed, split, length, start, stop, 2 + 2 * length)
    asked, place = integers(raw[:, 0], KEYS), integers(raw[:, 1], length)
    keys = integers(raw[:, 2 + length :], KEYS - 1)
    keys += keys >= asked[:, None]  # one of the others
    np.put_along_axis(keys, place[:, None], asked[:, None], axis=1)
    keys_, asked_ = torch.from_numpy(keys), torch.from_numpy(asked)
    return Batch(
        features=F.one_hot(keys_, KEYS).float(),
        classes=torch.from_numpy(integers(raw[:, 2 : 2 + length], CLASSES)),
        query=F.one_hot(asked_, KEYS).float(),
        closeness=(keys_ == asked_[:, None]).float(),
    )


TASK = Retrieval(
    name="needle",
    about="Find the one item whose key is asked for among n, and say its class: the gap between "
    "its score and the others' stays what it was in training, whatever n.",
    generator=f"{GENERATOR}, needle 1",
    draw=draw,
    sizes=(KEYS, KEYS),
    presets=PRESETS,
)
