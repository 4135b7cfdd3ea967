"""Which cells a table has, how much arithmetic each is, and for how long cells are started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.harness.cases import Setting

# Tokens per head: with 16 heads, B·H·N is 2^20 at any length.
TOKENS = 2**16
# FLOP of a backward pass in those of a forward pass: five products of matrices where it has two.
BACKWARD = 2.5
MASKS = ("causal", "full")
INPUTS = ("iid", "block-sparse")


def grid(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    masks: Iterable[str] = MASKS,
    inputs: Iterable[str] = INPUTS,
    *,
    batch: int | None = None,
    **common: Any,
) -> list[Setting]:
    """All combinations, lengths innermost; the number of tokens is constant unless ``batch`` is."""
    return [
        Setting(
            length=length, head_dim=dim, causal=mask == "causal",
            block_sparse=kind == "block-sparse",
            batch=batch or max(1, TOKENS // length), **common,
        )
        for kind in inputs
        for dim in head_dims
        for mask in masks
        for length in lengths
    ]  # fmt: skip


def flops(setting: Setting, direction: str) -> float:
    """The usual count: two products of 2·N²·D per head, half of it if causal; × 2.5 backward.

    Whatever a normalizer does besides is not counted, so that a TFLOP/s of one is comparable with
    a TFLOP/s of another.
    """
    scores = setting.batch * setting.heads * setting.length**2
    forward = 4.0 * scores * setting.head_dim * (0.5 if setting.causal else 1.0)
    return forward * {"forward": 1.0, "backward": BACKWARD, "both": 1.0 + BACKWARD}[direction]


class Budget:
    """Seconds from now on after which nothing new is begun; what has begun is finished."""

    def __init__(
        self, seconds: float = float("inf"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - self.clock())

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def end_now(self) -> None:
        self.end = self.clock()
