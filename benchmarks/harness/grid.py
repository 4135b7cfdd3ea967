"""The settings of a table, and their FLOP count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.cases import Setting

# Default number of tokens B·N at every length. With 16 heads, B·H·N is 2^20.
TOKENS = 2**16
# FLOP count of the backward pass (five matrix products) divided by that of the forward pass (two).
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
    """One setting per combination; the length varies fastest. B defaults to `TOKENS` / N."""
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
    """The usual FLOP count: 4·B·H·N²·D forward, 2.5 times that backward; half of both if causal.

    Normalization is not counted, so that the TFLOP/s of different variants are comparable.
    """
    scores = setting.batch * setting.heads * setting.length**2
    forward = 4.0 * scores * setting.head_dim * (0.5 if setting.causal else 1.0)
    return forward * {"forward": 1.0, "backward": BACKWARD, "both": 1.0 + BACKWARD}[direction]
