"""Max retrieval: find the item with the largest value among n, and predict its class.

Item i is [rho_i, onehot(kappa_i)] with rho_i ~ U(0, 1) and kappa_i uniform over ten classes. The
query is a random scalar ~ U(0, 1). The label is the kappa of the item with the largest rho.
Training uses n = 5 .. 16 (one n per batch), the evaluation n up to 16384. The score shows how well
attention finds one key among n (Veličković et al. 2024, arXiv:2410.01104).
"""

from __future__ import annotations

import numpy as np
import torch

from evals.task import EVERY_VARIANT, MAIN_VARIANTS, RECORDED, SEEDS, Preset, Published
from evals.tasks.draws import GENERATOR, integers, uniforms, words
from evals.tasks.families.retrieval import CLASSES, RetrievalBatch, RetrievalSettings, RetrievalTask

_VARIANTS = (*MAIN_VARIANTS, "softmax->log_n(train_length=16)")
PRESETS = {
    "smoke": Preset((16, 64), RetrievalSettings(steps=20, test_sequences=500), EVERY_VARIANT),
    "quick": Preset(
        tuple(2**i for i in range(4, 13)), RetrievalSettings(steps=2000), _VARIANTS, SEEDS,
        sweep={"learning_rate": (1e-3, 3e-3, 1e-2)}, validation=12.0,
    ),
    "paper": Preset(
        tuple(2**i for i in range(4, 15)), RetrievalSettings(steps=10000), _VARIANTS, seeds=10,
        sweep=RECORDED,
    ),
}  # fmt: skip

PUBLISHED = Published(
    title="Accuracy, %, here and in Table 1 of arXiv:2410.01104 (ten seeds; ?: second-hand)",
    lengths=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    second_hand=(32, 128, 8192),
    rows={
        "softmax": (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4),
        "softmax->adaptive_temperature": (
            98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0,
        ),
    },
)  # fmt: skip


def draw(seed: int, split: str, length: int, start: int, stop: int) -> RetrievalBatch:
    """Draw sequences, with one random uint64 for the query and one per item.

    The upper 24 bits give the query or rho. fp32 holds them exactly, so rounding changes no label.
    The lower 32 bits of an item's number give its class.
    """
    raw = words(seed, split, length, start, stop, length + 1)
    uniform = torch.from_numpy(np.ascontiguousarray(uniforms(raw)))
    return RetrievalBatch(
        features=uniform[:, 1:, None].contiguous(),
        classes=torch.from_numpy(integers(raw[:, 1:], CLASSES)),
        query=uniform[:, :1].contiguous(),
        closeness=uniform[:, 1:].contiguous(),
    )


TASK = RetrievalTask(
    name="max-retrieval",
    about="Find the item with the largest value among n, and predict its class. The largest "
    "values get closer as n grows, and so do their attention scores (Veličković et al. 2024, "
    "arXiv:2410.01104).",
    version=f"{GENERATOR}, max 1",
    draw=draw,
    sizes=(1, 1),
    presets=PRESETS,
    published=PUBLISHED,
)
