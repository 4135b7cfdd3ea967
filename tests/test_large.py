"""A large call against fp64 on 128 of its rows: the first, the last and a random run.

All 2048 rows are computed by the backend that is chosen for the size; dO is zero elsewhere, so that
the gradients of keys and values are those of the 128 rows alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from agreement import Inputs, complaints
from attnzoo.dispatch import prepare
from cases import CASES, VARIANTS, learned, rand

pytestmark = pytest.mark.slow

N, HEADS, DIM = 2048, 2, 16
RUNS = slice(0, 43), slice(1201, 1243), slice(N - 43, N)
ROWS = torch.cat([torch.arange(run.start, run.stop) for run in RUNS])
assert len(ROWS) == 128


def results(out: Tensor, leaves: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, list(leaves.values()), do)
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), **named}


def by_rows(variant: str, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The definition on the blocks of rows, which know their places and counts."""
    leaves, arguments = inputs.arguments(dtype)
    q, k, v = (arguments.pop(name) for name in "qkv")
    ready = prepare(q, k, v, variant, arguments)
    call = replace(ready.call, whole_counts=ready.call.counts)
    parts = []
    for run in RUNS:
        part, keys = call.block(slice(0, 1), slice(0, HEADS), run)
        w = ready.variant.weights(q[:, :, run], k[:, :, keys], part, **ready.params)
        parts.append(w @ v[:, :, keys])
    return results(torch.cat(parts, dim=2), leaves, inputs.do[:, :, ROWS].to(dtype))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_large_call(variant: str, window: int | None) -> None:
    rest: dict[str, Any] = {"is_causal": True, "window": window, **CASES[variant].params}
    if variant == "cosformer":
        rest["max_length"] = N
    leaves = {n: rand(1, HEADS, N, DIM, seed=i).float() for i, n in enumerate("qkv")}
    leaves.update(learned(variant, HEADS))
    if CASES[variant].positions_enter:  # as in agreement.py: no row of 0/0
        for name in "qk":
            leaves[name][..., 0] = leaves[name][..., 0].abs() + 0.5
    do = torch.zeros(1, HEADS, N, DIM)
    do[:, :, ROWS] = rand(1, HEADS, 128, DIM, seed=5).float()
    inputs = Inputs(leaves, rest, do, torch.zeros(()))
    fresh, arguments = inputs.arguments()
    backend = attnzoo.explain(variant=variant, **arguments).chosen
    assert backend in ("sdpa", "tiled", "linear")
    found = results(attnzoo.attention(variant=variant, **arguments), fresh, do)
    found["out"] = found["out"][:, :, ROWS]
    exact, naive = by_rows(variant, inputs, torch.float64), by_rows(variant, inputs, torch.float32)
    assert complaints(variant, backend, found, exact, naive, inputs) == []
