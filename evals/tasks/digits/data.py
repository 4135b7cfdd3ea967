"""The digits of scikit-learn, and what the experiments draw from them.

Everything drawn is a pure function of the seed and of a purpose, from raw Philox numbers. Numpy
guarantees that these stay the same in all its versions.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from commandline.errors import UsageError
from evals.tasks.draws import integers

CLASSES = 10
PIXELS = 64
TRAIN, TEST = 1200, 597  # the numbers of training and test images

# The second word of the generator's key.
_PURPOSES = {
    "split": 101, "noise": 102, "tail": 103, "batches": 104, "start": 105, "pool": 106,
    "tasks": 107, "replay": 108,
}  # fmt: skip


class Images(NamedTuple):
    """Images (N, 64) fp32 in [0, 1], and their classes (N,) int64."""

    pixels: Tensor
    labels: Tensor

    def at(self, index: Tensor) -> Images:
        """The images with these indices."""
        return Images(self.pixels[index], self.labels[index])

    def to(self, device: str) -> Images:
        """The same images on another device."""
        return Images(self.pixels.to(device), self.labels.to(device))


@cache
def digits() -> tuple[Images, str]:
    """All images in the order of scikit-learn, and a digest of them.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"the digits are in a package: pip install scikit-learn ({error})"
        ) from error

    greys, labels = load_digits(return_X_y=True)  # greys are whole numbers from 0 to 16
    digest = hashlib.sha256(greys.tobytes() + labels.tobytes()).hexdigest()[:16]
    return Images(torch.from_numpy(greys / 16).float(), torch.from_numpy(labels).long()), digest


def version() -> str:
    """The version of the data: the digest of the images, and of this file's rules."""
    return f"digits {digits()[1]}, draws 1"


def raw(seed: int, purpose: str, count: int) -> np.ndarray:
    """``count`` random uint64 numbers of (seed, purpose)."""
    key = np.array([seed, _PURPOSES[purpose]], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def order(seed: int, purpose: str, count: int) -> Tensor:
    """A random permutation of 0 … count − 1."""
    return torch.from_numpy(np.argsort(raw(seed, purpose, count), kind="stable"))


def split(seed: int) -> tuple[Images, Images]:
    """The training and the test images of a seed; they have no image in common."""
    images, _ = digits()
    permutation = order(seed, "split", len(images.labels))
    return images.at(permutation[TEST:]), images.at(permutation[:TEST])


def noisy(images: Images, seed: int, share: float) -> Images:
    """The images with ``share`` of the labels drawn anew, uniformly over all ten classes.

    A tenth of the drawn labels are therefore the true ones.
    """
    count = len(images.labels)
    chosen = order(seed, "noise", count)[: round(share * count)]
    # The first ``count`` numbers chose the images.
    drawn = raw(seed, "noise", count + len(chosen))[count:]
    labels = images.labels.clone()
    labels[chosen] = torch.from_numpy(integers(drawn, CLASSES))
    return Images(images.pixels, labels)


def long_tailed(images: Images, seed: int, factor: float) -> Images:
    """A part of the images, whose class counts fall exponentially by ``factor`` in total.

    The class of rank r = 0 … 9 keeps round(n · factor^(−r/9)) of its images, where n is the
    smallest class count of ``images``. The ranks of the classes depend on the seed.
    """
    ranks = order(seed, "tail", CLASSES)
    most = int(images.labels.bincount(minlength=CLASSES).min())
    indices = []
    for rank, label in enumerate(ranks.tolist()):
        count = max(1, round(most * factor ** (-rank / (CLASSES - 1))))
        indices.append((images.labels == label).nonzero()[:count, 0])
    return images.at(torch.cat(indices).sort().values)


def batches(seed: int, steps: int, size: int, count: int) -> Tensor:
    """The indices of each training step, (steps, size), drawn uniformly from 0 … count − 1."""
    drawn = integers(raw(seed, "batches", steps * size), count)
    return torch.from_numpy(drawn).view(steps, size)
