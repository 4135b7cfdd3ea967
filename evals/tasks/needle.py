"""Needle: find the one item with the query's key among n, and predict its class.

Item i is [onehot(key_i), onehot(class_i)] with one of 16 keys and one of ten classes; the query is
onehot(key). Exactly one item, at a random position, has the query's key; the keys of the others are
uniform over the other 15. The score gap Δ between that item and the others does not depend on n. A
normalizer fails only by spreading weight over many low scores: softmax gives the item the weight
1 / (1 + (n − 1) e^{−Δ}). Training has n = 5 .. 16.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from evals.tasks.draws import GENERATOR, integers, words
from evals.tasks.families.retrieval import CLASSES, RetrievalBatch, RetrievalTask
from evals.tasks.families.sequence import SMOKE_VARIANTS
from evals.tasks.max_retrieval import PRESETS

KEYS = 16


def draw(seed: int, split: str, length: int, start: int, stop: int) -> RetrievalBatch:
    """Draw sequences. The random numbers of a sequence give the query's key, the index of the item
    with that key, the class of each item, and the key of each item, in this order."""
    raw = words(seed, split, length, start, stop, 2 + 2 * length)
    query_keys, index = integers(raw[:, 0], KEYS), integers(raw[:, 1], length)
    keys = integers(raw[:, 2 + length :], KEYS - 1)
    keys += keys >= query_keys[:, None]  # the other items have any key except the query's
    np.put_along_axis(keys, index[:, None], query_keys[:, None], axis=1)
    key_tensor, query_tensor = torch.from_numpy(keys), torch.from_numpy(query_keys)
    return RetrievalBatch(
        features=F.one_hot(key_tensor, KEYS).float(),
        classes=torch.from_numpy(integers(raw[:, 2 : 2 + length], CLASSES)),
        query=F.one_hot(query_tensor, KEYS).float(),
        closeness=(key_tensor == query_tensor[:, None]).float(),
    )


TASK = RetrievalTask(
    name="needle",
    about="Find the one item with the query's key among n, and predict its class. The gap between "
    "its attention score and the other items' scores does not depend on n.",
    version=f"{GENERATOR}, needle 1",
    draw=draw,
    sizes=(KEYS, KEYS),
    presets={**PRESETS, "smoke": replace(PRESETS["smoke"], variants=SMOKE_VARIANTS)},
)
